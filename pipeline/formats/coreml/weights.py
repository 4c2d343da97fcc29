"""The weight files of a package: which constant goes to which file and where, as bytes.

Format: Core ML's blob storage, version 2 (coremltools 9.0: mlmodel/src/MILBlob/Blob/StorageFormat.hpp). A file begins
with a header of 64 bytes: the number of its blobs, and the version. Each blob is a record of 64 bytes, then its data;
both begin at multiples of 64. A program refers to a blob by its file and the offset of its record.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from pipeline.errors import ArtifactError, QuantizationError
from pipeline.formats.coreml.names import BITS, Blob

CODES = {"F16": 1, "F32": 2, "INT8": 4, "INT16": 6, "INT4": 8, "UINT4": 11, "UINT6": 13, "INT32": 14}
"""Of blob types that this version writes and reads."""

ALIGNMENT = 64
VERSION = 2
SENTINEL = 0xDEADBEEF
HEADER = struct.Struct("<II56x")
RECORD = struct.Struct("<IIQQQ32x")  # sentinel, type, bytes, offset of the data, bits that fill the last byte

MOST_BYTES = 2_000_000_000
"""Of one file: what is beyond 2 GiB does not load everywhere."""


@dataclass(frozen=True)
class WeightFile:
    """A file to write. `records` and `data` are the offsets of each blob's record and bytes, by its name."""

    name: str
    blobs: tuple[Blob, ...]
    records: Mapping[str, int]
    data: Mapping[str, int]
    length: int

    def head(self) -> Iterator[tuple[int, bytes]]:
        """What the file holds beside data: bytes, and where they go."""
        yield 0, HEADER.pack(len(self.blobs), VERSION)
        for blob in self.blobs:
            fill = blob.size * 8 - prod(blob.shape) * BITS[blob.dtype]
            code = CODES[blob.dtype]
            yield (
                self.records[blob.name],
                RECORD.pack(SENTINEL, code, blob.size, self.data[blob.name], fill if BITS[blob.dtype] < 8 else 0),
            )


@dataclass(frozen=True)
class Entry:
    """A blob as its record has it: `offset` and `size` are of its data, in bytes."""

    dtype: str
    offset: int
    size: int


def layout(blobs: Iterable[Blob]) -> list[WeightFile]:
    """The files of blobs, in their order.

    Raises:
        QuantizationError: a blob that is too large for any file.
    """
    groups: list[list[Blob]] = []
    end = 0
    for blob in blobs:
        after = _aligned(end) + ALIGNMENT + blob.size
        if not groups or after > MOST_BYTES:
            groups.append([])
            after = 2 * ALIGNMENT + blob.size
        if after > MOST_BYTES:
            raise QuantizationError(
                f"{blob.name}: {blob.size} bytes do not fit a weight file of {MOST_BYTES}. Take a scheme of fewer bits."
            )
        groups[-1].append(blob)
        end = after
    count = len(groups)
    names = ["weight.bin"] if count == 1 else [f"weight-{i:05d}-of-{count:05d}.bin" for i in range(1, count + 1)]
    return [_file(name, group) for name, group in zip(names, groups, strict=True)]


def _file(name: str, blobs: Sequence[Blob]) -> WeightFile:
    records, data, end = {}, {}, ALIGNMENT
    for blob in blobs:
        records[blob.name] = _aligned(end)
        data[blob.name] = records[blob.name] + ALIGNMENT
        end = data[blob.name] + blob.size
    return WeightFile(name, tuple(blobs), records, data, end)


def _aligned(offset: int) -> int:
    return -(-max(offset, ALIGNMENT) // ALIGNMENT) * ALIGNMENT


def read_entry(path: Path, record: int) -> Entry:
    """The blob whose record begins at an offset.

    Raises:
        ArtifactError: no record there, of an unknown type, or beyond the end of the file.
    """
    try:
        with path.open("rb") as file:
            raw = os.pread(file.fileno(), RECORD.size, record)
            length = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise ArtifactError(f"{path} cannot be read: {error.strerror}. Convert again.") from error
    sentinel, code, size, offset, _ = RECORD.unpack(raw.ljust(RECORD.size, b"\0"))
    names = {number: name for name, number in CODES.items()}
    if len(raw) < RECORD.size or sentinel != SENTINEL or code not in names or offset + size > length:
        raise ArtifactError(
            f"{path}: expected the record of a blob at byte {record}, found type {code}, {size} bytes at {offset} of "
            f"{length}. Convert again."
        )
    return Entry(names[code], offset, size)
