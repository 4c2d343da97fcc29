"""llama.cpp's whole-file quantizer, against which ours is compared tensor by tensor, and a reader that is not ours."""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader
from numpy.typing import NDArray

from pipeline.formats.gguf.engine import _keep_log, last_words, llama


class _Override(ctypes.Structure):
    """llama_model_tensor_override (llama.h)."""

    _fields_ = [("pattern", ctypes.c_char_p), ("type", ctypes.c_int)]


class _Value(ctypes.Union):
    _fields_ = [("int", ctypes.c_int64), ("text", ctypes.c_char * 128)]


class _Key(ctypes.Structure):
    """llama_model_kv_override (llama.h)."""

    _fields_ = [("tag", ctypes.c_int), ("key", ctypes.c_char * 128), ("value", _Value)]


INT, TEXT = 0, 3  # llama_model_kv_override_type


class _Importance(ctypes.Structure):
    """llama_model_imatrix_data (llama.h)."""

    _fields_ = [("name", ctypes.c_char_p), ("data", ctypes.POINTER(ctypes.c_float)), ("size", ctypes.c_size_t)]


def quantize(
    source: Path,
    ftype: int,
    target: Path,
    types: Mapping[str, str] | None = None,
    importance: Mapping[str, NDArray[np.float32]] | None = None,
    keys: Mapping[str, str | int] | None = None,
) -> Path:
    """`target`, made of the GGUF file `source` by llama_model_quantize to a llama_ftype, as llama-quantize does.

    `types`: --output-tensor-type as `output`, --token-embedding-type as `token_embd`, others as --tensor-type, which
    llama-quantize puts in lower case. `importance` is of inputs, by the names of tensors, as --imatrix has them;
    `keys` are what llama-quantize has the file say besides, as of that.
    """
    assert _quantize(source, ftype, target, types, importance, keys) == 0, last_words()
    return target


def kinds(source: Path, ftype: int, importance: Mapping[str, NDArray[np.float32]] | None = None) -> dict[str, str]:
    """The type that `quantize` would give each tensor, as --dry-run says without computing anything."""
    cpp, said = llama(), list[str]()
    keep = cpp.llama_log_callback(lambda level, text, data: said.append(text.decode()))
    cpp.llama_log_set(keep, ctypes.c_void_p(0))
    try:
        assert _quantize(source, ftype, source, {}, importance, dry_run=True) == 0, "".join(said[-5:])
    finally:
        cpp.llama_log_set(_keep_log(cpp), ctypes.c_void_p(0))
    lines = re.finditer(r"\] +(\S+) +- \[.*type = +(\w+), size = .*?MiB(?: -> .* \((\w+)\))?", "".join(said))
    return {line[1]: (line[3] or line[2]).upper() for line in lines}


def _quantize(
    source: Path,
    ftype: int,
    target: Path,
    types: Mapping[str, str] | None,
    importance: Mapping[str, NDArray[np.float32]] | None,
    keys: Mapping[str, str | int] | None = None,
    dry_run: bool = False,
) -> int:
    cpp = llama()
    params = cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype, params.dry_run = 2, ftype, dry_run
    values = {pattern: int(GGMLQuantizationType[kind.upper()]) for pattern, kind in (types or {}).items()}
    params.output_tensor_type = values.pop("output", params.output_tensor_type)
    params.token_embedding_type = values.pop("token_embd", params.token_embedding_type)
    overrides = (_Override * (len(values) + 1))(*((name.lower().encode(), kind) for name, kind in values.items()))
    if values:
        params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides))  # ends with a null pattern
    kept = {name: np.ascontiguousarray(array, np.float32) for name, array in (importance or {}).items()}
    pointer = ctypes.POINTER(ctypes.c_float)
    given = (_Importance * (len(kept) + 1))(
        *((name.encode(), array.ctypes.data_as(pointer), array.size) for name, array in kept.items())
    )
    if importance is not None:
        params.imatrix = ctypes.cast(given, type(params.imatrix))  # ends with a null name
    said = (_Key * (len(keys or {}) + 1))(*(_key(name, value) for name, value in (keys or {}).items()))
    if keys:
        params.kv_overrides = ctypes.cast(said, type(params.kv_overrides))  # ends with an empty name
    code: int = cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    return code


def _key(name: str, value: str | int) -> _Key:
    if isinstance(value, str):
        return _Key(TEXT, name.encode(), _Value(text=value.encode()[:127]))
    return _Key(INT, name.encode(), _Value(int=value))


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor by name, as gguf-py reads them."""
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in _read(path).tensors}


def field(path: Path, key: str) -> object:
    """The value of one metadata key."""
    found = _read(path).get_field(key)
    assert found is not None, f"{path} has no {key}"
    return found.contents()


def _read(path: Path) -> GGUFReader:
    """gguf-py takes longer to read a header than llama.cpp to write the file: once is enough."""
    stat = path.stat()
    return _reader(path, stat.st_mtime_ns, stat.st_ino)


@lru_cache(maxsize=4)
def _reader(path: Path, *stamp: int) -> GGUFReader:
    return GGUFReader(path)
