"""Checkpoints with experts or DeltaNets whose logits float32 computes to 1e-4, and the MLX folders made of them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from family import FAMILY, tiny
from mlx_oracle import mlx_convert, options_of, silenced
from numpy.typing import NDArray

from pipeline.formats.mlx.config import normalised
from pipeline.formats.mlx.write import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact

IDS = (np.arange(48, dtype=np.int32) * 37 + 5) % 260

WIDE: dict[str, Any] = {
    **{"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64, "rms_norm_eps": 1e-3},
    **{"linear_key_head_dim": 32, "linear_value_head_dim": 32},
}
"""Rows that divide into groups of 64. And the norm behind a DeltaNet of small heads divides by what may be almost 0:
with an epsilon of 1e-6, embeddings that are off by a unit in the last place move transformers' own logits by 2e-4.
"""


HYBRIDS = FAMILY[2:]


def checkpoint(model_type: str, folder: Path, **settings: Any) -> Path:
    """A checkpoint of family.tiny in `folder`."""
    own = {key: value for key, value in WIDE.items() if not key.startswith("linear") or model_type in HYBRIDS}
    return tiny(model_type, folder, **own | settings)


def in_bfloat16(folder: Path) -> Path:
    """The float32 checkpoint with weights that bfloat16 holds, with 1 added where MLX adds it; but for A_log."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(folder / "model.safetensors")
    is_hybrid = any("linear_attn" in name for name in tensors)
    for name, weight in tensors.items():
        offset = int(is_hybrid and "norm" in name and "linear_attn" not in name)
        if not name.endswith("A_log"):
            tensors[name] = (weight + offset).to(torch.bfloat16).float() - offset
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def convert(source: Path, scheme: str, folder: Path) -> Artifact:
    folder.mkdir(parents=True)
    with Checkpoint(source) as found:
        return write(found, scheme, folder)


LAYOUTS = {model_type: "fused" if model_type == "qwen3_5_moe" else "per-expert" for model_type in FAMILY}
"""Those that mlx_lm.convert reads."""


def source_of(model_type: str, place: Path, **settings: Any) -> Path:
    return checkpoint(model_type, place / "c", **{"layout": LAYOUTS[model_type], "dtype": "bfloat16"} | settings)


def theirs(source: Path, scheme: str, place: Path, shard_bytes: int | None = None) -> Path:
    """The folder that mlx_lm.convert makes of the checkpoint with the config.json that it understands."""
    read = place / "read"
    shutil.copytree(source, read)
    config = json.loads((source / "config.json").read_text())
    with Checkpoint(source) as found:
        config = normalised(config, spec_of(found.config, found.shapes))
    (read / "config.json").write_text(json.dumps(config))
    return mlx_convert(read, place / "theirs", options_of(scheme), shard_bytes)


def loaded(folder: Path) -> Any:
    """mlx-lm's model of a folder, in float32."""
    with silenced():
        import mlx.core as mx
        from mlx_lm.utils import load_model

        model, _ = load_model(folder, strict=True)
        model.set_dtype(mx.float32)
    return model


def logits(model: Any, ids: NDArray[np.int32], cache: Any = None) -> NDArray[np.float32]:
    import mlx.core as mx

    return np.array(model(mx.array(ids[None]), cache=cache)[0].astype(mx.float32))
