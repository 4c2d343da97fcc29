"""The weight files of an MLX folder: which tensor goes to which shard, their headers, their index, and their hash.

Source: mlx-lm 0.32.2 (utils.py: make_shards, save_model). Data lies in a shard in the order of the parameters, which is
free: readers go by the header.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pipeline.formats import TensorHashes, tensor_hashes
from pipeline.formats.mlx.names import Part
from pipeline.source.safetensors import Stored
from pipeline.source.shards import SINGLE

SHARD_BYTES = 5 << 30
"""Of tensor data in one file; a larger tensor gets a file of its own."""


@dataclass(frozen=True)
class Shard:
    """A file to write: `offsets` of its parts, by their names, count from its start; `length` is that of all of it."""

    name: str
    parts: tuple[Part, ...]
    header: bytes
    offsets: Mapping[str, int]
    length: int


def shards(parts: Iterable[Part]) -> list[Shard]:
    """The files of tensors in the order of mlx-lm's parameters."""
    groups: list[list[Part]] = []
    size = 0
    for part in parts:
        if not groups or size + part.size > SHARD_BYTES:
            groups.append([])
            size = 0
        groups[-1].append(part)
        size += part.size
    if len(groups) == 1:
        return [_shard(SINGLE, groups[0])]
    count = len(groups)
    return [_shard(f"model-{i:05d}-of-{count:05d}.safetensors", group) for i, group in enumerate(groups, 1)]


def _shard(name: str, parts: list[Part]) -> Shard:
    entries: dict[str, object] = {"__metadata__": {"format": "mlx"}}
    begins, end = {}, 0
    for part in parts:
        begins[part.name] = end
        end += part.size
        entries[part.name] = {"dtype": part.dtype, "shape": part.shape, "data_offsets": [begins[part.name], end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    offsets = {name: len(header) + begin for name, begin in begins.items()}
    return Shard(name, tuple(parts), header, offsets, len(header) + end)


def index_text(files: Iterable[Shard], weights: int) -> str:
    """model.safetensors.index.json, which mlx-lm writes beside a single file too; `weights` of the model, unpacked."""
    placed = {part.name: (shard.name, part.size) for shard in files for part in shard.parts}
    index = {
        "metadata": {"total_size": sum(size for _, size in placed.values()), "total_parameters": weights},
        "weight_map": {name: placed[name][0] for name in sorted(placed)},
    }
    return json.dumps(index, indent=4)


def hashes(stored: Mapping[str, Stored]) -> TensorHashes:
    """See tensor_hashes."""
    return tensor_hashes((name, t.dtype, t.file, t.offset, t.size) for name, t in stored.items())
