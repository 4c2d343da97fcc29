"""The bytes that mlx.core.quantize packs weights into, and the weights in them again, by numpy alone.

Source: what mx.quantize and mx.dequantize of mlx 0.32.4 give on its CPU device, with which every byte agrees. The
arithmetic has MLX's order and precision: no step may be merged or left out.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.mlx.schemes import F16, F32, Packing
from pipeline.source.safetensors import widened
from pipeline.types import Encoding

Floats = NDArray[np.float32]
Bytes = NDArray[np.uint8]
Arrays = tuple[NDArray[Any], ...]
"""A packed matrix, in the order of names.parts: weight uint32 [rows, columns · bits / 32]; scales and, in affine mode,
biases [rows, groups] of the packing's float type (float32, float16, or bfloat16 as its bits, uint16), else uint8.
"""

CHUNK = 1 << 16
"""Weights worked on at once, so that what is made on the way stays small, and in a core's own cache."""

EPSILON = np.float32(1e-7)  # the smallest affine scale before it is fitted to the edge

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
"""Magnitudes of the codes 0 to 7; 8 to 15 are their negatives."""

E2M1_PAIRS = np.array([(low, high) for high in (*E2M1, *-E2M1) for low in (*E2M1, *-E2M1)], np.float32)
"""The two weights of a byte; the first is in its lower half."""

E4M3_LARGEST, E4M3_NORMAL = np.float32(448), np.float32(2**-6)
"""The largest magnitude, and the smallest that has all three bits of fraction."""

SUSPICIOUS = np.float32(2.0**100)
"""No model's scale is as large; all that overflowed or wrapped around are."""


