"""After how many windows a question about a real checkpoint is settled, and how often wrongly.

    python -m benchmarks.sequential [--write FILE [--windows N]]

SmolLM2-135M as Qwen2 on WikiText-2, windows of 512 in the corpus's shuffled order, flash attention off: q8_0 is within
1 % of the reference's perplexity, q4_0 is not. Then error rates from runs as long as the corpus, resampled from real
windows (tests/metrics/window_scores.npz), where the truth lies on the limit and every window is looked at. Minutes;
with --write, which first scores N windows of both variants, in that order, into such a file, up to most of an hour.
Exits 1 where more windows were needed or more runs are wrong than may be.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.material import TEXT, make_smollm, shared
from pipeline import artifact, corpus, torch_forward
from pipeline.formats import room
from pipeline.metrics import quality, sequential
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference
from pipeline.types import Windows

LIMIT = math.log(1.01)  # nats per token: 1 % of perplexity
MOST = {"q8_0": 60, "q4_0": 10}
"""Windows after which each is to be decided."""
FIGURES = ("ln_ppl_ratio", "kld", "same_top")
SCORES = Path(__file__).parent.parent / "tests" / "metrics" / "window_scores.npz"
RUNS = 2000
MOST_WRONG = 0.05
SETTINGS: dict[str, Any] = {"threads": 0, "flash_attention": False, "kv_type": "f16"}

Figures = NDArray[np.float64]  # of one window: the mean of each of FIGURES


def scored(path: Path, scheme: str, windows: Windows, reference: Reference, out: Path) -> Iterator[Figures]:
    """The figures of one window after another."""
    made = artifact.convert(path, "gguf", scheme, out)
    runtime = room("gguf", "run").open_runtime(out, made, context=windows.context, **SETTINGS)
    try:
        for at in range(len(windows.ids)):
            one = slice(at, at + 1)
            expected = replace(reference, hidden=reference.hidden[one], logprob=reference.logprob[one])
            found = quality.score(runtime, picked(windows, [at]), expected)
            difference = expected.logprob - found.logprob
            yield np.array([float(np.mean(of, dtype=np.float64)) for of in (difference, found.kld, found.same_top)])
    finally:
        runtime.close()


def picked(windows: Windows, places: list[int]) -> Windows:
    return replace(windows, ids=windows.ids[places], span_bytes=windows.span_bytes[places])


def referenced(checkpoint: Checkpoint, windows: Windows, folder: Path) -> Reference:
    print(f"the reference of {len(windows.ids)} windows …", flush=True)
    torch_forward.write_reference(checkpoint, checkpoint.identity(), windows, folder)
    return torch_forward.load_reference(folder, checkpoint)


def settle(found: Iterator[Figures]) -> tuple[int, str]:
    """After how many windows it is clear whether the perplexity is within the limit, and what was found."""
    values: list[float] = []
    for figures in found:
        values.append(float(figures[0]))
        interval = sequential.anytime_interval(np.array(values))
        shown = f"{interval.value:+.5f} [{interval.low:+.5f}, {interval.high:+.5f}]"
        if interval.high <= LIMIT or interval.low > LIMIT:
            return len(values), f"{'pass' if interval.high <= LIMIT else 'fail':5} {shown}"
    return len(values), f"open  {shown}"


def wrong(pool: NDArray[np.float64], windows: int | None) -> float:
    """Share of runs that ever leave out the mean of the pool: windows drawn with replacement, or all of it shuffled."""
    rng = np.random.default_rng(0)
    runs = rng.choice(pool, (RUNS, windows)) if windows else rng.permuted(np.tile(pool, (RUNS, 1)), axis=1)
    low, high = sequential.anytime_bounds(runs)
    return float(np.mean(((low > pool.mean()) | (high < pool.mean())).any(axis=1)))


def errors(path: Path) -> list[str]:
    """Prints the error rates; those of figures that are wrong too often."""
    print(f"\n{'decided wrongly':20} {'resampled':>10} {'shuffled':>10} {'mean':>9} {'deviation':>10}   {RUNS} runs")
    often = []
    with np.load(path) as stored:
        windows = int(stored["corpus_windows"])
        for scheme in MOST:
            for figure, pool in zip(FIGURES, stored[scheme].astype(np.float64), strict=True):
                rate = wrong(pool, windows)
                print(
                    f"{scheme:5} {figure:14} {rate:10.2%} {wrong(pool, None):10.2%} {pool.mean():9.5f} "
                    f"{pool.std(ddof=1):10.5f}"
                )
                often += [f"{scheme} {figure}"] if rate > MOST_WRONG else []
    return often


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.sequential")
    parser.add_argument("--write", type=Path, metavar="FILE", help="score all windows, and leave their figures here")
    parser.add_argument("--windows", type=int, metavar="N", help="of the corpus, to leave there; all if not given")
    given = parser.parse_args()
    written: Path | None = given.write
    material = shared()
    if material is None:
        return
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        path = make_smollm(material, work / "smollm")
        with Checkpoint(path) as checkpoint:
            spec = spec_of(checkpoint.config)
            windows = corpus.cut("file", material / TEXT, Tokenizer(path), spec, 512, None)
            ids_sha256 = torch_forward.reference_meta(checkpoint.identity(), windows)["ids_sha256"]
            places = sequential.order(len(windows.ids), ids_sha256)
            count = max(MOST.values()) if written is None else given.windows or len(places)
            first = picked(windows, places[:count])
            reference = referenced(checkpoint, first, work / "reference")
            late, kept = [], {}
            print(f"{'is within 1 %':13} {'windows':>7} of {len(places)}, of at most   ln(PPL ratio)")
            for scheme, most in MOST.items():
                found = scored(path, scheme, first, reference, work / scheme)
                if written:
                    kept[scheme] = np.array([*found])
                    found = iter(kept[scheme])
                needed, what = settle(found)
                print(f"{scheme:13} {needed:7} {'':6} {most:11}   {what}", flush=True)
                late += [scheme] if needed > most or what.startswith("open") else []
    if written:
        arrays: dict[str, Any] = {scheme: figures.T.astype(np.float32) for scheme, figures in kept.items()}
        np.savez_compressed(written, corpus_windows=np.array(len(places)), **arrays)
    problems = [f"{scheme} was not decided in time" for scheme in late]
    problems += [f"{name} is decided wrongly too often" for name in errors(written or SCORES)]
    if problems:
        sys.exit("; ".join(problems))


if __name__ == "__main__":
    main()
