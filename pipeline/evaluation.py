"""An artifact folder scored against its checkpoint: what the stage `evaluate` and the command line both do."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from pipeline import artifact as artifacts
from pipeline import corpus as corpora
from pipeline.errors import ArtifactError
from pipeline.files import cache_folder
from pipeline.formats import room
from pipeline.metrics import quality
from pipeline.models import spec_of
from pipeline.progress import progress
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference, load_reference, reference_meta, write_reference
from pipeline.types import Scores, Windows


def evaluate(
    folder: Path, windows: Windows, reference: Reference, settings: dict[str, Any]
) -> tuple[dict[str, Any], Scores]:
    """quality.json and the scores per token of an artifact, whose hash is checked first.

    `settings` are the params' `evaluate`: threads, flash_attention, kv_type.
    """
    artifact = artifacts.load(folder)
    run = room(artifact.format, "run")
    runtime = run.open_runtime(folder, artifact, context=windows.context, **settings)
    try:
        with progress(f"scoring {folder.name}", len(windows.ids)) as advance:
            scores = quality.score(runtime, windows, reference, advance)
        return quality.summarize(scores, reference, windows, runtime.engine), scores
    finally:
        runtime.close()


def evaluate_folder(
    folder: Path, checkpoint_path: Path, corpus: str, count: int | None, context: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """quality.json of an artifact on a corpus, its reference kept in the user's cache folder by identity.

    Raises:
        ArtifactError: the artifact was made from another checkpoint.
    """
    artifact = artifacts.load(folder)
    with Checkpoint(checkpoint_path) as checkpoint:
        spec, source = spec_of(checkpoint.config), checkpoint.identity()
        if source.files != artifact.source.files:
            raise ArtifactError(
                f"{folder} was made from {artifact.source.name} with other files than {checkpoint_path} has. "
                "Give the checkpoint it was made from, or convert again."
            )
        name = corpus if corpus in corpora.NAMES else "file"
        path = corpora.text_path(name, corpus if name == "file" else None)
        windows = corpora.cut(name, path, Tokenizer(checkpoint_path), spec, context, count)
        identity = json.dumps(reference_meta(source, windows), sort_keys=True)
        cached = cache_folder() / "references" / hashlib.sha256(identity.encode()).hexdigest()[:24]
        if not cached.exists():
            with progress("reference", len(windows.ids)) as advance:
                write_reference(checkpoint, source, windows, cached, advance)
        return evaluate(folder, windows, load_reference(cached, checkpoint), settings)[0]
