"""llama.cpp's whole-file quantizer, against which ours is compared tensor by tensor, and a reader that is not ours."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from gguf import GGMLQuantizationType, GGUFReader

from pipeline.formats.gguf.engine import last_words, llama


class _Override(ctypes.Structure):
    """llama_model_tensor_override (llama.h)."""

    _fields_ = [("pattern", ctypes.c_char_p), ("type", ctypes.c_int)]


def quantize(source: Path, ftype: int, target: Path, types: Mapping[str, str] | None = None) -> Path:
    """`target`, made of the GGUF file `source` by llama_model_quantize to a llama_ftype, as llama-quantize does.

    `types`: --output-tensor-type as `output`, --token-embedding-type as `token_embd`, others as --tensor-type, which
    llama-quantize puts in lower case.
    """
    cpp = llama()
    params = cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 2, ftype
    values = {pattern: int(GGMLQuantizationType[kind.upper()]) for pattern, kind in (types or {}).items()}
    params.output_tensor_type = values.pop("output", params.output_tensor_type)
    params.token_embedding_type = values.pop("token_embd", params.token_embedding_type)
    overrides = (_Override * (len(values) + 1))(*((name.lower().encode(), kind) for name, kind in values.items()))
    if values:
        params.tt_overrides = ctypes.cast(overrides, type(params.tt_overrides))  # ends with a null pattern
    code = cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    assert code == 0, last_words()
    return target


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
