"""Tensors as a package stores them: the constants of its weight files, by the names that its program gives them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from pipeline.formats.coreml.schemes import PACKINGS, Packing
from pipeline.types import Planned

BITS = {"F32": 32, "F16": 16, "INT32": 32, "INT16": 16, "INT8": 8, "INT4": 4, "UINT6": 6, "UINT4": 4}

MOST_ROWS = 16_384
"""Of one part of the embedding and of the head: what is longer, the Neural Engine does not take."""

PART_MULTIPLE = 16  # a palette's group lies in one part


@dataclass(frozen=True)
class Blob:
    """A constant of a weight file: `dtype` is one of BITS. `data`, `scale` or `lut` is its `kind`."""

    name: str
    kind: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        """Bytes, codes packed bit to bit."""
        return -(-prod(self.shape) * BITS[self.dtype] // 8)


@dataclass(frozen=True)
class Piece:
    """Rows [start, start + count) of a tensor, which the program holds as one weight called `name`; a vector is one
    row. `packing` is None where they are floats, which `blobs` then has one of; else codes, and scales or a table.
    """

    name: str
    planned: Planned
    start: int
    count: int
    packing: Packing | None
    blobs: tuple[Blob, ...]


def pieces(planned: Planned) -> list[Piece]:
    """A tensor in one piece; the embedding and the head in as many equal ones as MOST_ROWS asks for."""
    tensor = planned.tensor
    stem = tensor.name.replace(".", "_")
    if len(tensor.shape) == 1:
        return [Piece(stem, planned, 0, 1, None, (Blob(stem, "data", planned.encoding.name, tensor.shape),))]
    rows, columns = tensor.shape
    count = -(-rows // MOST_ROWS) if tensor.role in {"embed", "head"} else 1
    step = rows if count == 1 else -(-rows // count // PART_MULTIPLE) * PART_MULTIPLE
    starts = range(0, rows, step)
    return [
        _piece(stem if len(starts) == 1 else f"{stem}_{i}", planned, start, min(step, rows - start), columns)
        for i, start in enumerate(starts)
    ]


def _piece(name: str, planned: Planned, start: int, rows: int, columns: int) -> Piece:
    packing = PACKINGS.get(planned.encoding.name)
    return Piece(name, planned, start, rows, packing, tuple(_blobs(name, planned, rows, columns, packing)))


def _blobs(name: str, planned: Planned, rows: int, columns: int, packing: Packing | None) -> Iterable[Blob]:
    if packing is None:
        yield Blob(name, "data", planned.encoding.name, (rows, columns))
        return
    yield Blob(f"{name}_data", "data", packing.data, (rows, columns))
    if packing.scale is not None:
        yield Blob(f"{name}_scale", "scale", packing.scale, (rows, columns // packing.block if packing.block else 1))
    else:
        yield Blob(f"{name}_lut", "lut", "F16", (rows // (packing.group or 1), 1, 2**packing.bits, 1))
