"""Header, key-value pairs and tensor table of a GGUF file as bytes.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, version 3, little-endian. Our own code: gguf-py asks
each of a vocabulary's 150,000 values for its type, a third of a small conversion. The tests read the file with gguf-py.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from itertools import chain

VERSION = 3
ALIGNMENT = 32  # of tensor data: the format's default
UINT32, INT32, FLOAT32, BOOL, STRING, ARRAY = 4, 5, 6, 7, 8, 9

Pair = tuple[str, bytes]
"""A key and its value with the value's type before it."""

Row = tuple[str, Sequence[int], int, int]
"""A tensor's name, shape as [out, in], ggml_type and bytes."""


def uint32(value: int) -> bytes:
    return struct.pack("<II", UINT32, value)


def float32(value: float) -> bytes:
    return struct.pack("<If", FLOAT32, value)


def boolean(value: bool) -> bytes:
    return struct.pack("<I?", BOOL, value)


def text(value: str) -> bytes:
    return struct.pack("<I", STRING) + _string(value)


def texts(values: Sequence[str]) -> bytes:
    encoded = [value.encode() for value in values]
    parts = chain.from_iterable((len(value).to_bytes(8, "little"), value) for value in encoded)
    return struct.pack("<IIQ", ARRAY, STRING, len(values)) + b"".join(parts)


def int32s(values: Sequence[int]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}i", ARRAY, INT32, len(values), *values)


def booleans(values: Sequence[bool]) -> bytes:
    return struct.pack(f"<IIQ{len(values)}?", ARRAY, BOOL, len(values), *values)


def pack(pairs: Sequence[Pair], rows: Sequence[Row]) -> bytes:
    """Everything before the tensor data, filled up to its alignment."""
    parts = [b"GGUF", struct.pack("<IQQ", VERSION, len(rows), len(pairs))]
    for key, value in pairs:
        parts += [_string(key), value]
    for (name, shape, kind, _), offset in zip(rows, offsets(size for *_, size in rows), strict=False):
        dims = struct.pack(f"<I{len(shape)}Q", len(shape), *reversed(shape))  # the fastest dimension first
        parts += [_string(name), dims, struct.pack("<IQ", kind, offset)]
    header = b"".join(parts)
    return header + bytes(aligned(len(header)) - len(header))


def offsets(sizes: Iterable[int]) -> list[int]:
    """Where each tensor begins behind the header, and last where the file ends."""
    found = [0]
    for size in sizes:
        found.append(aligned(found[-1] + size))
    return found


def aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _string(value: str) -> bytes:
    data = value.encode()
    return len(data).to_bytes(8, "little") + data
