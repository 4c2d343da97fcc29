"""MLX folders made by us, or by mlx-lm and changed by hand: what others could give us."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pipeline.formats.mlx.write import write
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact

Tensors = dict[str, tuple[str, list[int], bytes]]
"""dtype, shape and data by name."""

Change = Callable[[Tensors], Any]
GONE = object()


def convert(source: Path, scheme: str, folder: Path) -> Artifact:
    """Our folder of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpoint(source) as checkpoint:
        return write(checkpoint, scheme, folder)


def converted(source: Path, out: Path, **settings: Any) -> Path:
    """What mlx_lm.convert makes of a checkpoint, quantized unless `settings` say otherwise."""
    import mlx_lm

    with contextlib.redirect_stdout(None):
        mlx_lm.convert(str(source), str(out), **{"quantize": True, **settings})
    return out


def loads(folder: Path) -> bool:
    """Whether mlx-lm loads the weights of a folder."""
    from mlx_lm.utils import load_model

    try:
        load_model(folder)
    except Exception:  # of any kind
        return False
    return True


def tensors_of(folder: Path) -> Tensors:
    found: Tensors = {}
    for file in sorted(folder.glob("model*.safetensors")):
        data = file.read_bytes()
        start = 8 + int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8:start]).items():
            if name != "__metadata__":
                begin, end = entry["data_offsets"]
                found[name] = entry["dtype"], entry["shape"], data[start + begin : start + end]
    return found


def write_tensors(path: Path, tensors: Tensors) -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "mlx"}}
    offset = 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def rewritten(
    source: Path, target: Path, config: Mapping[str, Any] | None = None, change: Change | None = None, shards: int = 1
) -> Path:
    """A folder with other values in config.json (GONE takes a key out; 'a/b' is b in a), its tensors as `change` leaves
    them, cut into `shards` without an index.
    """
    shutil.copytree(source, target)
    read = json.loads((target / "config.json").read_text())
    for key, value in (config or {}).items():
        *outer, last = key.split("/") if key.startswith("quantization/") else [key]
        place = read
        for part in outer:
            place = place[part]
        if value is GONE:
            place.pop(last, None)
        else:
            place[last] = value
    (target / "config.json").write_text(json.dumps(read))
    tensors = tensors_of(target)
    if change:
        change(tensors)
    for file in (*target.glob("model*.safetensors"), *target.glob("*.index.json")):
        file.unlink()
    names = [*tensors]
    for i in range(shards):
        file = target / (f"model-{i + 1:05d}-of-{shards:05d}.safetensors" if shards > 1 else "model.safetensors")
        write_tensors(file, {name: tensors[name] for name in names[i::shards]})
    return target