def quantize(weights: Floats, packing: Packing, source: Encoding | None = None) -> Arrays:
    """The stored arrays of finite weights [rows, columns], columns a multiple of the group.

    `source` is the float type that the weights' values are of: MLX computes the scales of mxfp4, mxfp8 and nvfp4 in
    it, so these need it. An affine packing knows its own.

    Raises:
        TypeError: no `source` where the packing needs one.
    """
    rows, source = len(weights), packing.scale or source
    if source is None:
        raise TypeError(f"{packing.mode} depends on the float type of the weights: source is missing")
    groups = np.ascontiguousarray(weights).reshape(-1, packing.group)
    packed = np.empty((len(groups), packing.group * packing.bits // 8), np.uint8)
    scales: NDArray[Any] = np.empty(len(groups), np.float32 if packing.scale else np.uint8)
    biases = np.empty(len(groups) if packing.scale else 0, np.float32)
    with np.errstate(all="ignore"):  # what overflows becomes infinite, as in MLX
        for part in _chunks(len(groups), packing.group):
            if packing.scale:
                codes, scales[part], biases[part] = _affine(groups[part], packing.bits)
            else:
                codes, scales[part] = _floating(groups[part], packing, source)
            packed[part] = _packed(codes, packing.bits)
    stored = [narrow(scales, source), narrow(biases, source)] if packing.scale else [scales]
    return packed.view(np.uint32).reshape(rows, -1), *(x.reshape(rows, -1) for x in stored)


def dequantize(arrays: Arrays, packing: Packing) -> Floats:
    """Weights [rows, columns] of the stored arrays: code · scale + bias, in float32 throughout.

    Not in the scales' own float type, as mx.dequantize does by default: bfloat16 is off by up to 5e-2.
    """
    rows = len(arrays[0])
    stream = np.ascontiguousarray(arrays[0]).view(np.uint8).reshape(-1, packing.group * packing.bits // 8)
    scales = _scales(arrays[1], packing).reshape(-1, 1)
    biases = widened(arrays[2]).reshape(-1, 1) if packing.scale else None
    weights = np.empty((len(stream), packing.group), np.float32)
    with np.errstate(all="ignore"):
        for part in _chunks(len(stream), packing.group):
            np.multiply(_values(stream[part], packing), scales[part], out=weights[part])
            if biases is not None:
                weights[part] += biases[part]
    return weights.reshape(rows, -1)


def ruined(stored: NDArray[Any], arrays: Arrays, packing: Packing) -> int:
    """How many groups of weights, as `narrow` makes them, decode to what is not finite or more than twice as large.

    MLX packs without a word a group that spans more than float32 holds, and one so small (below 1e-36) that the
    exponent of an mxfp4 or mxfp8 scale wraps around to a huge one.
    """
    scales = _scales(arrays[1], packing).reshape(-1)
    suspects = np.flatnonzero(~(np.abs(scales) < SUSPICIOUS))
    if not suspects.size:
        return 0
    packed = arrays[0].reshape(len(scales), -1)[suspects]
    decoded = dequantize((packed, *(x.reshape(-1, 1)[suspects] for x in arrays[1:])), packing)
    largest = np.abs(widened(stored.reshape(len(scales), -1)[suspects])).max(1)
    return int((~(np.abs(decoded).max(1) / 2 <= largest)).sum())


def narrow(weights: Floats, encoding: Encoding) -> NDArray[Any]:
    """Rounded to a float type, ties to even, as it is stored: float32, float16, or bfloat16 as its bits, uint16.

    No NaN may be among them. What is too large becomes infinite, without a warning.
    """
    if encoding == F32:
        return weights.astype(np.float32, copy=False)
    if encoding == F16:
        with np.errstate(all="ignore"):
            return weights.astype(np.float16)
    bits = np.ascontiguousarray(weights).view(np.uint32)
    halfway = (bits >> 16 & 1) + np.uint32(0x7FFF)  # one more where the upper half is odd: a tie goes to the even
    return (bits + halfway >> 16).astype(np.uint16)


def rounded(weights: Floats, encoding: Encoding) -> Floats:
    """The values that a float type has for weights, as float32; infinite where they are too large for it."""
    return widened(narrow(weights, encoding))


def _chunks(groups: int, group: int) -> list[slice]:
    step = CHUNK // group
    return [slice(start, start + step) for start in range(0, groups, step)]


def _affine(groups: Floats, bits: int) -> tuple[Bytes, Floats, Floats]:
    """Codes [groups, group], scales and biases [groups]. Of a group's ends the one farther from zero is met exactly."""
    most = np.float32((1 << bits) - 1)
    high, low = groups.max(1), groups.min(1)
    at_low = np.abs(low) > np.abs(high)
    edge = np.where(at_low, low, high)
    scale = np.maximum((high - low) / most, EPSILON)
    np.negative(scale, out=scale, where=~at_low)
    steps = np.rint(edge / scale)  # from zero to the edge
    fitted = steps != 0
    np.divide(edge, steps, out=scale, where=fitted)
    bias = np.where(fitted, edge, np.float32(0))
    codes = groups - bias[:, None]
    codes /= scale[:, None]
    np.clip(np.rint(codes, out=codes), 0, most, out=codes)
    return codes.astype(np.uint8), scale, bias


def _floating(groups: Floats, packing: Packing, source: Encoding) -> tuple[Bytes, Bytes]:
    """Codes [groups, group] of E2M1 or E4M3, and scales [groups] that take the largest weight to the largest code:
    a power of two, rounded up, in mxfp4 and mxfp8; the nearest of E4M3 in nvfp4.
    """
    largest = E2M1[-1] if packing.bits == 4 else E4M3_LARGEST
    scale = rounded(np.abs(groups).max(1) / largest, source)
    if packing.mode == "nvfp4":
        stored = _e4m3(scale)
        divisor = e4m3_values()[stored]
        divisor[stored == 0] = np.inf  # all codes of such a group are 0
        return _e2m1(rounded(groups / divisor[:, None], source)), stored
    fraction, exponent = np.frexp(scale)  # scale = fraction · 2^exponent, 1/2 <= fraction < 1, or 0 and 0
    exponent -= fraction == 0.5
    power = np.ldexp(np.float32(1), exponent).astype(np.float32, copy=False)
    shifted = groups / power[:, None]
    stored = (exponent + 127).astype(np.uint8)  # below -127 it wraps around, as in MLX
    return (_e2m1 if packing.bits == 4 else _e4m3)(shifted), stored


def _e2m1(weights: Floats) -> Bytes:
    """Codes of the nearest values: ties toward zero, never the negative zero."""
    magnitude = np.abs(weights)
    codes = np.zeros(weights.shape, np.uint8)
    for halfway in (E2M1[:-1] + E2M1[1:]) / 2:
        codes += magnitude > halfway
    huge = magnitude > 2**24
    if huge.any():  # MLX takes the first of the least distances, and in float32 more and more of them are the same
        codes[huge] = np.abs(magnitude[huge][:, None] - E2M1).argmin(1)
    codes |= ((weights < 0) & (codes > 0)).view(np.uint8) << 3
    return codes


def _e4m3(weights: Floats) -> Bytes:
    """Codes of the nearest values: ties to even, what is too large becomes the largest."""
    bits = np.clip(weights, -E4M3_LARGEST, E4M3_LARGEST).view(np.uint32)
    sign = (bits >> 24).astype(np.uint8) & 0x80
    bits &= 0x7FFF_FFFF
    magnitude = bits.view(np.float32)
    codes = (bits + (bits >> 20 & 1) - np.uint32((120 << 23) - 0x7FFFF) >> 20).astype(np.uint8)
    with_ulp = (magnitude + np.float32(2**14)).view(np.uint32)  # of 2^-9, as the smallest codes have
    np.copyto(codes, with_ulp.astype(np.uint8), where=magnitude < E4M3_NORMAL)
    codes |= sign
    return codes


@cache
def e4m3_values() -> Floats:
    """Of every code: a sign, four bits of exponent and three of fraction; no infinity, all ones are NaN."""
    exponent, fraction = np.divmod(np.arange(128), 8)
    magnitudes = np.where(exponent == 0, fraction * 2.0**-9, (8 + fraction) * 2.0 ** (exponent - 10)).astype(np.float32)
    magnitudes[127] = np.nan
    return np.concatenate([magnitudes, -magnitudes])


def _scales(stored: NDArray[Any], packing: Packing) -> Floats:
    if packing.scale:
        return widened(stored)
    if packing.mode == "nvfp4":
        return e4m3_values().take(stored)
    with np.errstate(over="ignore"):  # 255 is infinite
        return np.ldexp(np.float32(1), stored.astype(np.int32) - 127).astype(np.float32, copy=False)


def _values(stream: Bytes, packing: Packing) -> NDArray[Any]:
    """What the codes of packed groups stand for before they are scaled, [groups, group]."""
    if packing.scale:
        return _unpacked(stream, packing.bits).reshape(-1, packing.group)
    if packing.bits == 8:
        return e4m3_values().take(stream)
    return E2M1_PAIRS.view(np.uint64).reshape(-1).take(stream).view(np.float32)


def _packed(codes: Bytes, bits: int) -> Bytes:
    """One stream of bits, the lowest first: neighbours are merged until they fill whole bytes."""
    merged: NDArray[Any] = codes.reshape(-1)
    while bits % 8:
        pairs, half = merged.view(f"<u{2 * merged.itemsize}"), 8 * merged.itemsize
        merged = pairs & ((1 << half) - 1) | pairs >> half << bits
        bits *= 2
    return _resized(merged.view(np.uint8), merged.itemsize, bits // 8).reshape(len(codes), -1)


def _unpacked(stream: Bytes, bits: int) -> Bytes:
    """The codes of a stream, one a byte: runs of whole bytes are halved until each half is one code."""
    width, size = bits, 1
    while width % 8:
        width, size = 2 * width, 2 * size
    split: NDArray[Any] = _resized(stream.reshape(-1), width // 8, size)
    while width > bits:
        whole, half = split.view(f"<u{size}"), 4 * size
        width, size = width // 2, size // 2
        split = whole & ((1 << width) - 1) | whole >> width << half
    return split.view(np.uint8)


def _resized(stream: Bytes, size: int, new: int) -> Bytes:
    """Items of `size` bytes cut, or filled up with zeros, to `new` bytes; by columns, which are few and long."""
    if size == new:
        return stream
    items = stream.reshape(-1, size)
    resized = np.zeros((len(items), new), np.uint8)
    for i in range(min(size, new)):
        resized[:, i] = items[:, i]
    return resized.reshape(-1)
