"""What the benchmarks measure on: a real checkpoint, the same one made larger, and random ones of any shape."""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from pipeline.models import spec_of

if TYPE_CHECKING:
    import torch

TINY = Path(__file__).parent.parent / "assets" / "qwen3-tiny"
TEXT = Path("data") / "wikitext-2-raw" / "wiki.test.raw"


def shared() -> Path | None:
    """The folder that QUANTGATE_SHARED names, or None with the reason on standard output."""
    if "QUANTGATE_SHARED" not in os.environ:
        print(
            "skipped: QUANTGATE_SHARED is not set (it names the folder with the real checkpoint's maker and its text)"
        )
        return None
    return Path(os.environ["QUANTGATE_SHARED"])


def make_smollm(folder: Path, out: Path) -> Path:
    """SmolLM2-135M as a Qwen2 checkpoint in bf16, 269 MB."""
    subprocess.run([sys.executable, folder / "tools" / "make_smollm2_qwen2.py", out], check=True, capture_output=True)
    return out


def make_enlarged(checkpoint: Path, times: int, out: Path) -> Path:
    """`enlarged` in a process of its own: a child's peak memory may begin with what its parent held."""
    maker = multiprocessing.get_context("spawn").Process(target=enlarged, args=(checkpoint, times, out))
    maker.start()
    maker.join()
    if maker.exitcode:
        raise SystemExit(f"the checkpoint {times} times as large was not made")
    return out


def enlarged(checkpoint: Path, times: int, out: Path) -> None:
    """The checkpoint with its layers again and again until it has `times` the bytes: of no use to a reader, of use to
    see what memory grows with.
    """
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    had = config["num_hidden_layers"]
    layers: dict[int, dict[str, torch.Tensor]] = {}
    for name in [name for name in tensors if name.startswith("model.layers.")]:
        _, _, layer, rest = name.split(".", 3)
        layers.setdefault(int(layer), {})[rest] = tensors.pop(name)
    others = sum(tensor.nbytes for tensor in tensors.values())
    of_layers = sum(tensor.nbytes for layer in layers.values() for tensor in layer.values())
    count = round(had * (times * (others + of_layers) - others) / of_layers)
    for at in range(count):
        tensors |= {f"model.layers.{at}.{rest}": tensor.clone() for rest, tensor in layers[at % had].items()}
    out.mkdir()
    save_file(tensors, str(out / "model.safetensors"))
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": count}))
    for side in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (out / side).write_bytes((checkpoint / side).read_bytes())


def make_random(config: dict[str, Any], out: Path) -> Path:
    """A checkpoint in bf16 of normal weights, as large as they are at the start of a training; the tokenizer is the
    embedded checkpoint's.
    """
    out.mkdir()
    (out / "config.json").write_text(json.dumps(config))
    (out / "tokenizer.json").write_bytes((TINY / "tokenizer.json").read_bytes())
    tensors = spec_of(config).tensors
    ends = np.cumsum([2 * tensor.weights for tensor in tensors]).tolist()
    header = {
        tensor.name: {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [end - 2 * tensor.weights, end]}
        for tensor, end in zip(tensors, ends, strict=True)
    }
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    with (out / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            around = 1.0 if tensor.role.endswith("norm") else 0.0
            for start in range(0, tensor.weights, 1 << 22):
                count = min(1 << 22, tensor.weights - start)
                weights = around + np.float32(0.02) * rng.standard_normal(count, np.float32)
                file.write((weights.astype(np.float32).view(np.uint32) >> 16).astype("<u2").tobytes())
    return out
