"""Conversion against llama_model_quantize, in one run: wall time with start-up, and peak resident memory.

    python -m benchmarks.convert

The peer starts from a bf16 GGUF that already lies there; ours starts from safetensors. Rounds alternate; medians of
ROUNDS.
"""

from __future__ import annotations

import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.material import make_enlarged, make_smollm, shared
from pipeline.formats.gguf.schemes import SCHEMES

ROUNDS = 5
SCHEME_NAMES = ("q4_0", "q4_k_m", "q8_0", "q6_k")
PEER = """
import sys, llama_cpp
params = llama_cpp.llama_model_quantize_default_params()
params.ftype, params.nthread = int(sys.argv[3]), 0
sys.exit(llama_cpp.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), params))
"""


def run(command: list[str]) -> tuple[float, float]:
    """Seconds of wall clock and MB of peak resident memory of a command."""
    with tempfile.TemporaryFile() as said:  # not a pipe: the peer logs more than one holds
        begin = time.perf_counter()
        process = subprocess.Popen(command, stdout=said, stderr=said)
        _, status, usage = os.wait4(process.pid, 0)
        seconds = time.perf_counter() - begin
        if status:
            said.seek(0)
            raise SystemExit(f"failed: {' '.join(command)}\n{said.read().decode(errors='replace')[-2000:]}")
    unit = 1 if sys.platform == "darwin" else 1024  # ru_maxrss is in bytes on macOS, in KiB elsewhere
    return seconds, usage.ru_maxrss * unit / 1e6


def ours(checkpoint: Path, scheme: str, out: Path) -> list[str]:
    command = [str(Path(sys.executable).parent / "quantgate"), "convert", str(checkpoint)]
    return [*command, "--format", "gguf", "--scheme", scheme, "--out", str(out)]


def main() -> None:
    material = shared()
    if material is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        once = make_smollm(material, work / "smollm")
        twice = make_enlarged(once, 2, work / "twice")
        run(ours(once, "bf16", work / "bf16"))
        print("Conversion of SmolLM2-135M as Qwen2 (269 MB bf16), medians of", ROUNDS, "alternating rounds")
        print(f"{'scheme':8} {'ours, s':>8} {'MB':>5} {'peer, s':>8} {'MB':>5} {'ours/peer':>9} {'of twice, MB':>13}")
        for scheme in SCHEME_NAMES:
            samples: dict[str, list[tuple[float, float]]] = {"ours": [], "peer": [], "twice": []}
            for i in range(ROUNDS):
                base, ftype = str(work / "bf16" / "model.gguf"), str(SCHEMES[scheme].ftype)
                commands = {
                    "ours": ours(once, scheme, work / f"ours-{scheme}-{i}"),
                    "peer": [sys.executable, "-c", PEER, base, str(work / "peer.gguf"), ftype],
                    "twice": ours(twice, scheme, work / f"twice-{scheme}-{i}"),
                }
                for name, command in commands.items():
                    samples[name].append(run(command))
                for out in (work / f"ours-{scheme}-{i}", work / f"twice-{scheme}-{i}"):
                    shutil.rmtree(out)  # unwritten pages would disturb the next
            seconds = {name: statistics.median(s for s, _ in pairs) for name, pairs in samples.items()}
            memory = {name: max(m for _, m in pairs) for name, pairs in samples.items()}
            ratio = seconds["ours"] / seconds["peer"]
            print(
                f"{scheme:8} {seconds['ours']:8.2f} {memory['ours']:5.0f} {seconds['peer']:8.2f} {memory['peer']:5.0f} "
                f"{ratio:9.2f} {memory['twice']:13.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
