"""The formats, each a folder with the same rooms: schemes, plan, write, given, run. They never import each other."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType

from pipeline.errors import ParamsError, suggestion
from pipeline.files import sha256_of
from pipeline.types import EffectiveType, Planned

FORMATS = ("gguf", "mlx", "coreml")
FILE_FORMAT, FOLDER_FORMAT = "gguf", "mlx"
"""The formats in which others give a weight file, and a folder with config.json and safetensors."""

IMATRIX_FORMAT = "gguf"
"""Whose quantizers take an importance matrix."""

CALIBRATION_FILE = "calibration.npy"
"""Beside the weights: the ids of the text of their importance matrix, where that says them."""


def format_of(place: Path) -> str | None:
    """The format of what others made at a place; None where it is of none."""
    if place.is_file():
        return FILE_FORMAT
    is_whole = (place / "config.json").is_file() and any(place.glob("model*.safetensors"))
    return FOLDER_FORMAT if is_whole else None


def room(format_name: str, name: str) -> ModuleType:
    """A room of a format, imported when it is used: a machine needs only the packages of the formats it works with.

    Raises:
        ParamsError: no such format.
    """
    if format_name not in FORMATS:
        raise ParamsError(f"format {format_name!r} does not exist; {suggestion(format_name, FORMATS)}")
    return import_module(f"pipeline.formats.{format_name}.{name}")


def refuse_sizes(format_name: str, sizes: Mapping[str, int]) -> None:
    """For formats whose artifacts take any number of tokens.

    Raises:
        ParamsError: sizes, which only a Core ML package has.
    """
    if sizes:
        raise ParamsError(f"{', '.join(sizes)}: {format_name} artifacts have no fixed sizes. Only coreml packages do.")


def refuse_imatrix(format_name: str, imatrix: Path | None) -> None:
    """For formats whose quantizers weigh no input more than another.

    Raises:
        ParamsError: an importance matrix, which the format does not take.
    """
    if imatrix is not None and format_name != IMATRIX_FORMAT:
        raise ParamsError(
            f"imatrix: {format_name} artifacts are made without one. Only {IMATRIX_FORMAT} schemes use it."
        )


def refuse_settings(kv_type: str, flash_attention: bool | None, theirs: str) -> None:
    """For formats whose engines have no choice of these; `theirs` says what they have.

    Raises:
        ParamsError: a KV type or flash attention other than the defaults.
    """
    if kv_type != "f16" or flash_attention:
        asked = f"kv_type {kv_type}" if kv_type != "f16" else "flash_attention"
        raise ParamsError(f"{asked} is a setting of GGUF: {theirs}. Put it into the `evaluate` of the GGUF variants.")


def memory_problem(weights: int) -> str | None:
    """Why an artifact cannot be scored here whose weights are held in float32 for it; None where the machine has the
    memory.
    """
    import psutil

    needed, total = 4 * weights, psutil.virtual_memory().total
    if needed <= total:
        return None
    return (
        f"scored off Apple Silicon its weights take {needed / 1e9:.0f} GB in float32, this machine has "
        f"{total / 1e9:.0f} GB of memory. Evaluate it on a Mac, or on a larger machine."
    )


@dataclass(frozen=True)
class TensorHashes:
    """Artifact's `tensors_sha256` and `tensors`."""

    whole: str
    each: dict[str, str]


def tensor_hashes(stored: Iterable[tuple[str, str, Path, int, int]]) -> TensorHashes:
    """Hashes of tensors given by name, type, file, offset and size: each byte is read once.

    The whole is that of names, types and the tensors' own hashes in the order of their names: equal where two artifacts
    hold the same weights, whatever their headers, their order and the files they are cut into.
    """
    whole, each = hashlib.sha256(), {}
    for name, kind, path, offset, size in sorted(stored):
        digest = sha256_of(path, offset, size)
        whole.update(f"{name} {kind} {digest}\n".encode())
        each[name] = f"{kind} {digest[:16]}"
    return TensorHashes(whole.hexdigest(), each)


def effective_types(planned: Sequence[Planned]) -> dict[str, EffectiveType]:
    """Tensors and weights by encoding, the most weights first."""
    tensors: dict[str, int] = defaultdict(int)
    weights: dict[str, int] = defaultdict(int)
    for p in planned:
        tensors[p.encoding.name] += 1
        weights[p.encoding.name] += p.tensor.weights
    return {name: EffectiveType(tensors[name], weights[name]) for name in sorted(weights, key=lambda n: -weights[n])}


def router_types(planned: Sequence[Planned]) -> tuple[str, ...]:
    """Encodings of the matrices by which a token's experts are chosen."""
    return tuple(sorted({p.encoding.name for p in planned if p.tensor.role == "router"}))


def bits_per_weight(planned: Sequence[Planned]) -> float:
    """Tensor data over weights, without vocabulary and header."""
    return sum(p.bytes for p in planned) * 8 / sum(p.tensor.weights for p in planned)
