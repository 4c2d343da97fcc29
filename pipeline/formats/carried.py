"""What an artifact that is a folder carries beside its weights: the checkpoint's tokenizer files, unchanged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from pipeline.errors import PipelineError, TokenizerError, gathered
from pipeline.files import BLOCK, reading
from pipeline.source.checkpoint import TOKENIZER_FILES, Checkpoint
from pipeline.types import ModelSpec


def files(checkpoint: Checkpoint) -> list[Path]:
    """The tokenizer files that a checkpoint has."""
    return [checkpoint.path / name for name in TOKENIZER_FILES if (checkpoint.path / name).exists()]


def check(checkpoint: Checkpoint, spec: ModelSpec, problems: list[PipelineError] | None = None) -> None:
    """Refuse a tokenizer that is not the checkpoint's; with `problems` all that is wrong with it goes there.

    Raises:
        TokenizerError: no tokenizer.json, or one of another checkpoint.
    """
    with gathered(problems):
        tokenizer = checkpoint.tokenizer
        with gathered(problems):
            tokenizer.vocabulary(spec.vocab_size)
        with gathered(problems):
            tokenizer.stop_ids(checkpoint.config)


def copy(paths: Sequence[Path], folder: Path) -> None:
    """Copies in a folder, by their names.

    Raises:
        TokenizerError: one cannot be read.
    """
    for path in paths:
        with (folder / path.name).open("wb") as file:
            for block in _blocks(path):
                file.write(block)


def _blocks(path: Path) -> Iterator[bytes]:
    with reading(path, TokenizerError):
        file = path.open("rb", buffering=0)
    with file:
        while block := file.read(BLOCK):
            yield block
