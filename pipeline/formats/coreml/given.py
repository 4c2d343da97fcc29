"""Core ML packages that others made: they are refused, since nothing is common to them that could be run."""

from __future__ import annotations

from pathlib import Path
from typing import NoReturn

from pipeline.errors import PipelineError
from pipeline.formats.coreml.schemes import SCHEMES
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact


def hashes(path: Path) -> dict[str, str]:
    """Raises: PipelineError: always."""
    _refuse(path)


def describe(path: Path, checkpoint: Checkpoint | None) -> Artifact:
    """Raises: PipelineError: always."""
    _refuse(path)


def _refuse(path: Path) -> NoReturn:
    raise PipelineError(
        f"{path}: Core ML packages that others made are not measured: each has functions, inputs and states of its "
        f"own. Give the checkpoint that it was made from, and a scheme in place of a path: {', '.join(SCHEMES)}."
    )
