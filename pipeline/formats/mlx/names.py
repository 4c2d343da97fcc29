"""Tensors as an MLX folder stores them: their names, dtypes and shapes, in the order of mlx-lm's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import prod

from pipeline.formats.mlx.schemes import PACKINGS
from pipeline.types import Planned

LAYER_ORDER = (
    *("attn_q", "attn_q_bias", "attn_k", "attn_k_bias", "attn_v", "attn_v_bias", "attn_output"),
    *("attn_q_norm", "attn_k_norm", "ffn_gate", "ffn_down", "ffn_up", "attn_norm", "ffn_norm"),
)
"""Roles of a layer in the order in which mlx-lm's modules hold them (models/qwen2.py, qwen3.py): it decides which shard
a tensor goes to.
"""

BYTES = {"F32": 4, "F16": 2, "BF16": 2, "U32": 4, "U8": 1}


@dataclass(frozen=True)
class Part:
    """One tensor of a file: a packed matrix has several. `dtype` is safetensors' name."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape) * BYTES[self.dtype]


def parts(planned: Planned) -> list[Part]:
    """What a tensor is stored as: itself, or `.weight` packed into uint32, `.scales` and in affine mode `.biases`."""
    tensor, packing = planned.tensor, PACKINGS.get(planned.encoding)
    if packing is None:
        return [Part(tensor.name, planned.encoding.name, tensor.shape)]
    rows, columns = tensor.shape
    stem = tensor.name.removesuffix(".weight")
    groups = (rows, columns // packing.group)
    weight = Part(tensor.name, "U32", (rows, columns * packing.bits // 32))
    if packing.scale is None:
        return [weight, Part(f"{stem}.scales", "U8", groups)]
    return [weight, *(Part(f"{stem}.{what}", packing.scale.name, groups) for what in ("scales", "biases"))]


def ordered(planned: Iterable[Planned]) -> list[Planned]:
    """In the order of mlx-lm's parameters."""

    def place(p: Planned) -> tuple[int, int, int]:
        match p.tensor.role, p.tensor.layer:
            case "embed", _:
                return 0, 0, 0
            case "output_norm", _:
                return 2, 0, 0
            case "head", _:
                return 3, 0, 0
            case role, layer:
                return 1, layer or 0, LAYER_ORDER.index(role)

    return sorted(planned, key=place)
