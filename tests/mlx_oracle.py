"""What mlx-lm makes of a checkpoint, and tensors of safetensors files read without the code under test."""

from __future__ import annotations

import contextlib
import io
import json
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest

Tensors = dict[str, tuple[str, tuple[int, ...], bytes]]
"""dtype by safetensors' name, shape and data of each tensor."""


class Limit(int):
    """A limit of bytes for mlx_lm.utils.make_shards, which takes it in GiB: `limit << 30`."""

    def __lshift__(self, bits: int) -> int:
        return int(self)


@contextlib.contextmanager
def silenced() -> Iterator[None]:
    """mlx-lm prints what it does, and imports what warns."""
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
    ):
        warnings.simplefilter("ignore", DeprecationWarning)
        yield


def mlx_convert(source: Path, out: Path, options: Mapping[str, Any], shard_bytes: int | None = None) -> Path:
    """The folder that mlx_lm.convert makes."""
    with silenced(), pytest.MonkeyPatch.context() as patch:
        from mlx_lm import convert, utils

        if shard_bytes is not None:
            patch.setattr(utils, "make_shards", partial(utils.make_shards, max_file_size_gb=Limit(shard_bytes)))
        convert(str(source), str(out), **options)
    return out


def options_of(scheme: str) -> dict[str, Any]:
    """The arguments of mlx_lm.convert that ask for one of our schemes."""
    if scheme in {"bf16", "fp16"}:
        return {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[scheme]}
    if scheme.startswith("mixed"):
        return {"quantize": True, "quant_predicate": scheme, "q_group_size": 64}
    if scheme.startswith("int"):
        bits, _, group = scheme.removeprefix("int").partition("-g")
        return {"quantize": True, "q_bits": int(bits), "q_group_size": int(group or 64)}
    return {"quantize": True, "q_mode": scheme}


def tensors_of(folder: Path) -> Tensors:
    """Every tensor of the safetensors files of a folder."""
    tensors: Tensors = {}
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        size = 8 + int.from_bytes(data[:8], "little")
        header = json.loads(data[8:size])
        assert header.pop("__metadata__") == {"format": "mlx"}
        for name, entry in header.items():
            begin, end = entry["data_offsets"]
            assert name not in tensors
            tensors[name] = entry["dtype"], tuple(entry["shape"]), data[size + begin : size + end]
    return tensors


def placed(folder: Path) -> dict[str, set[str]]:
    """Names of the tensors of each weight file."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with path.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        found[path.name] = header.keys() - {"__metadata__"}
    return found
