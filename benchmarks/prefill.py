"""Our prefill times against llama-bench's, in one run: the same file, libraries and settings.

    python -m benchmarks.prefill

SmolLM2-135M as Qwen2, 512 tokens, flash attention off, f16 cache, mapped file, CPU. Rounds alternate, and who begins
them does; each is a warm-up and SAMPLES prefills, as llama-bench does. Both compute the logits of the last token only.
A round compares its two medians, which lie seconds apart, since a machine's speed swings over minutes. Exits 1 where
the median of the rounds' ratios is off by more than 5 %.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks import llama_tools
from benchmarks.material import make_smollm, shared
from pipeline import artifact
from pipeline.cores import physical_cores
from pipeline.formats.gguf.run import BATCH, MICRO_BATCH, GgufRuntime

SCHEMES = ("q8_0", "q4_k_m", "q4_0")
TOKENS = 512
ROUNDS = 9
SAMPLES = 3
AGREE = 0.05


def ours(runtime: GgufRuntime, rng: np.random.Generator) -> list[float]:
    """Seconds of SAMPLES prefills after one that does not count."""
    prompts = rng.integers(0, runtime.vocab_size, (1 + SAMPLES, TOKENS)).astype(np.int32)
    return [runtime.prefill(prompt) for prompt in prompts][1:]


def theirs(model: Path) -> list[float]:
    """The same by llama-bench, which warms up too."""
    settings = {"-m": model, "-p": TOKENS, "-n": 0, "-r": SAMPLES, "-t": physical_cores(), "-b": BATCH}
    settings |= {"-ub": MICRO_BATCH, "-fa": "off", "-ctk": "f16", "-ctv": "f16", "-ngl": 0, "-lm": "mmap", "-o": "json"}
    done = llama_tools.run("llama-bench", *(word for pair in settings.items() for word in pair))
    (found,) = json.loads(done.stdout)
    return [ns / 1e9 for ns in found["samples_ns"]]


def alternating(model: Path) -> dict[str, list[float]]:
    """Median seconds of both by round, in turns."""
    medians: dict[str, list[float]] = {"ours": [], "theirs": []}
    rng = np.random.default_rng(0)
    with closing(GgufRuntime(model, context=TOKENS, device="cpu")) as runtime:
        for i in range(ROUNDS):
            for name in ("ours", "theirs") if i % 2 == 0 else ("theirs", "ours"):
                medians[name].append(statistics.median(ours(runtime, rng) if name == "ours" else theirs(model)))
    return medians


def main() -> None:
    material = shared()
    if material is None:
        return
    agree = True
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = make_smollm(material, Path(folder) / "smollm")
        print(f"Prefill of {TOKENS} tokens, SmolLM2-135M as Qwen2, medians of {ROUNDS} alternating rounds of {SAMPLES}")
        print(f"{'':8} {'ours, tokens/s':>15} {'llama-bench':>12} {'ours/theirs':>12}")
        for scheme in SCHEMES:
            out = Path(folder) / scheme
            artifact.convert(checkpoint, "gguf", scheme, out)
            medians = alternating(out / "model.gguf")
            speed = {name: TOKENS / statistics.median(seconds) for name, seconds in medians.items()}
            ratio = statistics.median(b / a for a, b in zip(medians["ours"], medians["theirs"], strict=True))
            agree = agree and abs(ratio - 1) <= AGREE
            print(f"{scheme:8} {speed['ours']:15.1f} {speed['theirs']:12.1f} {ratio:12.3f}", flush=True)
    if not agree:
        sys.exit(f"they differ by more than {AGREE:.0%}: was the machine quiet?")


if __name__ == "__main__":
    main()
