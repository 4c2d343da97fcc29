"""GGUF files changed and written anew by gguf-py: what others could give us."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter
from numpy.typing import NDArray


@dataclass(frozen=True)
class Tensor:
    """`data` is uint8 [rows, row bytes] where `kind` has blocks, else of its own dtype."""

    name: str
    data: NDArray[Any]
    kind: GGMLQuantizationType


Change = Callable[[list[Tensor]], list[Tensor]]


def tensors_of(path: Path) -> list[Tensor]:
    return [Tensor(str(t.name), t.data, t.tensor_type) for t in GGUFReader(path).tensors]


def rewrite(source: Path, target: Path, keys: Mapping[str, Any] | None = None, change: Change = list) -> Path:
    """`source` with other values of `keys` (None takes one out) and its tensors as `change` gives them."""
    _write(
        target,
        _keys(source) | {key: _typed(source, key, value) for key, value in (keys or {}).items()},
        change(tensors_of(source)),
    )
    return target


def split(source: Path, folder: Path, parts: int = 3, **keys: Any) -> list[Path]:
    """The parts of `source` as llama-gguf-split writes them: the first has all keys, `keys` of split.* changed."""
    tensors = tensors_of(source)
    sizes = {"split.count": (parts, GGUFValueType.UINT16), "split.tensors.count": (len(tensors), GGUFValueType.INT32)}
    sizes |= {f"split.{key}": (value, sizes[f"split.{key}"][1]) for key, value in keys.items()}
    files = [folder / f"model-{i + 1:05d}-of-{parts:05d}.gguf" for i in range(parts)]
    folder.mkdir(parents=True, exist_ok=True)
    step = -(-len(tensors) // parts)
    for i, file in enumerate(files):
        own = {"split.no": (i, GGUFValueType.UINT16), **sizes}
        _write(file, (_keys(source) if i == 0 else {}) | own, tensors[i * step : (i + 1) * step])
    return files


def zeros(name: str, shape: tuple[int, int], kind: GGMLQuantizationType) -> Tensor:
    """A matrix of zero bytes in any type."""
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    return Tensor(name, np.zeros((shape[0], shape[1] // block * size), np.uint8), kind)


def replaced(tensor: Tensor) -> Change:
    """The tensors with another one in the place of that of its name."""
    return lambda tensors: [tensor if t.name == tensor.name else t for t in tensors]


def _keys(source: Path) -> dict[str, Any]:
    fields = GGUFReader(source).fields
    return {key: (field.contents(), *field.types) for key, field in fields.items() if not key.startswith("GGUF.")}


def _typed(source: Path, key: str, value: Any) -> Any:
    field = GGUFReader(source).get_field(key)
    return None if value is None else value if field is None else (value, *field.types)


def _write(target: Path, keys: Mapping[str, Any], tensors: list[Tensor]) -> None:
    writer = GGUFWriter(target, "")  # which then adds no key of its own
    for key, typed in keys.items():
        if typed is not None:
            value, kind, *item = typed
            writer.add_key_value(key, value, kind, *item[:1])
    for tensor in tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
