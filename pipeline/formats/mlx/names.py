"""Tensors as an MLX folder stores them: the parts of each, by name, dtype and shape."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from pipeline.formats.mlx.arrange import stored_shape
from pipeline.formats.mlx.schemes import PACKINGS
from pipeline.source.safetensors import SIZES
from pipeline.types import Planned


@dataclass(frozen=True)
class Part:
    """One tensor of a file: a packed matrix has several. `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * SIZES[self.dtype]


def parts(planned: Planned) -> list[Part]:
    """What a tensor is stored as: itself, or `.weight` packed into uint32, `.scales` and in affine mode `.biases`."""
    tensor, packing = planned.tensor, PACKINGS.get(planned.encoding)
    if packing is None:
        return [Part(tensor.name, planned.encoding.name, stored_shape(tensor))]
    *rows, columns = tensor.shape
    stem = tensor.name.removesuffix(".weight")
    groups = (*rows, columns // packing.group)
    weight = Part(tensor.name, "U32", (*rows, columns * packing.bits // 32))
    if packing.scale is None:
        return [weight, Part(f"{stem}.scales", "U8", groups)]
    return [weight, *(Part(f"{stem}.{what}", packing.scale.name, groups) for what in ("scales", "biases"))]
