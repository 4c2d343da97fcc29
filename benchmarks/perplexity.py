"""Perplexity of a real checkpoint against published figures, and against llama-perplexity of the same build.

    python -m benchmarks.perplexity

SmolLM2-135M as Qwen2 on WikiText-2, 16 windows of 512, flash attention off.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import llama_tools
from benchmarks.material import TEXT, make_smollm, shared
from pipeline import artifact, corpus, torch_forward
from pipeline.cores import physical_cores
from pipeline.evaluation import evaluate
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer

WINDOWS = 16
EXPECTED = {"bf16": 29.2291, "q8_0": 29.3973, "q6_k": 29.6290, "q5_k_m": 32.1204, "q4_k_m": 30.9282, "q4_0": 36.4258}
"""llama-perplexity of the same llama.cpp with AVX-512; other instruction sets differ by up to 0.5 %."""
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


def main() -> None:
    material = shared()
    if material is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = make_smollm(material, work / "smollm")
        with Checkpoint(path) as checkpoint:
            spec = spec_of(checkpoint.config)
            windows = corpus.cut("file", material / TEXT, Tokenizer(path), spec, 512, WINDOWS)
            torch_forward.write_reference(checkpoint, checkpoint.identity(), windows, work / "reference")
            reference = torch_forward.load_reference(work / "reference", checkpoint)
        print("SmolLM2-135M as Qwen2, WikiText-2, 16 windows of 512, flash attention off")
        print(f"{'':10} {'ours':>9} {'expected':>9} {'off by':>8} {'llama-perplexity':>17} {'KL':>9}")
        for scheme, expected in EXPECTED.items():
            artifact.convert(path, "gguf", scheme, work / scheme)
            quality, _ = evaluate(work / scheme, artifact.load(work / scheme), windows, reference, SETTINGS)
            ppl, beside = quality["ppl"], peer(work / scheme / "model.gguf", material / TEXT)
            off = ppl / expected - 1
            print(
                f"{scheme:10} {ppl:9.4f} {expected:9.4f} {off:+8.3%} {beside:17.4f} {quality['kld']['mean']:9.5f}",
                flush=True,
            )
        ppl = quality["reference_ppl"]
        print(f"{'reference':10} {ppl:9.4f} {REFERENCE:9.4f} {ppl / REFERENCE - 1:+8.3%}")


if __name__ == "__main__":
    main()
