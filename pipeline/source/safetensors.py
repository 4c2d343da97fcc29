"""The safetensors format: a header of 8 + n bytes, then raw little-endian tensors.

Format: https://github.com/huggingface/safetensors#format. Read by our own code since the library's numpy mode refuses
bfloat16 and maps whole files; here a block of rows is one `pread`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import CheckpointError, unreadable

BYTES = {"F32": 4, "F16": 2, "BF16": 2}
"""Bytes per weight of the dtypes that are read."""

SIZES = {**BYTES, "U32": 4, "U8": 1, "F8_E4M3": 1}
"""Bytes per element of those, and of what packed weights are stored as."""

DTYPES: Mapping[str, str] = {
    **{"F32": "<f4", "F16": "<f2", "BF16": "<u2"},
    **{"U32": "<u4", "U8": "u1", "F8_E4M3": "u1"},
}
"""NumPy's names, by safetensors'; bfloat16 and FP8 as their bits."""

MAX_HEADER = 100_000_000  # the library's own limit


@dataclass(frozen=True)
class Stored:
    """A tensor in a file: `dtype` is safetensors' name, `offset` counts from the start of the file."""

    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    size: int


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, by name.

    Raises:
        CheckpointError: the file is absent, cut short, or its header contradicts itself.
    """
    try:
        length = path.stat().st_size
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if length < 8 or size > min(length - 8, MAX_HEADER):
                raise CheckpointError(
                    f"{path}: not a safetensors file: header of {size} bytes in a file of {length}. Fetch it again."
                )
            header = json.loads(file.read(size))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}. {unreadable(error)}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not JSON ({error}). Fetch the file again.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is no JSON object. Fetch the file again.")
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, 8 + size, length) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: Any, data: int, length: int) -> Stored:
    match entry:
        case {"dtype": str(dtype), "shape": [*extents], "data_offsets": [begin, end]} if (
            all(type(number) is int for number in (*extents, begin, end)) and min(extents, default=0) >= 0
        ):
            shape = tuple(extents)
        case _:
            raise CheckpointError(
                f"{path}: the header entry of {name} is malformed: {str(entry)[:200]}. Fetch the file again."
            )
    stored = Stored(path, dtype, shape, data + begin, end - begin)
    if not 0 <= begin <= end <= length - data:
        raise CheckpointError(
            f"{path}: {name} lies at bytes {stored.offset} to {data + end}, the file has {length}. "
            "It is cut short: fetch it again."
        )
    if dtype in SIZES:
        expected = SIZES[dtype]
        for extent in shape:
            expected *= extent
        if stored.size != expected:
            raise CheckpointError(
                f"{path}: {name} {list(shape)} {dtype} needs {expected} bytes, the header gives it {stored.size}. "
                "Fetch the file again."
            )
    return stored


def widened(stored: NDArray[Any]) -> NDArray[np.float32]:
    """float32 of float32, of float16, or of bfloat16 as its bits, uint16; exact, since it holds all their values."""
    if stored.dtype == np.uint16:  # the upper half of a float32
        bits = stored.astype(np.uint32)
        bits <<= 16
        return bits.view(np.float32)
    return stored.astype(np.float32, copy=False)


def pread(descriptor: int, size: int, offset: int) -> bytes:
    """Exactly `size` bytes from `offset`; safe to call from several threads.

    Raises:
        CheckpointError: the file ends before, or cannot be read.
    """
    data = _pread(descriptor, size, offset)
    while len(data) < size:
        more = _pread(descriptor, size - len(data), offset + len(data))
        if not more:
            raise CheckpointError(
                f"a checkpoint file ended at byte {offset + len(data)} while it was read: is it being changed? "
                "Run it again when it is whole."
            )
        data += more
    return data


def _pread(descriptor: int, size: int, offset: int) -> bytes:
    try:
        return os.pread(descriptor, size, offset)
    except OSError as error:  # it names no file
        raise CheckpointError(
            f"a checkpoint file cannot be read at byte {offset}: {error.strerror}. Check the disk it lies on."
        ) from error
