"""Windows of real scores to resample from, with the truth known: the mean over all of them. And p-values from below."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.metrics.stats import p_above
from pipeline.types import Interval

SCORES = Path(__file__).with_name("window_scores.npz")
FIGURES = ("ln_ppl_ratio", "kld", "same_top")


def pools() -> dict[str, NDArray[np.float64]]:
    """Scheme and figure -> its mean in each window, in the order in which a sequential run takes them.

    Of SmolLM2-135M as Qwen2 in the first windows, of 592 of 512 tokens in that order, of WikiText-2's raw test split,
    as `python -m benchmarks.sequential --write tests/metrics/window_scores.npz --windows N` leaves them.
    """
    with np.load(SCORES) as stored:
        return {
            f"{scheme} {figure}": stored[scheme][row].astype(np.float64)
            for scheme in ("q8_0", "q4_0")
            for row, figure in enumerate(FIGURES)
        }


def resampled(pool: NDArray[np.float64], runs: int, windows: int, seed: int) -> NDArray[np.float64]:
    """[runs, windows], drawn with replacement."""
    return pool[np.random.default_rng(seed).integers(0, len(pool), (runs, windows))]


def p_below(interval: Interval, limit: float) -> float:
    """The p-value of a figure that is limited from below."""
    return p_above(Interval(-interval.value, -interval.high, -interval.low, interval.n), -limit)
