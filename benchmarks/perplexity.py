"""Perplexity of a real checkpoint against known figures, and GGUF's against llama-perplexity of the same build.

    python -m benchmarks.perplexity [FORMAT]

SmolLM2-135M as Qwen2 on WikiText-2, windows of 512: 16 for gguf and mlx, flash attention off, 8 for coreml; all three,
or those named. Exits 1 where a figure of MLX or Core ML, which hardly depends on the machine, is off by more than it
may be.
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
from pipeline.formats.coreml import calls
from pipeline.formats.coreml.package import PACKAGE, Package
from pipeline.formats.coreml.run import Executed, described
from pipeline.logits import logprob_of, shifted_logits
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
COREML_WINDOWS = 8
COREML_EXPECTED = {
    "fp16": (24.4997, 0.0005),
    "int16": (24.4997, 0.0005),
    "int8": (24.5833, 0.001),
    "int4": (38.37, 0.01),
    "pal6": (26.15, None),
    "pal4": (None, None),
}
"""The reference's for fp16 and int16, else those of plain rounding, and of coremltools.optimize's k-means: at most; and
how far off each may be. pal4 of coremltools failed on this model.
"""
SAME = 0.001  # of float32 arithmetic, rounded to the declared types
REFERENCE = {16: 29.2470, 8: 24.4997}
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


def coreml(path: Path, windows: Windows, reference: Reference, work: Path) -> list[str]:
    """The schemes whose perplexity is farther off than it may be, in float32 or in the declared types."""
    print(f"{'coreml':10} {'float32':>9} {'expected':>9} {'off by':>8} {'declared types':>15} {'apart':>8} {'KL':>9}")
    far = []
    for scheme, (expected, close) in COREML_EXPECTED.items():
        quality = scored(path, "coreml", scheme, windows, reference, work / f"coreml-{scheme}")
        declared, ppl = quality["ppl"], in_float32(work / f"coreml-{scheme}", windows, reference)
        off = ppl / expected - 1 if expected else None
        print(
            f"{scheme:10} {ppl:9.4f} {expected or '':>9} {'' if off is None else f'{off:+.3%}':>8} {declared:15.4f} "
            f"{declared / ppl - 1:+8.3%} {quality['kld']['mean']:9.5f}",
            flush=True,
        )
        is_far = off is not None and (off > 0 if close is None else abs(off) > close)
        far += [scheme] if is_far or abs(declared / ppl - 1) > SAME else []
    return far


def in_float32(folder: Path, windows: Windows, reference: Reference) -> float:
    """Perplexity of a package where nothing is rounded."""
    package = Package(folder / PACKAGE)
    sizes, runtime = described(package).sizes, Executed(package, rounding="fp32")
    logprobs = []
    for ids in windows.ids:
        logits = np.concatenate([*calls.score(runtime, sizes, ids, windows.start)])[: windows.scored]
        logprobs.append(logprob_of(*shifted_logits(logits), ids[windows.start + 1 :]))
    return math.exp(-float(np.mean(logprobs, dtype=np.float64)))


def referenced(path: Path, text: Path, count: int, folder: Path) -> tuple[Windows, Reference]:
    """The first windows of a text and the reference's scores, whose perplexity is printed."""
    with Checkpoint(path) as checkpoint:
        windows = corpus.cut("file", text, Tokenizer(path), spec_of(checkpoint.config), 512, count)
        torch_forward.write_reference(checkpoint, checkpoint.identity(), windows, folder)
        reference = torch_forward.load_reference(folder, checkpoint)
    ppl, expected = math.exp(-float(reference.logprob.mean(dtype=np.float64))), REFERENCE[count]
    print(f"{'reference':10} {ppl:9.4f} {expected:9.4f} {ppl / expected - 1:+8.3%}   {count} windows of 512")
    return windows, reference


def main() -> None:
    material = shared()
    if material is None:
        return
    formats = sys.argv[1:] or ["gguf", "mlx", "coreml"]
    far: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = make_smollm(material, work / "smollm")
        print("SmolLM2-135M as Qwen2, WikiText-2, flash attention off")
        if {"gguf", "mlx"} & {*formats}:
            windows, reference = referenced(path, material / TEXT, WINDOWS, work / "reference")
            if "gguf" in formats:
                gguf(path, material / TEXT, windows, reference, work)
            if "mlx" in formats:
                far += mlx(path, windows, reference, work)
        if "coreml" in formats:
            windows, reference = referenced(path, material / TEXT, COREML_WINDOWS, work / "reference-coreml")
            far += coreml(path, windows, reference, work)
    if far:
        sys.exit(f"off by more than it may be: {', '.join(far)}")


if __name__ == "__main__":
    main()
