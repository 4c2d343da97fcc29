"""Weights as the constants of a package hold them, and the weights in them again, by numpy alone.

Linear: a code times its scale, symmetric about zero. Scales equal coremltools 9.0's (optimize/_utils.py,
quantize_weight_by_dtype, of float16 weights) but where those lose the weights: it rounds a scale below float16's
normal numbers far down or to zero, and one near the largest so far up that codes decode to infinity. Codes are the
nearest to the float32 weights; coremltools divides in float16 first, and so takes the second nearest of some.
Palettes: see palette.py.
"""

from __future__ import annotations

from math import gcd
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import QuantizationError
from pipeline.formats.coreml.names import BITS
from pipeline.formats.coreml.palette import palettize
from pipeline.formats.coreml.schemes import Packing

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]

OVERFLOW = np.float32(65520)
"""The least magnitude that float16 rounds to infinity."""

TYPES: dict[str, type[np.generic]] = {
    "F32": np.float32,
    "F16": np.float16,
    "INT32": np.int32,
    "INT16": np.int16,
    "INT8": np.int8,
    "INT4": np.int8,
    "UINT6": np.uint8,
    "UINT4": np.uint8,
}
"""What numpy holds a blob's values as."""


def pack(codes: NDArray[Any], bits: int) -> Bytes:
    """The bytes of codes of 4, 6, 8 or 16 bits: those of less than a byte lie bit to bit, the lowest first."""
    flat = np.ascontiguousarray(codes).reshape(-1)
    if bits >= 8:
        return flat.view(np.uint8)
    together = 8 // gcd(bits, 8)  # codes that fill whole bytes
    low = np.zeros(-(-flat.size // together) * together, np.uint8)
    low[: flat.size] = flat.view(np.uint8)
    low &= (1 << bits) - 1
    if bits == 4:
        packed: NDArray[Any] = low[::2] | low[1::2] << 4
    else:
        one, two, three, four = low.reshape(-1, 4).T
        packed = np.stack([one | two << 6, two >> 2 | three << 4, three >> 4 | four << 2], axis=1).reshape(-1)
    return packed[: -(-flat.size * bits // 8)]


def unpack(data: Bytes, count: int, dtype: str) -> NDArray[Any]:
    """The `count` values of a blob of a type of names.BITS, from its bytes, as TYPES has them."""
    bits = BITS[dtype]
    if bits >= 8:
        return data.view(TYPES[dtype])[:count]
    if bits == 4:
        codes = np.stack([data & 15, data >> 4], axis=1).reshape(-1)[:count]
        return codes if dtype == "UINT4" else (codes ^ 8).view(np.int8) - np.int8(8)  # the sign is the highest bit
    whole = np.zeros(-(-data.size // 3) * 3, np.uint8)
    whole[: data.size] = data
    one, two, three = whole.reshape(-1, 3).T
    codes = np.stack([one, one >> 6 | two << 2, two >> 4 | three << 4, three >> 2], axis=1).reshape(-1)[:count]
    codes &= 63
    return codes


def narrow(weights: Floats, dtype: str) -> NDArray[Any]:
    """As float type F16 or F32 stores them, rounded to nearest, ties to even.

    Raises:
        QuantizationError: weights that are not finite, or that float16 would make infinite.
    """
    _check(weights, np.float32(np.inf) if dtype == "F32" else OVERFLOW)
    return weights.astype(TYPES[dtype])


def quantize(weights: Floats, packing: Packing) -> tuple[NDArray[Any], NDArray[Any]]:
    """Codes [rows, columns], and scales [rows, blocks] or tables [groups, 1, 2^bits, 1].

    A code's weight is within half a step (its scale) of the one it stands for, and never the farther from zero by more
    than that: what is nearer to zero than half a step becomes zero.

    Raises:
        QuantizationError: weights that are not finite, or that float16 would make infinite: a package computes in it.
    """
    _check(weights, OVERFLOW)
    if packing.scale is None:
        return palettize(weights, packing.bits, packing.group or len(weights))
    rows, columns = weights.shape
    blocks = weights.reshape(rows, -1, packing.block or columns)
    most = np.float32((1 << packing.bits - 1) - 1)
    scale = _scales(np.abs(blocks).max(2), most, packing.scale)
    codes = blocks / scale.astype(np.float32)[:, :, None]
    np.clip(np.rint(codes, out=codes), -most, most, out=codes)
    return codes.astype(TYPES[packing.data]).reshape(weights.shape), scale


def _scales(largest: Floats, most: np.float32, dtype: str) -> NDArray[Any]:
    """The scale of blocks by their largest magnitudes: that over the largest code, rounded to `dtype`.

    It is taken one step up where rounding would leave the largest beyond half a step from any code, which only
    denormals do, and one step down where the largest code would decode to what float16 has not. 1 for zeros.
    """
    kind = np.float32 if dtype == "F32" else np.float16
    scale = (largest / most).astype(kind)
    wide = scale.astype(np.float32)
    np.copyto(scale, np.nextafter(scale, kind(np.inf)), where=largest > (most + np.float32(0.5)) * wide)
    np.copyto(scale, np.nextafter(scale, kind(0)), where=most * wide >= OVERFLOW)
    scale[largest == 0] = 1
    return scale


def encode(weights: Floats, packing: Packing | None, dtype: str) -> list[NDArray[Any]]:
    """The data of a matrix's blobs, in the order of names.Piece: packed codes, and scales or tables; floats of `dtype`
    where it has no packing.

    Raises:
        QuantizationError: see `quantize` and `narrow`.
    """
    if packing is None:
        return [narrow(weights, dtype)]
    codes, other = quantize(weights, packing)
    return [pack(codes, packing.bits), other]


def dequantize(codes: NDArray[Any], other: NDArray[Any]) -> Floats:
    """Weights, unrounded, of codes and their scales or tables.

    Scales have the codes' dimensions, each a divisor of theirs: code · scale of its block, exact in float32 where
    these are float16. Tables have two more, [.., 2^bits, 1]: the entry of the table of the code's block.
    """
    sizes = [size // have for size, have in zip(codes.shape, other.shape[: codes.ndim], strict=True)]
    if other.ndim == codes.ndim:
        split = [n for have, size in zip(other.shape, sizes, strict=True) for n in (have, size)]
        scale = other.astype(np.float32).reshape([n for have in other.shape for n in (have, 1)])
        return np.multiply(codes.reshape(split), scale, dtype=np.float32).reshape(codes.shape)
    weights = np.empty(codes.shape, np.float32)
    tables = other.astype(np.float32)[..., 0]
    for block in np.ndindex(tables.shape[:-1]):
        part = tuple(slice(at * size, (at + 1) * size) for at, size in zip(block, sizes, strict=True))
        weights[part] = tables[block].take(codes[part])
    return weights


def _check(weights: Floats, limit: np.float32) -> None:
    if np.abs(weights).max(initial=0) < limit:  # false where there is a NaN
        return
    if not np.isfinite(weights).all():
        raise QuantizationError("weights that are not finite", int((~np.isfinite(weights)).sum()))
    raise QuantizationError("weights too large for float16", int((np.abs(weights) >= limit).sum()))
