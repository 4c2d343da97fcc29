"""The constants of a package that no checkpoint holds: rotary tables, positions, biases that are zero."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.coreml.names import Blob, Piece, pieces
from pipeline.types import ModelSpec, Planned, Rope

if TYPE_CHECKING:
    from pipeline.formats.coreml.plan import Sizes

ROPE_COS, ROPE_SIN, POSITIONS = "rope_cos", "rope_sin", "positions"

BETA_FAST, BETA_SLOW = 32.0, 1.0  # transformers' defaults of YaRN


def tables(spec: ModelSpec, planned: Sequence[Planned], sizes: Sizes) -> dict[Blob, NDArray[Any]]:
    """Each table by its constant: rope_cos and rope_sin F32 [positions, head_dim / 2], positions INT32 [positions], and
    zeros_N F16 [N] for each size that a linear without a bias puts out.
    """
    cos, sin = rotary(spec.rope, spec.head_dim, sizes.positions)
    found: dict[Blob, NDArray[Any]] = {
        Blob(ROPE_COS, "data", "F32", cos.shape): cos,
        Blob(ROPE_SIN, "data", "F32", sin.shape): sin,
        Blob(POSITIONS, "data", "INT32", (sizes.positions,)): np.arange(sizes.positions, dtype=np.int32),
    }
    for size in sorted({*_without_bias(spec, planned)}):
        found[zeros(size)] = np.zeros(size, np.float16)
    return found


def zeros(size: int) -> Blob:
    return Blob(f"zeros_{size}", "data", "F16", (size,))


def is_linear(piece: Piece) -> bool:
    """Whether a matrix is the weight of a `linear`. That takes constants alone, and no constexpr op makes any of 16
    bits: those are dequantized by the graph, and multiplied by `matmul`.
    """
    return piece.packing is None or piece.packing.bits < 16


def rotary(rope: Rope, head_dim: int, positions: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """cos and sin, float32 [positions, head_dim / 2], times the attention factor; computed in float64, rounded once."""
    frequencies, factor = inverse_frequencies(rope, head_dim)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies  # (T, D / 2)
    return (np.cos(angles) * factor).astype(np.float32), (np.sin(angles) * factor).astype(np.float32)


def inverse_frequencies(rope: Rope, head_dim: int) -> tuple[NDArray[np.float64], float]:
    """Radians per position, float64 [head_dim / 2], and the factor of cos and sin.

    Source: transformers 5.24, modeling_rope_utils.ROPE_INIT_FUNCTIONS.
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.scaling is None:
        return plain, 1.0
    if rope.scaling == "linear":
        return plain / rope.factor, 1.0
    low = math.floor(_dimension(rope, head_dim, rope.beta_fast or BETA_FAST))
    high = math.ceil(_dimension(rope, head_dim, rope.beta_slow or BETA_SLOW))
    first, last = max(low, 0), min(high, head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - first) / (last - first or 0.001), 0, 1)
    factor = rope.attention_factor
    if factor is None:
        factor = 0.1 * math.log(rope.factor) + 1 if rope.factor > 1 else 1.0
    return plain / rope.factor * ramp + plain * (1 - ramp), factor


def _dimension(rope: Rope, head_dim: int, rotations: float) -> float:
    """Of the frequency that turns so many times within the context that the model was trained on."""
    context = rope.original_context or 0
    return head_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))


def _without_bias(spec: ModelSpec, planned: Sequence[Planned]) -> Iterator[int]:
    """Outputs of each linear that has no bias: those of attention and feed-forward, and the head's pieces."""
    roles = {tensor.role for tensor in spec.tensors}
    for matrix in planned:
        role = matrix.tensor.role
        if len(matrix.tensor.shape) < 2 or f"{role}_bias" in roles or (role == "embed" and not spec.tied):
            continue
        yield from (piece.count for piece in pieces(matrix) if is_linear(piece))
