"""Importance matrices of a model: made of sums over its matrices, and taken from a file to round its weights by."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ParamsError
from pipeline.formats.gguf import header, imatrix
from pipeline.formats.gguf.arrange import arranged
from pipeline.formats.gguf.imatrix import Imatrix
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.schemes import Scheme
from pipeline.types import Calibration, ModelSpec, Planned, Sums, UsedImatrix

FILE, DATASET = "quantize.imatrix.file", "quantize.imatrix.dataset"
ENTRIES, CHUNKS = "quantize.imatrix.entries_count", "quantize.imatrix.chunks_count"
"""What a model's file says of the importance matrix that it was made with (tools/quantize/quantize.cpp of llama.cpp
0c1e57098). llama-quantize cuts paths at 127 bytes, and counts no chunks where the matrix does not.
"""

LONGEST = 127


def of_sums(spec: ModelSpec, sums: Mapping[str, Sums], calibration: Calibration) -> Imatrix:
    """`sums` are by the names of the ModelSpec's tensors. A matrix that the file splits gives all its parts the same
    inputs, and one whose columns it orders anew has them ordered so.
    """
    tensors = {}
    for part in arranged(spec):
        if part.source in sums:
            found = sums[part.source]
            inputs = found.sums.astype(np.float32)
            tensors[part.name] = Sums(inputs if part.change is None else part.change(inputs), found.tokens)
    windows, context = calibration.ids.shape
    return Imatrix(tensors, (calibration.name,), windows, context, calibration)


def check_scheme(scheme: Scheme) -> None:
    """Raises: ParamsError: the scheme rounds no weights, so that an importance matrix would change nothing."""
    if not scheme.quantized:
        raise ParamsError(f"imatrix: {scheme.name} quantizes nothing, so no input weighs more. Take it away.")


@dataclass(frozen=True)
class Given:
    """An importance matrix as a model's weights are rounded by it: `values` float32 [matrices, columns] by the GGUF
    names of the tensors that it has data for.
    """

    file: Path
    imatrix: Imatrix
    values: dict[str, NDArray[np.float32]]

    @property
    def name(self) -> str:
        """The file's own, which may be no UTF-8."""
        return os.fsencode(self.file.name).decode(errors="replace")

    @property
    def pairs(self) -> list[header.Pair]:
        """What llama-quantize writes of it into the model's file, without a machine's folders."""
        datasets = [(DATASET, header.text(self.imatrix.datasets[0]))] if self.imatrix.datasets else []
        return [
            (FILE, header.text(self.name)),
            *datasets,
            (ENTRIES, header.uint32(len(self.imatrix.tensors))),
            (CHUNKS, header.uint32(self.imatrix.chunks)),
        ]

    def used(self, planned: Sequence[Planned]) -> UsedImatrix:
        """What artifact.json says of it."""
        quantized = [gguf_name(p.tensor) for p in planned if p.encoding.block > 1]
        return imatrix.used(self.file, self.imatrix, quantized, self.values)


def given(file: Path, spec: ModelSpec, scheme: Scheme) -> Given:
    """The importance matrix of a file for a model, checked.

    Raises:
        ParamsError: the scheme has no use for it.
        ArtifactError: it is no sound one, or of another model.
    """
    check_scheme(scheme)
    return fitted(file, spec)


def fitted(file: Path, spec: ModelSpec) -> Given:
    """The importance matrix of a file for a model, checked, whatever the scheme.

    Raises:
        ArtifactError: it is no sound one, or of another model.
    """
    shapes = {part.name: part.tensor.shape for part in arranged(spec) if len(part.tensor.shape) > 1}
    found = imatrix.read(file)
    imatrix.check(file, found, shapes)
    values = {
        name: found.tensors[name].importance.reshape(-1, shape[-1])
        for name, shape in shapes.items()
        if imatrix.fits(found.tensors.get(name), shape)
    }
    return Given(file, found, values)


def said(keys: Mapping[str, Any]) -> UsedImatrix | None:
    """What the keys of a model's file that others made say of its importance matrix; None where they speak of none.

    Keys that are absent, or of another type than llama-quantize writes, say nothing. Of paths on another's machine the
    last part is taken.
    """
    if not keys.keys() & {FILE, DATASET, ENTRIES, CHUNKS}:
        return None
    dataset, chunks = _last_part(keys.get(DATASET)), keys.get(CHUNKS)
    return UsedImatrix(
        datasets=() if dataset is None else (dataset,),
        chunks=chunks if type(chunks) is int and chunks > 0 else None,
        file=_last_part(keys.get(FILE)),
    )


def _last_part(path: Any) -> str | None:
    """Of a POSIX or Windows path, in one line and no longer than llama-quantize writes it; None where it has none."""
    name = re.split(r"[/\\]", path)[-1] if isinstance(path, str) else ""
    return "".join(character for character in name if character.isprintable()).strip()[:LONGEST] or None


def covered_by(sources: Container[str], spec: ModelSpec) -> set[str]:
    """The GGUF names of a model's tensors that an importance matrix will have data for which is yet to be made, of
    sums over the ModelSpec's tensors of these names.
    """
    return {part.name for part in arranged(spec) if part.source in sources}
