"""What the benchmarks measure on: a real checkpoint, and the same one twice as large."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

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


def doubled(checkpoint: Path, out: Path) -> None:
    """The checkpoint with every layer twice: of no use to a reader, of use to see what memory grows with."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(checkpoint / "model.safetensors")
    config = json.loads((checkpoint / "config.json").read_text())
    layers = config["num_hidden_layers"]
    for name in [name for name in tensors if name.startswith("model.layers.")]:
        _, _, layer, rest = name.split(".", 3)
        tensors[f"model.layers.{int(layer) + layers}.{rest}"] = tensors[name].clone()
    out.mkdir()
    save_file(tensors, str(out / "model.safetensors"))
    (out / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 2 * layers}))
    for side in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (out / side).write_bytes((checkpoint / side).read_bytes())
