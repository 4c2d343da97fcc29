"""What lies in GGUF files that quantgate did not make: their keys and their tensor table, of one file or a split set.

ggml's own reader (ggml/include/gguf.h) through ctypes; it refuses malformed headers, and nothing here asks it for a key
of another type, which would abort the process.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError
from pipeline.files import reading
from pipeline.formats import TensorHashes, tensor_hashes
from pipeline.formats.gguf.header import ARRAY, INT32, STRING
from pipeline.formats.gguf.kernels import GgufInit, library, words
from pipeline.types import Encoding

SCALARS: dict[int, Any] = {
    **{0: ctypes.c_uint8, 1: ctypes.c_int8, 2: ctypes.c_uint16, 3: ctypes.c_int16, 4: ctypes.c_uint32},
    **{5: ctypes.c_int32, 6: ctypes.c_float, 7: ctypes.c_bool, 10: ctypes.c_uint64, 11: ctypes.c_int64},
    12: ctypes.c_double,
}
"""ctypes of gguf_type."""

SPLIT = re.compile(r"(?P<prefix>.*)-(?P<number>\d{5})-of-(?P<count>\d{5})\.gguf")
"""How llama-gguf-split names its files (llama_split_path)."""

NAMES = "Give split files the names that llama-gguf-split gave them."
SHOWN = 5  # absent parts


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file; `shape` is [out, in] or [n], `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    file: Path
    offset: int
    size: int


@dataclass(frozen=True)
class GgufFile:
    """One file, or the files of a split set in their order.

    `tokens` and `kinds` are the vocabulary's texts and token types by id; `keys` are the keys that hold one value.
    """

    files: tuple[Path, ...]
    keys: dict[str, Any]
    tokens: list[str]
    kinds: list[int]
    tensors: dict[str, StoredTensor]


def files_of(path: Path) -> tuple[Path, ...]:
    """The file, or every file of the split set that it is one of.

    Raises:
        ArtifactError: it or another of its set is absent, or the set that its name tells of cannot hold it.
    """
    found = SPLIT.fullmatch(path.name)
    names = [path.name]
    if found:
        count = int(found["count"])
        names = [f"{found['prefix']}-{i:05d}-of-{count:05d}.gguf" for i in range(1, count + 1)]
        if path.name not in names:
            raise ArtifactError(f"{path}: its name says part {int(found['number'])} of {count}. {NAMES}")
    files = tuple(path.parent / name for name in names)
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        more = f" and {len(absent) - SHOWN} more" if len(absent) > SHOWN else ""
        what = f"{path.parent}: {', '.join(absent[:SHOWN])}{more} is absent" if found else f"{path} is not a file"
        raise ArtifactError(f"{what}. Give the path of a GGUF file, and keep all parts of a split one in its folder.")
    return files


@dataclass(frozen=True)
class Content:
    """What one file holds: keys of one value, arrays of text and of int32 that were asked for and are there, and the
    tensors in their order.
    """

    keys: dict[str, Any]
    texts: dict[str, list[str]]
    ints: dict[str, list[int]]
    tensors: list[StoredTensor]


def content(file: Path, texts: Iterable[str] = (), ints: Iterable[str] = ()) -> Content:
    """A GGUF file that may be no model; `texts` and `ints` are keys of arrays.

    Raises:
        ArtifactError: ggml does not read the file, or it is cut short.
    """
    with _opened(file) as context:

        def there(key: str) -> bool:
            return bool(library().gguf_find_key(context, key.encode()) >= 0)

        return Content(
            dict(_scalars(context)),
            {key: _texts(context, key) for key in texts if there(key)},
            {key: _int32s(context, key) for key in ints if there(key)},
            list(_table(context, file)),
        )


def read(path: Path) -> GgufFile:
    """Keys, vocabulary and tensor table of a GGUF file, or of the whole split set that `path` is one of.

    Raises:
        ArtifactError: a file that is absent, cut short, or no GGUF; a split set that is not whole.
    """
    files = files_of(path)
    with _opened(files[0]) as first:
        keys = dict(_scalars(first))
        tokens = _texts(first, "tokenizer.ggml.tokens")
        kinds = _int32s(first, "tokenizer.ggml.token_type")
    tensors = {tensor.name: tensor for file in files for tensor in table(file)}
    parts = keys.get("split.count", 0) or 1  # llama-gguf-split writes 0 into what it merges
    if parts != len(files):
        raise ArtifactError(f"{path} says it is one of {parts} files, by its name of {len(files)}. {NAMES}")
    promised = keys.get("split.tensors.count", len(tensors))
    if promised != len(tensors):
        raise ArtifactError(f"{path}: {promised} tensors were split, its files hold {len(tensors)}. Fetch them again.")
    if not tensors:
        raise ArtifactError(f"{path} holds no tensors, only keys: a vocabulary, or a part of a model. Fetch the model.")
    return GgufFile(files, keys, tokens, kinds, tensors)


def table(file: Path) -> list[StoredTensor]:
    """The tensors of one file in their order.

    Raises:
        ArtifactError: ggml does not read the file, or it is cut short.
    """
    with _opened(file) as context:
        return list(_table(context, file))


def hashes(tensors: Iterable[StoredTensor]) -> TensorHashes:
    """See tensor_hashes."""
    return tensor_hashes((t.name, t.encoding.name, t.file, t.offset, t.size) for t in tensors)


@contextmanager
def _opened(file: Path) -> Iterator[Any]:
    with reading(file, ArtifactError), file.open("rb"), words() as said:  # ggml would not say why it cannot open it
        context = library().gguf_init_from_file(os.fsencode(file), GgufInit(True, None))
    if not context:
        why = "".join(f"  ggml: {line}\n" for line in said[:1])
        raise ArtifactError(f"{file} is no GGUF file that ggml can read, or it is cut short.\n{why}Fetch it again.")
    try:
        yield context
    finally:
        library().gguf_free(context)


def _scalars(context: Any) -> Iterator[tuple[str, Any]]:
    lib = library()
    for i in range(lib.gguf_get_n_kv(context)):
        key, kind = lib.gguf_get_key(context, i).decode(errors="replace"), lib.gguf_get_kv_type(context, i)
        if kind == STRING:
            yield key, lib.gguf_get_val_str(context, i).decode(errors="replace")
        elif kind in SCALARS:
            yield key, ctypes.cast(lib.gguf_get_val_data(context, i), ctypes.POINTER(SCALARS[kind])).contents.value


def _array(context: Any, key: str, kind: int) -> tuple[int, int]:
    """Index and length of an array of one type; length 0 where there is none."""
    lib = library()
    i = lib.gguf_find_key(context, key.encode())
    fits = i >= 0 and lib.gguf_get_kv_type(context, i) == ARRAY and lib.gguf_get_arr_type(context, i) == kind
    return i, lib.gguf_get_arr_n(context, i) if fits else 0


def _texts(context: Any, key: str) -> list[str]:
    i, length = _array(context, key, STRING)
    item = library().gguf_get_arr_str
    return [item(context, i, j).decode(errors="replace") for j in range(length)]


def _int32s(context: Any, key: str) -> list[int]:
    i, length = _array(context, key, INT32)
    if not length:
        return []
    data = ctypes.cast(library().gguf_get_arr_data(context, i), ctypes.POINTER(ctypes.c_int32))
    return data[:length]


def _table(context: Any, file: Path) -> Iterator[StoredTensor]:
    lib = library()
    start, length = lib.gguf_get_data_offset(context), file.stat().st_size
    for i in range(lib.gguf_get_n_tensors(context)):
        name = lib.gguf_get_tensor_name(context, i).decode(errors="replace")
        extents = lib.gguf_get_tensor_ne(context, i)
        shape = [extents[j] for j in range(4)]
        while len(shape) > 1 and shape[-1] == 1:
            shape.pop()
        offset, size = start + lib.gguf_get_tensor_offset(context, i), lib.gguf_get_tensor_size(context, i)
        if offset + size > length:
            raise ArtifactError(
                f"{file} is cut short: {name} lies at bytes {offset} to {offset + size}, the file has {length}. "
                "Fetch it again."
            )
        encoding = _encoding(lib.gguf_get_tensor_type(context, i))
        yield StoredTensor(name, tuple(reversed(shape)), encoding, file, offset, size)


def _encoding(kind: int) -> Encoding:
    """An encoding as ggml knows it, which may be one that no scheme of ours has."""
    lib = library()
    return Encoding(lib.ggml_type_name(kind).decode().upper(), lib.ggml_blck_size(kind), lib.ggml_type_size(kind))
