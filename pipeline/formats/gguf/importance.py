"""Importance matrices of a model: made of sums over its matrices, and taken from a file to round its weights by."""

from __future__ import annotations

import os
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ParamsError
from pipeline.formats.gguf import header, imatrix
from pipeline.formats.gguf.arrange import arranged
from pipeline.formats.gguf.imatrix import Imatrix
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.schemes import Scheme
from pipeline.types import Calibration, ModelSpec, Planned, Sums, UsedImatrix


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
        datasets = (
            [("quantize.imatrix.dataset", header.text(self.imatrix.datasets[0]))] if self.imatrix.datasets else []
        )
        return [
            ("quantize.imatrix.file", header.text(self.name)),
            *datasets,
            ("quantize.imatrix.entries_count", header.uint32(len(self.imatrix.tensors))),
            ("quantize.imatrix.chunks_count", header.uint32(self.imatrix.chunks)),
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


def covered_by(sources: Container[str], spec: ModelSpec) -> set[str]:
    """The GGUF names of a model's tensors that an importance matrix will have data for which is yet to be made, of
    sums over the ModelSpec's tensors of these names.
    """
    return {part.name for part in arranged(spec) if part.source in sources}
