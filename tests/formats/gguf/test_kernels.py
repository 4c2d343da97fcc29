"""ggml's kernels through ctypes: block sizes, bytes, awkward blocks, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import gguf
import numpy as np
import pytest

from pipeline.errors import QuantizationError
from pipeline.formats.gguf import kernels
from pipeline.formats.gguf.schemes import (
    BF16,
    F16,
    F32,
    GGML_TYPES,
    IQ4_NL,
    IQ4_XS,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
)
from pipeline.types import Encoding

KNOWN = [pytest.param(encoding, id=encoding.name) for encoding in GGML_TYPES]
ENCODINGS = [pytest.param(encoding, id=encoding.name) for encoding in GGML_TYPES if encoding not in kernels.GRIDS]
"""test_importance.py has the others."""

QUANTIZED = [pytest.param(encoding, id=encoding.name) for encoding in GGML_TYPES if encoding.block > 1]
COLUMNS = 512


def random_rows(rows: int, columns: int = COLUMNS) -> np.ndarray:
    return np.random.default_rng(7).standard_normal((rows, columns), np.float32)


def zero() -> np.ndarray:
    return np.zeros((1, COLUMNS), np.float32)


def constant() -> np.ndarray:
    return np.full((1, COLUMNS), -0.37, np.float32)


def outlier() -> np.ndarray:
    weights = random_rows(1)
    weights[0, 100] = 1000 * np.abs(weights).max()
    return weights


def denormals() -> np.ndarray:
    return random_rows(1) * np.float32(1e-40)


AWKWARD = [zero, constant, outlier, denormals]


def in_one_call(encoding: Encoding, weights: np.ndarray) -> bytes:
    """ggml_quantize_chunk of the whole, through a declaration of our own."""
    lib = ctypes.CDLL(kernels.library()._name)
    chunk = lib.ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows, columns = weights.shape
    out = ctypes.create_string_buffer(rows * columns // encoding.block * encoding.block_bytes)
    written = chunk(GGML_TYPES[encoding], weights.ctypes.data, out, 0, rows, columns, None)
    assert written == len(out)
    return out.raw


def dequantized(encoding: Encoding, blocks: np.ndarray) -> np.ndarray:
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType(GGML_TYPES[encoding]))


def bound(encoding: Encoding, weights: np.ndarray) -> np.ndarray:
    """The largest |error| of each weight: one scale step of its block, and what rounding the scale to float16 adds.

    A float16 is off by 2^-11 of its value or by 2^-25, so a scale times its largest quant q is off by at most
    reach x 2^-11 + q x 2^-25. A step is the span of a block over its levels: half of it is lost by rounding; the other
    half covers the top of the two's complement range (Q4_0, Q5_0, Q3_K, Q6_K) and the rounding of sub-blocks' scales to
    4, 6 or 8 bits (K-quants). IQ4's sixteen levels lie unevenly on [-127, 113]: a step is the widest gap, 24.
    """
    if encoding is F32:
        return np.zeros_like(weights)
    if encoding is F16:
        return np.maximum(np.abs(weights) * 2.0**-11, 2.0**-25)
    if encoding is BF16:
        return np.maximum(np.abs(weights) * 2.0**-8, 2.0**-134)
    blocks = weights.reshape(-1, encoding.block).astype(np.float64)
    reach = np.abs(blocks).max(axis=1)
    if encoding in {Q4_1, Q5_1, Q2_K, Q4_K, Q5_K}:  # a scale and a minimum
        low = blocks.min(axis=1) if encoding in {Q4_1, Q5_1} else np.minimum(blocks.min(axis=1), 0)
        levels = {Q4_1: 15, Q5_1: 31, Q2_K: 3, Q4_K: 15, Q5_K: 31}[encoding]
        largest = {Q4_1: 16, Q5_1: 32, Q2_K: 15 * 4, Q4_K: 63 * 16, Q5_K: 63 * 32}[encoding]
        step = (np.maximum(blocks.max(axis=1), low) - low) / levels
        reach = 2 * reach
    else:
        uneven = 127 / 24
        step = reach / {Q4_0: 8, Q5_0: 16, Q8_0: 127, Q3_K: 4, Q6_K: 32, IQ4_NL: uneven, IQ4_XS: uneven}[encoding]
        largest = {Q4_0: 8, Q5_0: 16, Q8_0: 127, Q3_K: 32 * 4, Q6_K: 128 * 32, IQ4_NL: 127, IQ4_XS: 32 * 127}[encoding]
    each = step + reach * 2.0**-11 + largest * 2.0**-25
    return np.repeat(each, encoding.block).reshape(weights.shape)


@pytest.mark.parametrize("encoding", KNOWN)
def test_block_sizes_are_the_librarys(encoding: Encoding) -> None:
    lib = ctypes.CDLL(kernels.library()._name)
    lib.ggml_blck_size.restype, lib.ggml_type_size.restype = ctypes.c_int64, ctypes.c_size_t
    lib.ggml_type_name.restype = ctypes.c_char_p
    kind = GGML_TYPES[encoding]
    assert (encoding.block, encoding.block_bytes) == (lib.ggml_blck_size(kind), lib.ggml_type_size(kind))
    assert encoding.name.lower() == lib.ggml_type_name(kind).decode().lower()


@pytest.mark.parametrize("make", AWKWARD)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_awkward_blocks(encoding: Encoding, make: Callable[[], np.ndarray]) -> None:
    weights = make()
    blocks = kernels.quantize(encoding, weights)
    assert blocks.shape == (1, encoding.row_bytes(COLUMNS))
    assert blocks.tobytes() == in_one_call(encoding, weights)
    decoded = dequantized(encoding, blocks)
    assert decoded.shape == weights.shape
    assert np.isfinite(decoded).all()
    error = np.abs(decoded.astype(np.float64) - weights)
    assert (error <= bound(encoding, weights)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_row_of_zeros_decodes_to_zeros(encoding: Encoding) -> None:
    assert not dequantized(encoding, kernels.quantize(encoding, zero())).any()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_the_error_of_random_rows_is_within_its_bound(encoding: Encoding) -> None:
    weights = random_rows(16)
    error = np.abs(dequantized(encoding, kernels.quantize(encoding, weights)) - weights)
    assert (error <= bound(encoding, weights)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_pieces_equal_the_whole(encoding: Encoding) -> None:
    weights = np.concatenate([random_rows(7), *(make() for make in AWKWARD)])
    pieces = [kernels.quantize(encoding, weights[start:stop]).tobytes() for start, stop in ((0, 1), (1, 6), (6, 11))]
    assert b"".join(pieces) == kernels.quantize(encoding, weights).tobytes() == in_one_call(encoding, weights)


@pytest.mark.parametrize(
    "encoding", [pytest.param(e, id=e.name) for e in (F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0)]
)
def test_bytes_equal_gguf_pys_own_quantizer(encoding: Encoding) -> None:
    weights = np.concatenate([random_rows(8), zero(), constant(), outlier()])
    theirs = gguf.quants.quantize(weights, gguf.GGMLQuantizationType(GGML_TYPES[encoding]))
    assert kernels.quantize(encoding, weights).tobytes() == theirs.tobytes()


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_weights_that_are_not_finite_are_refused(encoding: Encoding, value: float) -> None:
    weights = random_rows(2)
    weights[1, 300] = value
    with pytest.raises(QuantizationError, match="not finite"):
        kernels.quantize(encoding, weights)


@pytest.mark.parametrize(
    ("encoding", "value"),
    [
        pytest.param(F16, 65520.0, id="F16"),  # halfway to 2^16, the first that float16 rounds to infinity
        pytest.param(F16, -1e5, id="F16-negative"),
        pytest.param(Q4_0, 65520.0 * 8, id="Q4_0"),  # the scale is the largest weight over 8
        pytest.param(Q5_0, 65520.0 * 16, id="Q5_0"),
        pytest.param(Q8_0, 65521.0 * 127, id="Q8_0"),
        pytest.param(Q4_1, 1e5, id="Q4_1"),
        pytest.param(Q5_1, 1e5, id="Q5_1"),
        pytest.param(Q2_K, 1e9, id="Q2_K"),
        pytest.param(Q3_K, 1e9, id="Q3_K"),
        pytest.param(IQ4_NL, 1e9, id="IQ4_NL"),
        pytest.param(IQ4_XS, 1e9, id="IQ4_XS"),
        pytest.param(Q4_K, 1e9, id="Q4_K"),
        pytest.param(Q5_K, 1e9, id="Q5_K"),
        pytest.param(Q6_K, 1e9, id="Q6_K"),
    ],
)
def test_weights_too_large_for_a_float16_are_refused(encoding: Encoding, value: float) -> None:
    weights = np.full((1, COLUMNS), value, np.float32)
    with pytest.raises(QuantizationError, match=rf"too large for {encoding.name}, up to "):
        kernels.quantize(encoding, weights)


def test_the_largest_float16_is_accepted() -> None:
    weights = np.full((1, COLUMNS), 65504.0, np.float32)
    assert (dequantized(F16, kernels.quantize(F16, weights)) == 65504.0).all()


@pytest.mark.parametrize("encoding", QUANTIZED)
def test_a_row_that_does_not_divide_is_refused(encoding: Encoding) -> None:
    weights = random_rows(2, 40)
    message = rf"rows of 40 weights do not divide into blocks of {encoding.block} \({encoding.name}\)"
    with pytest.raises(QuantizationError, match=message):
        kernels.quantize(encoding, weights)
