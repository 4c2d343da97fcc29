"""Checkpoints whose matrices are FP8 in blocks, made by torch's own float8, and what they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

Raw = tuple[str, tuple[int, ...], bytes]
"""A stored tensor: dtype, shape, bytes."""

SETTINGS = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}


def raw(weights: np.ndarray, dtype: str) -> Raw:
    import torch

    kinds = {
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
    }
    stored = torch.from_numpy(np.ascontiguousarray(weights, np.float32)).to(kinds[dtype])
    return dtype, tuple(weights.shape), stored.contiguous().view(torch.uint8).numpy().tobytes()


def valued(stored: Raw) -> np.ndarray:
    """float32 of what is stored, by torch."""
    import torch

    kinds = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn}
    dtype, shape, data = stored
    return torch.frombuffer(bytearray(data), dtype=kinds[dtype]).float().reshape(shape).numpy()


def in_blocks(
    weights: np.ndarray, block: tuple[int, int] = (128, 128), scales: str = "F32"
) -> tuple[Raw, Raw, np.ndarray]:
    """Codes and scales of [out, in] or [experts, out, in], and the float32 weights that these stand for."""
    matrices = weights.reshape(-1, *weights.shape[-2:])
    down, across = -(-matrices.shape[1] // block[0]), -(-matrices.shape[2] // block[1])
    scale = np.empty((len(matrices), down, across), np.float32)
    places = [
        (m, i, j, np.s_[m, i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]])
        for m in range(len(matrices))
        for i in range(down)
        for j in range(across)
    ]
    for m, i, j, at in places:
        scale[m, i, j] = np.abs(matrices[at]).max() / 448 or 1
    stored_scale = raw(scale.reshape(*weights.shape[:-2], down, across), scales)
    scale = valued(stored_scale).reshape(scale.shape)
    codes, stands_for = np.empty_like(matrices), np.empty_like(matrices)
    for m, i, j, at in places:
        codes[at] = matrices[at] / scale[m, i, j]
    stored = raw(codes.reshape(weights.shape), "F8_E4M3")
    values = valued(stored).reshape(matrices.shape)
    for m, i, j, at in places:
        stands_for[at] = values[at] * scale[m, i, j]
    return stored, stored_scale, stands_for.reshape(weights.shape)


def write_raw(path: Path, tensors: dict[str, Raw]) -> None:
    header, at = {}, 0
    for name, (dtype, shape, data) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, at + len(data)]}
        at += len(data)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def is_linear(name: str, weights: np.ndarray) -> bool:
    """What released FP8 checkpoints have in FP8: the layers' matrices, but routers and gates of one row."""
    is_kept = any(part in name for part in ("mlp.gate.", "shared_expert_gate", "in_proj_a", "in_proj_b", "conv1d"))
    return weights.ndim >= 2 and "layers." in name and not is_kept


def as_fp8(
    folder: Path,
    out: Path,
    block: tuple[int, int] = (128, 128),
    change: Callable[[dict[str, Raw]], None] | None = None,
    settings: dict[str, Any] | None = SETTINGS,
) -> dict[str, np.ndarray]:
    """The checkpoint of one file in `folder` with its matrices in FP8, in `out`; the weights that it stands for."""
    from safetensors.torch import load_file

    out.mkdir()
    tensors, expected = dict[str, Raw](), dict[str, np.ndarray]()
    for name, weight in load_file(folder / "model.safetensors").items():
        weights = weight.float().numpy()
        if is_linear(name, weights):
            tensors[name], tensors[f"{name}_scale_inv"], expected[name] = in_blocks(weights, block)
        else:
            tensors[name], expected[name] = raw(weights, "F32"), weights
    if change:
        change(tensors)
    write_raw(out / "model.safetensors", tensors)
    config = json.loads((folder / "config.json").read_text())
    if settings is not None:
        config["quantization_config"] = settings | {"weight_block_size": [*block]}
    (out / "config.json").write_text(json.dumps(config))
    for side in ("tokenizer.json", "tokenizer_config.json"):
        if (folder / side).exists():
            (out / side).write_bytes((folder / side).read_bytes())
    return expected
