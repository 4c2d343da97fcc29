"""What params and flags call a checkpoint -> an open Checkpoint: a folder, or a Hub id pinned to a snapshot."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import CheckpointError
from pipeline.source.checkpoint import Checkpoint


def open_checkpoint(checkpoint: str | Path, revision: str | None = None) -> Checkpoint:
    """The checkpoint of a folder.

    Raises:
        CheckpointError: a revision for a folder, or whatever Checkpoint raises.
    """
    folder = Path(checkpoint)
    if revision is not None:
        raise CheckpointError(f"revision is {revision!r}, but {checkpoint} is a folder: only a Hub id has revisions.")
    return Checkpoint(folder)
