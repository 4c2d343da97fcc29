"""An artifact scored against its checkpoint: what the stage `evaluate` and the command line both do."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pipeline import artifact as artifacts
from pipeline import chat as chats
from pipeline import corpus as corpora
from pipeline.chat import Chat
from pipeline.errors import ArtifactError, MeasurementError
from pipeline.files import cache_folder
from pipeline.formats import room
from pipeline.metrics import parity, quality
from pipeline.models import spec_of
from pipeline.overlap import NO_OVERLAP, UNKNOWN, is_known, refuse_overlap
from pipeline.progress import progress
from pipeline.runtimes import Runtime
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hub import open_checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference, load_reference, reference_meta, write_reference
from pipeline.torch_layers import is_larger
from pipeline.types import Artifact, Scores, SourceIdentity, Windows


def evaluate(
    place: Path, artifact: Artifact, windows: Windows, reference: Reference, settings: dict[str, Any]
) -> tuple[dict[str, Any], Scores]:
    """quality.json and the scores per token of an artifact that was loaded from `place`.

    `settings` are the params' `evaluate`: threads, flash_attention, kv_type.

    Raises:
        ArtifactError: the artifact was made from other files than the reference.
        CorpusError: the windows overlap the text of the artifact's importance matrix.
        ParamsError: windows or a chat longer than the artifact takes.
        MeasurementError: the reference is of other windows, the logits cannot be true, the artifact's own runtime
            computes others than were scored, or the artifact asks in other words than the reference or does not stop
            where it would.
    """
    check_identity(place, artifact, windows, reference)

    def whole(runtime: Runtime) -> Scored:
        with progress(f"scoring {place.name}", len(windows.ids)) as advance:
            scores = quality.score(runtime, windows, reference, advance)
        return Scored(windows, scores, quality.summarize(scores, reference, windows, runtime.engine))

    return measure(place, artifact, windows.context, reference.chat, settings, whole)


@dataclass(frozen=True)
class Scored:
    """Windows, in the order of their scores, and the figures of quality.json that these give."""

    windows: Windows
    scores: Scores
    figures: dict[str, Any]


def measure(
    place: Path,
    artifact: Artifact,
    context: int,
    chat: Chat | None,
    settings: dict[str, Any],
    score: Callable[[Runtime], Scored],
) -> tuple[dict[str, Any], Scores]:
    """quality.json of what `score` finds in windows of `context` tokens, with all that is checked of any artifact.

    `chat` is the reference's.

    Raises:
        ParamsError, MeasurementError: as `evaluate`.
    """
    run = room(artifact.format, "run")
    conversation = len(chat.prompt.ids) + chats.LIMIT if chat else 0
    folder = artifacts.location(place, artifact)
    run.check_lengths(folder, artifact, context, conversation)
    _refuse_unscorable(place, artifact)
    runtime = run.open_runtime(folder, artifact, context=max(context, conversation), **settings)
    try:
        asked = chats.prompt_problem(runtime.prompt(chats.MESSAGES), chat.prompt if chat else None)
        _refuse_own(place, artifact, asked)  # before the long work
        scored = score(runtime)
        reply = None
        if chat:
            said = runtime.reply(chat.prompt.ids, chats.LIMIT)
            ended = chats.end_problem(said, chat)
            _refuse_own(place, artifact, ended)
            reply = {**chats.compare(said, chat), "problem": asked or ended}
        same = _parity(place, runtime, scored)  # last: its weights take the place of those that scored
        identity = reference_meta(_source(place, artifact), scored.windows)
        own: dict[str, Any] = {"parity": same, "reply": reply, "identity": identity, "artifact": artifact.files}
        own["calibration_overlap"] = _overlap(place, artifact, scored.windows)
        return scored.figures | own, scored.scores
    finally:
        runtime.close()


def _parity(place: Path, runtime: Runtime, scored: Scored) -> dict[str, Any] | None:
    """What the artifact's own runtime makes of the first windows; None where that scored them, or does not run
    here.
    """
    scored_by = runtime.engine.name
    if (native := runtime.native) is None:
        return None
    with progress(f"parity of {place.name}", min(parity.WINDOWS, len(scored.windows.ids))) as advance:
        return parity.check(native, scored.windows, scored.scores.logprob, scored_by, advance)


def _refuse_unscorable(place: Path, artifact: Artifact) -> None:
    if problem := room(artifact.format, "run").unscorable(artifact.weights):
        raise MeasurementError(f"{place}: {problem}")


def _refuse_own(place: Path, artifact: Artifact, problem: str | None) -> None:
    """A defect of ours is an error; what others made is measured as it is, and the report tells of it."""
    if problem and artifact.path is None:
        raise MeasurementError(f"{place}: {problem}. Convert it again.")


def _source(place: Path, artifact: Artifact) -> SourceIdentity:
    if artifact.source is None:
        raise ArtifactError(f"{place} was compared with no checkpoint. Give it the checkpoint that it was made from.")
    return artifact.source


def refuse_calibrated(place: Path, artifact: Artifact, windows: Windows) -> None:
    """Raises: CorpusError: the windows are of the text that the artifact's importance matrix was computed from."""
    if (found := artifacts.calibration(place, artifact)) is not None:
        refuse_overlap(found, windows, f"the calibration text {found.name} of {place}")


