"""Conversion to MLX against mlx_lm.convert, in one run: wall time with start-up, and peak resident memory.

    python -m benchmarks.mlx

SmolLM2-135M as Qwen2 and the same four times as large, to int4 in groups of 64. Each command runs in a process of its
own, which says at its end what it had resident at most; rounds alternate, and who begins them does; medians of ROUNDS.
Exits 1 where ours is slower than mlx_lm.convert, or takes more than MOST times the memory of `import mlx_lm` alone,
at either size.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from benchmarks.material import make_enlarged, make_smollm, shared

ROUNDS = 5
TIMES = 4  # as large
MOST = 1.5  # times the memory of the import
FAR = 55.0  # GB of a checkpoint that both are extrapolated to

OURS = "from pipeline.cli import main; main(standalone_mode=False)"
PEER = "from mlx_lm.convert import main; main()"
IMPORT = "import mlx_lm"
AND_PEAK = "; from pipeline.metrics.memory import peak_rss_bytes; open({!r}, 'w').write(str(peak_rss_bytes()))"


@dataclass(frozen=True)
class Cost:
    """Seconds of wall clock and MB of peak resident memory."""

    seconds: float
    megabytes: float


def run(code: str, arguments: list[str], work: Path) -> Cost:
    """What Python code costs in a process of its own, start-up included."""
    said = work / "peak"
    command = [sys.executable, "-c", code + AND_PEAK.format(str(said)), *arguments]
    begin = time.perf_counter()
    done = subprocess.run(
        command, env=os.environ | {"HF_HUB_OFFLINE": "1"}, capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - begin
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}\n{(done.stdout + done.stderr)[-2000:]}")
    return Cost(seconds, int(said.read_text()) / 1e6)


def ours(checkpoint: Path, out: Path) -> tuple[str, list[str]]:
    return OURS, ["convert", str(checkpoint), "--format", "mlx", "--scheme", "int4", "--out", str(out)]


def peer(checkpoint: Path, out: Path) -> tuple[str, list[str]]:
    asked = ["-q", "--q-bits", "4", "--q-group-size", "64"]
    return PEER, ["--hf-path", str(checkpoint), "--mlx-path", str(out), *asked]


def alternating(checkpoints: dict[str, Path], work: Path) -> dict[str, Cost]:
    """Median costs of ours and theirs on each checkpoint, and of the import alone."""
    found: dict[str, list[Cost]] = {}
    for i in range(ROUNDS):
        for size, checkpoint in checkpoints.items():
            for name, command in (("ours", ours), ("peer", peer))[:: 1 if i % 2 == 0 else -1]:
                out = work / f"{name}-{size}-{i}"
                found.setdefault(f"{name} {size}", []).append(run(*command(checkpoint, out), work))
                shutil.rmtree(out)  # unwritten pages would disturb the next
        found.setdefault("import", []).append(run(IMPORT, [], work))
    return {
        name: Cost(median(cost.seconds for cost in costs), median(cost.megabytes for cost in costs))
        for name, costs in found.items()
    }


def extrapolated(near: float, far: float, sizes: tuple[float, float]) -> tuple[float, float]:
    """The slope per GB between two figures at two sizes in GB, and where its line is at FAR."""
    slope = (far - near) / (sizes[1] - sizes[0])
    return slope, far + slope * (FAR - sizes[1])


def main() -> None:
    material = shared()
    if material is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        once = make_smollm(material, work / "smollm")
        checkpoints = {"once": once, "larger": make_enlarged(once, TIMES, work / "larger")}
        gigabytes = {size: (path / "model.safetensors").stat().st_size / 1e9 for size, path in checkpoints.items()}
        found = alternating(checkpoints, work)
    alone = found["import"].megabytes
    print(f"SmolLM2-135M as Qwen2 to MLX int4, and {TIMES} times as large; medians of {ROUNDS} alternating rounds")
    print(f"`import mlx_lm` alone: {found['import'].seconds:.2f} s, {alone:.0f} MB")
    print(f"{'bf16, GB':>8} {'ours, s':>8} {'MB':>5} {'of import':>9} {'mlx_lm, s':>10} {'MB':>5} {'ours/mlx_lm':>11}")
    problems = []
    for size, gb in gigabytes.items():
        mine, theirs = found[f"ours {size}"], found[f"peer {size}"]
        ratio, memory = mine.seconds / theirs.seconds, mine.megabytes / alone
        print(
            f"{gb:8.3f} {mine.seconds:8.2f} {mine.megabytes:5.0f} {memory:9.2f} {theirs.seconds:10.2f} "
            f"{theirs.megabytes:5.0f} {ratio:11.2f}"
        )
        problems += [f"{gb:.3f} GB: {ratio:.2f} times the time of mlx_lm.convert"] if ratio > 1 else []
        problems += [f"{gb:.3f} GB: {memory:.2f} times the memory of the import"] if memory > MOST else []
    for name, called in (("ours", "ours"), ("peer", "mlx_lm")):
        near, far = found[f"{name} once"], found[f"{name} larger"]
        sizes = (gigabytes["once"], gigabytes["larger"])
        per_gb, seconds = extrapolated(near.seconds, far.seconds, sizes)
        mb_per_gb, megabytes = extrapolated(near.megabytes, far.megabytes, sizes)
        print(
            f"{called}: {per_gb:.2f} s and {mb_per_gb:.0f} MB for each GB more. Extrapolated, not measured: "
            f"{seconds:.0f} s and {megabytes:.0f} MB for {FAR:.0f} GB"
        )
    if problems:
        sys.exit(f"not as asked: {'; '.join(problems)}")


if __name__ == "__main__":
    main()
