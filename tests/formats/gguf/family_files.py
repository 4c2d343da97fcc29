"""GGUF files of tests/family.py's checkpoints, made once, and importance matrices for them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from family import tiny
from numpy.typing import NDArray

from pipeline.formats.gguf import arrange, imatrix
from pipeline.formats.gguf.write import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact, ModelSpec, Options, Sums

WITHOUT = {"embed", "head", "router", "delta_conv"}
"""Roles of matrices that llama-imatrix has no sums of, or whose weights are not rounded."""


def convert(source: Path, scheme: str, imatrix: Path | None = None) -> tuple[Path, Artifact]:
    """The file of a scheme, beside its checkpoint."""
    folder = source.parent / f"{source.name}-{scheme}{'' if imatrix is None else '-imatrix'}"
    folder.mkdir(exist_ok=True)
    with Checkpoint(source) as checkpoint:
        artifact = write(checkpoint, scheme, folder, options=Options(imatrix=imatrix))
    return folder / "model.gguf", artifact


def maker(folder: Path) -> Callable[..., Path]:
    """Checkpoints under `folder`, each made by whoever asks first."""

    made: dict[str, Path] = {}

    def make(model_type: str, **settings: Any) -> Path:
        key = repr((model_type, settings))
        if key not in made:
            made[key] = tiny(model_type, folder / f"{len(made)}" / model_type, **settings)
        return made[key]

    return make


def spec(source: Path) -> ModelSpec:
    with Checkpoint(source) as checkpoint:
        return spec_of(checkpoint.config, checkpoint.shapes)


def importance(source: Path, seed: int = 0) -> dict[str, Sums]:
    """Random sums for every matrix that llama-imatrix would have some of; a few experts were never activated."""
    rng = np.random.default_rng(seed)
    sums = {}
    for part in arrange.arranged(spec(source)):
        *several, _, columns = (1, 1, *part.tensor.shape)[-3:]
        if len(part.tensor.shape) > 1 and part.tensor.role not in WITHOUT:
            tokens = rng.integers(0, 4, several) if several[0] > 1 else np.full(1, 7)
            squares = rng.random((several[0], columns)) ** 2 * tokens[:, None]
            sums[part.name] = Sums(squares.astype(np.float32), tokens.astype(np.int64))
    return sums


def write_importance(file: Path, sums: dict[str, Sums]) -> Path:
    imatrix.write(file, imatrix.Imatrix(sums, ("a text",), 3, 64))
    return file


def of_oracle(sums: dict[str, Sums]) -> dict[str, NDArray[np.float32]]:
    """What llama-quantize makes of such a file: means, and 1 for experts without tokens."""
    return {
        name: np.stack(
            [
                squares / count if count else np.ones_like(squares)
                for squares, count in zip(s.sums, s.tokens, strict=True)
            ]
        ).astype(np.float32)
        for name, s in sums.items()
    }
