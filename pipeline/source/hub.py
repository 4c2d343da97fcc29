"""What params and flags call a checkpoint -> an open Checkpoint: a folder, or a Hub id pinned to a snapshot."""

from __future__ import annotations

from pathlib import Path

from pipeline import paths
from pipeline.errors import CheckpointError, PipelineError
from pipeline.files import read_object
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.snapshot import snapshot

EXAMPLE = "Qwen/Qwen2.5-0.5B-Instruct"


def open_checkpoint(
    checkpoint: str | Path, revision: str | None = None, problems: list[PipelineError] | None = None
) -> Checkpoint:
    """The checkpoint of a folder, or of a Hub id at a revision: a branch, tag or commit, else the main branch;
    `problems` as Checkpoint takes them.

    Raises:
        CheckpointError: a revision for a folder, a snapshot that cannot be had, or whatever Checkpoint raises.
        OutputError: the Hub's cache cannot be written.
    """
    if reads_as_id(checkpoint):
        folder, commit = snapshot(str(checkpoint), revision)
        return Checkpoint(folder, str(checkpoint), commit, problems)
    folder = Path(checkpoint)
    if isinstance(checkpoint, str) and "/" not in checkpoint and not folder.exists():
        raise CheckpointError(f"{checkpoint} is not a folder, nor a Hub id: those are ORG/NAME, as {EXAMPLE}.")
    if revision is not None and folder.is_dir():
        raise CheckpointError(f"revision is {revision!r}, but {checkpoint} is a folder: only a Hub id has revisions.")
    return Checkpoint(folder, problems=problems)


def reads_as_id(checkpoint: str | Path) -> bool:
    """Whether text is meant as ORG/NAME: whatever exists, or starts as only a path does, is a path."""
    if not isinstance(checkpoint, str) or checkpoint.count("/") != 1 or checkpoint[0] in "./~":
        return False
    return not Path(checkpoint).exists()


def fetched_revision(checkpoint: str) -> str | None:
    """The commit that the stage `fetch` pinned the checkpoint of params to: a branch may have moved on since.

    Raises:
        CheckpointError: `fetch` saw another checkpoint, or none.
    """
    source = read_object(paths.SOURCE, CheckpointError)
    name = checkpoint if reads_as_id(checkpoint) else Path(checkpoint).resolve().name
    if source.get("name") != name:
        raise CheckpointError(
            f"{paths.SOURCE} is of {source.get('name')}, params.yaml asks for {checkpoint}. Run dvc repro."
        )
    revision: str | None = source.get("revision")
    return revision