def _overlap(place: Path, artifact: Artifact, windows: Windows) -> str | None:
    """quality.json's `calibration_overlap`, of windows that were not refused."""
    if artifact.imatrix is None:
        return None
    return NO_OVERLAP if is_known(artifacts.calibration(place, artifact), windows) else UNKNOWN


def check_identity(place: Path, artifact: Artifact, windows: Windows, stored: Reference) -> None:
    """The windows are the reference's, and the artifact was made from the reference's checkpoint, by no importance
    matrix of their text.

    Raises:
        ArtifactError, MeasurementError: what differs.
        CorpusError: they overlap the text of that matrix.
    """
    refuse_calibrated(place, artifact, windows)
    found, reference = reference_meta(_source(place, artifact), windows), stored.meta
    if found["source"]["files"] != reference["source"]["files"]:
        raise ArtifactError(
            f"{place} was made from {found['source']['name']} with other files than the reference's checkpoint "
            f"{reference['source']['name']} has. Convert it again, or give the checkpoint it was made from."
        )
    problems = [
        f"{key} is {reference.get(key)}, the corpus has {found[key]}"
        for key in found
        if key not in {"source", "corpus"} and found[key] != reference.get(key)
    ]
    if problems:
        raise MeasurementError(f"the reference is of other windows: {'; '.join(problems)}. Run the reference again.")


@dataclass(frozen=True)
class Request:
    """An evaluation as a user asks for it: the artifact folder or weight file at `place` against its `checkpoint`, a
    folder or a Hub id of a `revision`.

    `corpus` is a name or the path of a UTF-8 text, which is cut into windows of `context` tokens: the first `windows`
    of them are taken, or all (None). `settings` are the params' `evaluate`: threads, flash_attention, kv_type. The
    reference is run `layer_by_layer` anyhow where it does not fit memory.
    """

    place: Path
    checkpoint: str | Path
    corpus: str
    windows: int | None
    context: int
    settings: dict[str, Any]
    revision: str | None = None
    layer_by_layer: bool = False


@dataclass(frozen=True)
class Question:
    """An artifact, the checkpoint that it was made from, and windows to compare both on. `cached` is the folder of the
    reference of these windows, whether it is there or not; `by_layers` whether it is to be run layer by layer.
    """

    place: Path
    artifact: Artifact
    checkpoint: Checkpoint
    source: SourceIdentity
    windows: Windows
    cached: Path
    by_layers: bool


@contextmanager
def asked(request: Request) -> Iterator[Question]:
    """What a request asks, all checked; the checkpoint is open meanwhile.

    Raises:
        ArtifactError: the artifact is not what it says, or was made from another checkpoint.
        CorpusError: no such corpus, or one that overlaps the text of the artifact's importance matrix.
        ParamsError: settings or a context that the artifact does not have.
    """
    place, corpus, settings = request.place, request.corpus, request.settings
    with open_checkpoint(request.checkpoint, request.revision) as checkpoint:
        spec, source = spec_of(checkpoint.config, checkpoint.shapes), checkpoint.identity()
        artifact = artifacts.load(place, checkpoint)
        if artifact.source is None or source.files != artifact.source.files:  # before the reference, which takes long
            raise ArtifactError(
                f"{place} was made from other files than {request.checkpoint} has. "
                "Give the checkpoint it was made from, or convert again."
            )
        run = room(artifact.format, "run")
        run.check_settings(settings["kv_type"], settings["flash_attention"])
        run.check_lengths(artifacts.location(place, artifact), artifact, request.context)
        _refuse_unscorable(place, artifact)
        name = corpus if corpus in corpora.NAMES else "file"
        path = corpora.text_path(name, corpus if name == "file" else None)
        windows = corpora.cut(name, path, Tokenizer(checkpoint.path), spec, request.context, request.windows)
        refuse_calibrated(place, artifact, windows)  # before the reference, which takes long
        by_layers = request.layer_by_layer or is_larger(spec)
        cached = _cached(source, windows)
        if by_layers and not cached.exists():
            cached = cached.with_name(f"{cached.name}-by-layers")  # the same, but for the reply that it lacks
        yield Question(place, artifact, checkpoint, source, windows, cached, by_layers)


def _cached(source: SourceIdentity, windows: Windows) -> Path:
    """The folder in the user's cache of the reference of these windows."""
    versions = [version(package) for package in ("torch", "transformers")]
    asked = [chats.MESSAGES, chats.LIMIT]  # a reference of an older version has no reply
    identity = json.dumps([reference_meta(source, windows), versions, platform.machine(), asked], sort_keys=True)
    return cache_folder() / "references" / hashlib.sha256(identity.encode()).hexdigest()[:24]


def evaluate_place(request: Request) -> dict[str, Any]:
    """quality.json of an artifact folder or a weight file on a corpus.

    The reference is kept in the user's cache folder by identity.

    Raises:
        ArtifactError, CorpusError, ParamsError: as `asked`.
        MeasurementError: as `evaluate`.
    """
    with asked(request) as question:
        reference = stored_reference(question)
        return evaluate(request.place, question.artifact, question.windows, reference, request.settings)[0]


def stored_reference(question: Question) -> Reference:
    """The reference of the user's cache folder, computed first where it is not there."""
    checkpoint, windows = question.checkpoint, question.windows
    if not question.cached.exists():
        with progress("reference", len(windows.ids)) as advance:
            write_reference(checkpoint, question.source, windows, question.cached, advance, question.by_layers)
    return load_reference(question.cached, checkpoint)
