"""ggml's kernels with the importance of each input: bytes, awkward importance, and what is refused."""

from __future__ import annotations

import ctypes

import gguf
import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.errors import QuantizationError
from pipeline.formats.gguf import kernels
from pipeline.formats.gguf.schemes import (
    GGML_TYPES,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_XS,
    Q2_K,
    Q4_0,
    Q4_K,
    Q6_K,
    Q8_0,
)
from pipeline.types import Encoding

COLUMNS = 512
ROWS = np.random.default_rng(7).standard_normal((3, COLUMNS), np.float32)
ENCODINGS = [pytest.param(encoding, id=encoding.name) for encoding in (Q4_0, Q2_K, Q4_K, Q6_K, IQ4_XS, IQ3_XXS, IQ2_XS)]
# IQ2_S and IQ1_M have tables that take seconds to make: test_family_oracle.py has them
GRIDS = [pytest.param(encoding, id=encoding.name) for encoding in (IQ3_S, IQ3_XXS, IQ2_XS, IQ2_XXS)]


def varied() -> NDArray[np.float32]:
    return np.random.default_rng(1).random(COLUMNS, np.float32) ** 4


def no_input() -> NDArray[np.float32]:
    return np.zeros(COLUMNS, np.float32)


def one_input() -> NDArray[np.float32]:
    return np.eye(1, COLUMNS, 300, dtype=np.float32)[0]


def no_input_of_a_block() -> NDArray[np.float32]:
    return np.repeat(np.array([0, 1], np.float32), 256)


def far_apart() -> NDArray[np.float32]:
    return (10.0 ** np.random.default_rng(2).uniform(-30, 6, COLUMNS)).astype(np.float32)


AWKWARD = [varied, no_input, one_input, no_input_of_a_block, far_apart]


def in_one_call(encoding: Encoding, weights: NDArray[np.float32], importance: NDArray[np.float32]) -> bytes:
    """ggml_quantize_chunk through a declaration of our own."""
    chunk = ctypes.CDLL(kernels.library()._name).ggml_quantize_chunk
    chunk.restype = ctypes.c_size_t
    chunk.argtypes = [ctypes.c_int, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * 3, ctypes.c_void_p]
    rows, columns = weights.shape
    out = ctypes.create_string_buffer(rows * encoding.row_bytes(columns))
    chunk(GGML_TYPES[encoding], weights.ctypes.data, out, 0, rows, columns, importance.ctypes.data)
    return out.raw


def dequantized(encoding: Encoding, blocks: NDArray[np.uint8]) -> NDArray[np.float32]:
    return gguf.dequantize(blocks, gguf.GGMLQuantizationType(GGML_TYPES[encoding]))


@pytest.mark.parametrize("make", AWKWARD)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_bytes_are_ggmls_and_finite(encoding: Encoding, make: object) -> None:
    assert callable(make)
    importance = make()
    blocks = kernels.quantize(encoding, ROWS, importance)
    assert blocks.tobytes() == in_one_call(encoding, ROWS, importance)
    assert np.isfinite(dequantized(encoding, blocks)).all()


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_importance_lowers_the_error_that_it_weighs(encoding: Encoding) -> None:
    importance = varied()
    other = importance[::-1].copy()
    errors = [
        float((importance * (dequantized(encoding, kernels.quantize(encoding, ROWS, given)) - ROWS) ** 2).sum())
        for given in (importance, other)
    ]
    assert errors[0] < errors[1]


@pytest.mark.parametrize(("encoding", "most"), [(IQ3_S, 0.148), (IQ3_XXS, 0.202), (IQ2_XS, 0.326), (IQ2_XXS, 0.375)])
def test_the_error_of_encodings_on_a_grid(encoding: Encoding, most: float) -> None:
    """Root mean square over that of the weights: measured, with a tenth of room."""
    decoded = dequantized(encoding, kernels.quantize(encoding, ROWS, np.ones(COLUMNS, np.float32)))
    error = float(np.sqrt(((decoded - ROWS) ** 2).mean() / (ROWS**2).mean()))
    assert most * 0.8 < error < most


@pytest.mark.parametrize("encoding", [IQ2_XXS, IQ2_XS])
def test_what_ggml_makes_only_by_importance_is_refused_without(encoding: Encoding) -> None:
    with pytest.raises(QuantizationError, match=f"{encoding.name} needs an importance matrix"):
        kernels.quantize(encoding, ROWS)


@pytest.mark.parametrize("scale", [1e10, 1e15, 1e25])
@pytest.mark.parametrize("encoding", GRIDS)
def test_weights_that_no_search_of_a_grid_could_end_at_are_refused(encoding: Encoding, scale: float) -> None:
    """From 1e15 on, ggml would end the process."""
    with pytest.raises(QuantizationError, match=f"too large for {encoding.name}, up to "):
        kernels.quantize(encoding, ROWS * np.float32(scale), np.ones(COLUMNS, np.float32))


@pytest.mark.parametrize("encoding", GRIDS)
def test_importance_that_no_search_of_a_grid_could_end_at_is_refused(encoding: Encoding) -> None:
    with pytest.raises(QuantizationError, match=f"weights or their importance too large for {encoding.name}"):
        kernels.quantize(encoding, ROWS, np.full(COLUMNS, 1e38, np.float32))
    kernels.quantize(encoding, ROWS, np.full(COLUMNS, 1e30, np.float32))


@pytest.mark.parametrize("value", [np.nan, np.inf, -1.0])
def test_importance_that_is_none_is_refused(value: float) -> None:
    importance = varied()
    importance[5] = value
    with pytest.raises(QuantizationError, match="not one finite value of at least 0 for each of 512 columns"):
        kernels.quantize(Q8_0, ROWS, importance)


def test_importance_of_other_columns_is_refused() -> None:
    with pytest.raises(QuantizationError, match="for each of 512 columns"):
        kernels.quantize(Q4_K, ROWS, np.ones(256, np.float32))
