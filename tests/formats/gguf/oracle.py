"""llama.cpp's whole-file quantizer, against which ours is compared tensor by tensor, and a reader that is not ours."""

from __future__ import annotations

from pathlib import Path

from gguf import GGUFReader

from pipeline.formats.gguf.engine import last_words, llama


def quantize(source: Path, ftype: int, target: Path) -> Path:
    """`target`, made of the GGUF file `source` by llama_model_quantize to a llama_ftype, as llama-quantize does."""
    cpp = llama()
    params = cpp.llama_model_quantize_default_params()
    params.nthread, params.ftype = 2, ftype
    code = cpp.llama_model_quantize(str(source).encode(), str(target).encode(), params)
    assert code == 0, last_words()
    return target


def tensors(path: Path) -> dict[str, tuple[str, bytes]]:
    """Type and bytes of every tensor by name, as gguf-py reads them."""
    return {tensor.name: (tensor.tensor_type.name, tensor.data.tobytes()) for tensor in GGUFReader(path).tensors}


def field(path: Path, key: str) -> object:
    """The value of one metadata key."""
    found = GGUFReader(path).get_field(key)
    assert found is not None, f"{path} has no {key}"
    return found.contents()
