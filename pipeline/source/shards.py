"""The weight files of a checkpoint folder: model.safetensors, or shards by an index."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path, PurePosixPath

from pipeline.errors import CheckpointError, PipelineError, gathered, listed
from pipeline.files import read_json
from pipeline.source.safetensors import Stored, read_header

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}


def weight_files(folder: Path, names: Collection[str], source: Path | str) -> list[str]:
    """The weight files of a `source` whose files are `names` and whose index, where it has one, lies in `folder`.

    Raises:
        CheckpointError: no safetensors, two sets of them, or an index that leaves the folder.
    """
    if INDEX not in names:
        if SINGLE in names:
            return [SINGLE]
        pickled = sorted(name for name in names if PurePosixPath(name).suffix in PICKLES)
        hint = f" It holds {_some(pickled)}: pickles are not read." if pickled else ""
        raise CheckpointError(f"{source} holds neither {SINGLE} nor {INDEX}.{hint} Save it as safetensors.")
    shards = sorted(set(promised(folder).values()))
    if SINGLE in names and SINGLE not in shards:
        raise CheckpointError(
            f"{source} holds both {SINGLE} and {INDEX} of other files: two sets of weights. Move one of them away."
        )
    for name in shards:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                f"{folder / INDEX} names {name!r}, which lies outside the checkpoint folder. Do not trust this file."
            )
    return shards


def promised(folder: Path) -> dict[str, str]:
    """The shard of each tensor by the index of a folder; empty without one.

    Raises:
        CheckpointError: an index that cannot be read, or names no shards.
    """
    index = folder / INDEX
    if not index.exists():
        return {}
    raw = read_json(index, CheckpointError)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map. Fetch it again.")
    return weight_map


def stored_tensors(
    path: Path, shards: Mapping[str, Path], found: list[PipelineError] | None = None
) -> dict[str, Stored]:
    """The tensors of all `shards` of a checkpoint folder, by name. With `found`, problems go there, and the tensors of
    the other shards are returned.

    Raises:
        CheckpointError: a shard or a tensor of the index is absent, or a tensor is in two shards.
    """
    places = promised(path)
    present: dict[str, dict[str, Stored]] = {}
    for name, file in shards.items():
        if file.exists():
            with gathered(found):
                present[name] = read_header(file)
    problems = [
        f"{name} is absent; {INDEX} puts {_some([n for n, s in places.items() if s == name])} there"
        for name, file in shards.items()
        if not file.exists()
    ]
    tensors: dict[str, Stored] = {}
    for shard, header in present.items():
        problems += [
            f"{name} is in two shards, {tensors[name].file.relative_to(path)} and {shard}"
            for name in header.keys() & tensors.keys()
        ]
        tensors |= header
    problems += [
        f"{name} is in no shard; {INDEX} puts it in {shard}"
        for name, shard in places.items()
        if shard in present and name not in present[shard]
    ]
    with gathered(found):
        if problems:
            raise CheckpointError(f"{path} is incomplete:\n{listed(sorted(problems))}\nFetch the checkpoint again.")
    return tensors


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 3 else ", ".join(names)
