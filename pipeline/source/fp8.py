"""FP8 in blocks: codes of E4M3, and beside each tensor `NAME_scale_inv`, a scale for every block of its matrices.

weight = code x scale, in float32. Blocks are 128 x 128 unless config.json says otherwise; the last of a row or column
may be smaller. Layout: transformers' integrations/finegrained_fp8.py. E4M3: OCP 8-bit Floating Point Specification 1.0,
table 1: a sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

DTYPE = "F8_E4M3"
SUFFIX = "_scale_inv"
BLOCK = (128, 128)


def _values() -> NDArray[np.float32]:
    code = np.arange(256)
    sign, exponent, mantissa = np.where(code < 128, 1.0, -1.0), code >> 3 & 15, code & 7
    normal = np.ldexp(8.0 + mantissa, exponent - 10)
    found = sign * np.where(exponent == 0, np.ldexp(mantissa.astype(np.float64), -9), normal)
    found[[0x7F, 0xFF]] = np.nan
    return found.astype(np.float32)


VALUES = _values()
"""float32 [256]: what each code stands for."""


def problem(settings: Mapping[str, Any]) -> str | None:
    """Why weights that a `quantization_config` of method fp8 speaks of are not read; None where they are."""
    kind, block = settings.get("fmt", "e4m3"), settings.get("weight_block_size", BLOCK)
    if kind != "e4m3":
        return f"fmt is {kind!r}, only 'e4m3' is read"
    if block is None:
        return "weight_block_size is null: a scale for a whole tensor is not read, only one for each block"
    if not (isinstance(block, list | tuple) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)):
        return f"weight_block_size: expected two positive integers, found {block!r}"
    return None


def block_of(settings: Mapping[str, Any] | None) -> tuple[int, int]:
    """Rows and columns of a block, by a `quantization_config` in which there is no `problem`."""
    rows, columns = (settings or {}).get("weight_block_size", BLOCK)
    return rows, columns


def scales_shape(shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...] | None:
    """Of the scales of a tensor [out, in] or [experts, out, in]; None of one that is no matrix."""
    if len(shape) < 2:
        return None
    return *shape[:-2], -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def decoded(
    codes: NDArray[np.uint8], start: int, height: int, scales: NDArray[np.float32], block: tuple[int, int]
) -> NDArray[np.float32]:
    """float32 [rows, columns] of rows `start` and following, as codes [rows, columns], of matrices of `height` rows
    stored one behind the other; scales: float32 [matrices, block rows, block columns].

    The code for NaN gives NaN, and so may a scale that is not finite: that is for whoever takes the weights to refuse.
    """
    row, columns = np.arange(start, start + len(codes)), codes.shape[1]
    of_rows = scales[row // height, row % height // block[0]]
    weights = VALUES[codes]
    whole = columns // block[1]
    with np.errstate(over="ignore", invalid="ignore"):
        blocks = weights[:, : whole * block[1]].reshape(len(codes), whole, block[1])  # a view
        blocks *= of_rows[:, :whole, None]
        if whole * block[1] < columns:
            weights[:, whole * block[1] :] *= of_rows[:, whole:]
    return weights
