"""libggml-base through ctypes: the quantization kernels llama-quantize runs, and the declarations of its GGUF reader.

ctypes lets go of the interpreter lock during a call, so threads over blocks of rows scale. Declarations:
ggml/include/ggml.h and gguf.h. ggml aborts the process on bad input; nothing reaches it here that was not checked.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import QuantizationError
from pipeline.formats.gguf import probe
from pipeline.formats.gguf.schemes import (
    ASSERT_IMPORTANCE,
    GGML_TYPES,
    IQ1_M,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
)
from pipeline.types import Encoding

GRIDS = {IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S}
"""Encodings of points on a grid, at which ggml ends the process where it finds none."""

LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
"""ggml_log_callback: level, text, user data."""


class GgufInit(ctypes.Structure):
    """gguf_init_params (gguf.h): with no_alloc, tensor data is not read."""

    _fields_ = [("no_alloc", ctypes.c_bool), ("ctx", ctypes.c_void_p)]


@cache
def library() -> ctypes.CDLL:
    """libggml-base of the installed llama-cpp-python.

    Raises:
        PipelineError: llama-cpp-python is not installed, or was built for another machine.
    """
    lib = ctypes.CDLL(str(probe.library(probe.libraries(), "ggml-base")))
    pointer, size, i64 = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64
    for name, result, arguments in (
        ("ggml_quantize_chunk", size, [ctypes.c_int, pointer, pointer, i64, i64, i64, pointer]),
        ("ggml_validate_row_data", ctypes.c_bool, [ctypes.c_int, pointer, size]),
        ("ggml_log_get", None, [ctypes.POINTER(LOG), ctypes.POINTER(pointer)]),
        ("ggml_log_set", None, [LOG, pointer]),
        ("gguf_init_from_file", pointer, [ctypes.c_char_p, GgufInit]),
        ("gguf_free", None, [pointer]),
        ("gguf_get_data_offset", size, [pointer]),
        ("gguf_get_n_kv", i64, [pointer]),
        ("gguf_get_key", ctypes.c_char_p, [pointer, i64]),
        ("gguf_find_key", i64, [pointer, ctypes.c_char_p]),
        ("gguf_get_kv_type", ctypes.c_int, [pointer, i64]),
        ("gguf_get_val_str", ctypes.c_char_p, [pointer, i64]),
        ("gguf_get_val_data", pointer, [pointer, i64]),
        ("gguf_get_arr_type", ctypes.c_int, [pointer, i64]),
        ("gguf_get_arr_n", size, [pointer, i64]),
        ("gguf_get_arr_data", pointer, [pointer, i64]),
        ("gguf_get_arr_str", ctypes.c_char_p, [pointer, i64, size]),
        ("gguf_get_n_tensors", i64, [pointer]),
        ("gguf_get_tensor_ne", ctypes.POINTER(i64), [pointer, i64]),
        ("gguf_get_tensor_name", ctypes.c_char_p, [pointer, i64]),
        ("gguf_get_tensor_type", ctypes.c_int, [pointer, i64]),
        ("gguf_get_tensor_offset", size, [pointer, i64]),
        ("gguf_get_tensor_size", size, [pointer, i64]),
        ("ggml_type_name", ctypes.c_char_p, [ctypes.c_int]),
        ("ggml_blck_size", i64, [ctypes.c_int]),
        ("ggml_type_size", size, [ctypes.c_int]),
    ):
        function = getattr(lib, name)
        function.restype, function.argtypes = result, arguments
    return lib


@contextmanager
def words() -> Iterator[list[str]]:
    """What the library logs meanwhile, instead of the terminal or engine's log: it may or may not be the copy of ggml
    that llama.cpp has loaded.
    """
    lib = library()
    said: list[str] = []
    keep = LOG(lambda level, text, data: said.append(text.decode(errors="replace").strip()))
    before, data = LOG(), ctypes.c_void_p()
    lib.ggml_log_get(ctypes.byref(before), ctypes.byref(data))
    lib.ggml_log_set(keep, None)
    try:
        yield said
    finally:
        lib.ggml_log_set(before, data)


def quantize(
    encoding: Encoding, weights: NDArray[np.float32], importance: NDArray[np.float32] | None = None
) -> NDArray[np.uint8]:
    """Blocks uint8 [rows, row bytes] of float32 [rows, columns], as `ggml_quantize_chunk` makes them.

    importance: of each column, float32 [columns], finite and not negative; some encodings cannot do without.

    Raises: QuantizationError: a row does not divide into blocks, a weight is not finite, or too large for the
        encoding's scale; no importance where ggml would end the process.
    """
    rows, columns = weights.shape
    if columns % encoding.block:
        raise QuantizationError(
            f"rows of {columns} weights do not divide into blocks of {encoding.block} ({encoding.name})"
        )
    if importance is None and encoding in ASSERT_IMPORTANCE:
        raise QuantizationError(f"{encoding.name} needs an importance matrix")
    if importance is not None and not _is_importance(importance, columns):
        raise QuantizationError(f"importance that is not one finite value of at least 0 for each of {columns} columns")
    if not np.isfinite(weights).all():
        raise QuantizationError("weights that are not finite")
    if encoding in GRIDS and _overflows(weights, importance):
        raise _too_large(encoding, weights, importance)
    blocks = np.empty((rows, encoding.row_bytes(columns)), np.uint8)
    kind, lib = GGML_TYPES[encoding], library()
    given = None if importance is None else np.ascontiguousarray(importance, np.float32)
    pointer = None if given is None else given.ctypes.data
    lib.ggml_quantize_chunk(kind, weights.ctypes.data, blocks.ctypes.data, 0, rows, columns, pointer)
    if not lib.ggml_validate_row_data(kind, blocks.ctypes.data, blocks.nbytes):
        raise _too_large(encoding, weights, importance)
    return blocks


def _too_large(
    encoding: Encoding, weights: NDArray[np.float32], importance: NDArray[np.float32] | None
) -> QuantizationError:
    what = "weights" if importance is None else "weights or their importance"
    return QuantizationError(f"{what} too large for {encoding.name}, up to {np.abs(weights).max():g}")


def _is_importance(importance: NDArray[np.float32], columns: int) -> bool:
    return importance.shape == (columns,) and bool(np.isfinite(importance).all() and importance.min() >= 0)


def _overflows(weights: NDArray[np.float32], importance: NDArray[np.float32] | None) -> bool:
    """Whether a search of a grid could meet an infinite sum of importance x weights^2, which ends the process. Far from
    what has a use: scales are float16.
    """
    peak, most = float(np.abs(weights).max(initial=0)), 1.0 if importance is None else float(importance.max())
    return peak > 1e9 or peak**2 * most > 1e34
