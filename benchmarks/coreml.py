"""Conversion to Core ML: wall time with start-up, peak resident memory, and what a package weighs.

    python -m benchmarks.coreml

Random weights in Qwen2.5-0.5B's shape (494M, bf16) to every scheme, each in a process of its own that says at its end
what it had resident at most (without the workers of palettes, a process for each core); a package of three functions
against one of one at 100M; SmolLM2-135M to palettes, whose time depends on the weights (needs QUANTGATE_SHARED). Exits
1 where a bound is broken.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.material import make_random, make_smollm, shared
from benchmarks.mlx import OURS, Cost, run
from pipeline.formats.coreml.schemes import SCHEMES

MOST_MB = 1000  # of memory
MOST_OF_FUNCTIONS = 1.02  # times the size of a package of one
MOST_SECONDS = 60  # for palettes of 135M weights
PALETTES = ("pal6", "pal4")

QWEN25_05B: dict[str, Any] = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "intermediate_size": 4864,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
    "rope_theta": 1_000_000.0,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}
M100 = QWEN25_05B | {
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 32_000,
}

ONE_FUNCTION = (
    "from pipeline.formats.coreml import graph; whole = graph.program\n"
    "def one(*arguments):\n"
    "    program = whole(*arguments)\n"
    "    [program.functions.pop(name) for name in [*program.functions] if name != 'prefill']\n"
    "    return program\n"
    "graph.program = one\n"
)


def convert(checkpoint: Path, scheme: str, work: Path, before: str = "") -> tuple[Cost, float]:
    """What a conversion costs, and the MB of its package."""
    out = work / "out"
    cost = run(
        before + OURS, ["convert", str(checkpoint), "--format", "coreml", "--scheme", scheme, "--out", str(out)], work
    )
    size = sum(path.stat().st_size for path in (out / "model.mlpackage").rglob("*") if path.is_file()) / 1e6
    shutil.rmtree(out)  # unwritten pages would disturb the next
    return cost, size


def main() -> None:
    problems = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        random = make_random(QWEN25_05B, work / "random")
        print("494M random weights in Qwen2.5-0.5B's shape, bf16, to Core ML")
        print(f"{'scheme':8} {'s':>6} {'peak MB':>8} {'package MB':>11}")
        for scheme in SCHEMES:
            cost, size = convert(random, scheme, work)
            print(f"{scheme:8} {cost.seconds:6.1f} {cost.megabytes:8.0f} {size:11.1f}", flush=True)
            problems += [f"{scheme}: {cost.megabytes:.0f} MB of memory"] if cost.megabytes > MOST_MB else []
        shutil.rmtree(random)
        small = make_random(M100, work / "small")
        (_, three), (_, one) = convert(small, "int4", work), convert(small, "int4", work, ONE_FUNCTION)
        ratio = three / one
        print(f"100M weights to int4: three functions {three:.2f} MB, one {one:.2f} MB, {ratio:.4f} times as much")
        problems += [f"three functions are {ratio:.4f} times as large as one"] if ratio > MOST_OF_FUNCTIONS else []
        if material := shared():
            smollm = make_smollm(material, work / "smollm")
            for scheme in PALETTES:
                cost, size = convert(smollm, scheme, work)
                print(f"SmolLM2-135M to {scheme}: {cost.seconds:.1f} s, {cost.megabytes:.0f} MB, package {size:.1f} MB")
                problems += [f"{scheme}: {cost.seconds:.0f} s"] if cost.seconds > MOST_SECONDS else []
    if problems:
        sys.exit(f"not as asked: {'; '.join(problems)}")


if __name__ == "__main__":
    main()
