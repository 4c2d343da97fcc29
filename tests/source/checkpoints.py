"""Small checkpoint folders that are broken on purpose, and what is said of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.errors import CheckpointError
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
BF16_MASK = np.uint32(0xFFFF0000)


def raw_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def folder_of(folder: Path, content: bytes, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


def one_tensor(folder: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    header = {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}
    return folder_of(folder, raw_file(json.dumps(header).encode(), data))


def as_bf16(weights: np.ndarray) -> np.ndarray:
    """What is left of float32 in `write_safetensors`' BF16."""
    return (weights.view(np.uint32) & BF16_MASK).view(np.float32)


def problems_of(path: Path) -> str:
    """The message of check()."""
    with Checkpoint(path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.check(spec_of(checkpoint.config))
    return str(caught.value)


def edit_index(path: Path, change: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))
