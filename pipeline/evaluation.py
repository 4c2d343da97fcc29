"""An artifact folder scored against its checkpoint: what the stage `evaluate` and the command line both do."""

from __future__ import annotations

import hashlib
import json
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline import artifact as artifacts
from pipeline import chat as chats
from pipeline import corpus as corpora
from pipeline.errors import ArtifactError, MeasurementError
from pipeline.files import cache_folder
from pipeline.formats import room
from pipeline.metrics import quality
from pipeline.models import spec_of
from pipeline.progress import progress
from pipeline.source.hub import open_checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference, load_reference, reference_meta, write_reference
from pipeline.types import Scores, Windows


def evaluate(
    folder: Path, windows: Windows, reference: Reference, settings: dict[str, Any]
) -> tuple[dict[str, Any], Scores]:
    """quality.json and the scores per token of an artifact, whose hash is checked first.

    `settings` are the params' `evaluate`: threads, flash_attention, kv_type.

    Raises:
        ArtifactError: the artifact is not what it says, or was made from other files than the reference.
        MeasurementError: the reference is of other windows, the logits cannot be true, or the artifact asks in other
            words than the reference or does not stop where it would.
    """
    artifact = artifacts.load(folder)
    identity = reference_meta(artifact.source, windows)
    _check_identity(folder, identity, reference.meta)
    run, chat = room(artifact.format, "run"), reference.chat
    context = max(windows.context, len(chat.prompt.ids) + chats.LIMIT if chat else 0)
    runtime = run.open_runtime(folder, artifact, context=context, **settings)
    try:
        chats.check_prompt(runtime.prompt(chats.MESSAGES), chat.prompt if chat else None)  # before the long work
        with progress(f"scoring {folder.name}", len(windows.ids)) as advance:
            scores = quality.score(runtime, windows, reference, advance)
        figures = quality.summarize(scores, reference, windows, runtime.engine)
        reply = chats.compare(runtime.reply(chat.prompt.ids, chats.LIMIT), chat) if chat else None
        return figures | {"reply": reply, "identity": identity, "artifact": artifact.files}, scores
    finally:
        runtime.close()


def _check_identity(folder: Path, found: dict[str, Any], reference: dict[str, Any]) -> None:
    """The windows are the reference's, and the artifact was made from the reference's checkpoint."""
    if found["source"]["files"] != reference["source"]["files"]:
        raise ArtifactError(
            f"{folder} was made from {found['source']['name']} with other files than the reference's checkpoint "
            f"{reference['source']['name']} has. Convert it again, or give the checkpoint it was made from."
        )
    problems = [
        f"{key} is {reference.get(key)}, the corpus has {found[key]}"
        for key in found
        if key not in {"source", "corpus"} and found[key] != reference.get(key)
    ]
    if problems:
        raise MeasurementError(f"the reference is of other windows: {'; '.join(problems)}. Run the reference again.")


def evaluate_folder(
    folder: Path,
    checkpoint_name: str | Path,
    corpus: str,
    count: int | None,
    context: int,
    settings: dict[str, Any],
    revision: str | None = None,
) -> dict[str, Any]:
    """quality.json of an artifact on a corpus, its reference kept in the user's cache folder by identity.

    Raises:
        ArtifactError: the artifact was made from another checkpoint.
    """
    with open_checkpoint(checkpoint_name, revision) as checkpoint:
        spec, source = spec_of(checkpoint.config), checkpoint.identity()
        if source.files != artifacts.load(folder).source.files:  # before the reference, which takes long
            raise ArtifactError(
                f"{folder} was made from other files than {checkpoint_name} has. "
                "Give the checkpoint it was made from, or convert again."
            )
        name = corpus if corpus in corpora.NAMES else "file"
        path = corpora.text_path(name, corpus if name == "file" else None)
        windows = corpora.cut(name, path, Tokenizer(checkpoint.path), spec, context, count)
        versions = [version(package) for package in ("torch", "transformers")]
        asked = [chats.MESSAGES, chats.LIMIT]  # a reference of an older version has no reply
        identity = json.dumps([reference_meta(source, windows), versions, platform.machine(), asked], sort_keys=True)
        cached = cache_folder() / "references" / hashlib.sha256(identity.encode()).hexdigest()[:24]
        if not cached.exists():
            with progress("reference", len(windows.ids)) as advance:
                write_reference(checkpoint, source, windows, cached, advance)
        return evaluate(folder, windows, load_reference(cached, checkpoint), settings)[0]
