"""Perplexity of a real checkpoint against known figures, and GGUF's against llama-perplexity of the same build.

    python -m benchmarks.perplexity [FORMAT]

SmolLM2-135M as Qwen2 on WikiText-2, 16 windows of 512, flash attention off; gguf and mlx, or one of them. Exits 1
where a figure of MLX, which hardly depends on the machine, is off by more than CLOSE.
"""

from __future__ import annotations

import math
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import llama_tools
from benchmarks.material import TEXT, make_smollm, shared
from pipeline import artifact, corpus, torch_forward
from pipeline.cores import physical_cores
from pipeline.evaluation import evaluate
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference
from pipeline.types import Windows

Quality = dict[str, Any]

WINDOWS = 16
EXPECTED = {"bf16": 29.2291, "q8_0": 29.3973, "q6_k": 29.6290, "q5_k_m": 32.1204, "q4_k_m": 30.9282, "q4_0": 36.4258}
"""llama-perplexity of the same llama.cpp with AVX-512; other instruction sets differ by up to 0.5 %."""
MLX_EXPECTED = {"int8": 29.3273, "int6": 30.4154, "int4-g32": 38.9281, "int4": 40.7727}
"""Of mlx_lm.convert's tensors, dequantized in float32."""
CLOSE = 0.0005
REFERENCE = 29.2470
SETTINGS: dict[str, Any] = {"threads": 0, "flash_attention": False, "kv_type": "f16"}


def peer(model: Path, text: Path) -> float:
    """llama-perplexity's final estimate."""
    asked = ("-m", model, "-f", text, "-c", 512, "--chunks", WINDOWS, "-fa", "off", "-t", physical_cores())
    done = llama_tools.run("llama-perplexity", *asked)
    found = re.search(r"Final estimate: PPL = ([\d.]+)", done.stdout + done.stderr)
    if found is None:
        raise SystemExit("llama-perplexity printed no final estimate")
    return float(found[1])


def scored(path: Path, format_name: str, scheme: str, windows: Windows, reference: Reference, out: Path) -> Quality:
    """quality.json of a scheme."""
    artifact.convert(path, format_name, scheme, out)
    return evaluate(out, artifact.load(out), windows, reference, SETTINGS)[0]


def gguf(path: Path, text: Path, windows: Windows, reference: Reference, work: Path) -> None:
    print(f"{'gguf':10} {'ours':>9} {'expected':>9} {'off by':>8} {'llama-perplexity':>17} {'KL':>9}")
    for scheme, expected in EXPECTED.items():
        quality = scored(path, "gguf", scheme, windows, reference, work / scheme)
        ppl, beside = quality["ppl"], peer(work / scheme / "model.gguf", text)
        print(
            f"{scheme:10} {ppl:9.4f} {expected:9.4f} {ppl / expected - 1:+8.3%} {beside:17.4f} "
            f"{quality['kld']['mean']:9.5f}",
            flush=True,
        )


def mlx(path: Path, windows: Windows, reference: Reference, work: Path) -> list[str]:
    """The schemes whose perplexity is off by more than CLOSE."""
    print(f"{'mlx':10} {'ours':>9} {'expected':>9} {'off by':>8} {'MLX, nats apart':>17} {'KL':>9}")
    far = []
    for scheme, expected in MLX_EXPECTED.items():
        quality = scored(path, "mlx", scheme, windows, reference, work / scheme)
        off, parity = quality["ppl"] / expected - 1, quality["parity"]
        apart = f"{parity['max_difference']:.1e}" if parity else "scored by it"
        print(
            f"{scheme:10} {quality['ppl']:9.4f} {expected:9.4f} {off:+8.3%} {apart:>17} {quality['kld']['mean']:9.5f}",
            flush=True,
        )
        far += [scheme] if abs(off) > CLOSE else []
    return far


def main() -> None:
    material = shared()
    if material is None:
        return
    formats = sys.argv[1:] or ["gguf", "mlx"]
    far: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = make_smollm(material, work / "smollm")
        with Checkpoint(path) as checkpoint:
            spec = spec_of(checkpoint.config)
            windows = corpus.cut("file", material / TEXT, Tokenizer(path), spec, 512, WINDOWS)
            torch_forward.write_reference(checkpoint, checkpoint.identity(), windows, work / "reference")
            reference = torch_forward.load_reference(work / "reference", checkpoint)
        print("SmolLM2-135M as Qwen2, WikiText-2, 16 windows of 512, flash attention off")
        ppl = math.exp(-float(reference.logprob.mean(dtype=np.float64)))
        print(f"{'reference':10} {ppl:9.4f} {REFERENCE:9.4f} {ppl / REFERENCE - 1:+8.3%}")
        if "gguf" in formats:
            gguf(path, material / TEXT, windows, reference, work)
        if "mlx" in formats:
            far = mlx(path, windows, reference, work)
    if far:
        sys.exit(f"off by more than {CLOSE:.2%}: {', '.join(far)}")


if __name__ == "__main__":
    main()
