"""Stopping at will: a confidence sequence for the mean of windows, valid however often one looks at it.

**Estimand.** The mean over the text that the windows are drawn from: what scoring all of them would give. `order` fixes
a shuffled order, so that any first n windows are a sample of the text; the samples are drawn without replacement, for
which the bounds, made for independent ones, are too wide rather than too narrow (Hoeffding, J. Am. Stat. Assoc. 58,
1963, shows it for sums; that it holds here is checked by simulation). About other text it says what the interval of the
full run says, on the same ground: that its windows are like these.

**Test.** For windows x with mean m under the null, y = x - m. Against normal y with mean 0 stand those with mean dσ, d
from the prior N(0, g); both have the right Haar prior dσ/σ on their deviation. The Bayes factor (Gönen, Johnson, Lu and
Westfall, American Statistician 59, 2005) is ((1 + u) / (1 + u / r))^(n/2) / √r, with r = 1 + ng and u = n (x̄ - m)² /
Σ(x - x̄)²; `half_width` solves it for m. It depends on the ratios of the y alone, whose distribution under the null is
the same for every σ, and on that knowledge is a martingale that starts at 1 (Lai, Annals of Statistics 4, 1976;
Pérez-Ortiz, Lardy, de Heide and Grünwald, Annals of Statistics 52, 2024; Wang and Ramdas, Sequential Analysis 44,
2025). By Ville's inequality it ever reaches 1/a with a chance of at most a, so the means that it has not reached 1/a
for at each n are a confidence sequence.

**Prior.** g = 1: what one window tells of the mean, the unit-information prior (Kass and Wasserman, J. Am. Stat. Assoc.
90, 1995), which is the customary default where no effect size is expected. What is asked of a variant spans margins
from a fraction of the windows' deviation to several of it, and over these g hardly matters: it enters by
ln(1 + ng) / 2.

**Proven and not.** The bound on errors is proven for independent normal window means, whatever their deviation (at 95 %
and 592 windows 3.4 % are wrong, as the bet may win later still). Those of real scores are means of hundreds of tokens,
near normal but skewed; for them it is checked by simulation. It holds up to a skewness of 1 (LEAST), not of 2 (11 %).
Windows without any spread are outside of it (LEAST_EQUAL).
"""

from __future__ import annotations

import hashlib
import math

import numpy as np
from numpy.typing import NDArray

from pipeline.metrics.stats import CONFIDENCE
from pipeline.types import Interval

Bounds = NDArray[np.float64]

PRIOR_VARIANCE = 1.0
"""g: of the mean in units of the deviation."""
LEAST = 10
"""Windows before the first look. Where windows are skewed, few of them decide wrongly too often: gamma variates of
skewness 1 did in 6.0 % of 60,000 runs of 592 that were looked at from the fifth on, in 4.9 % from the tenth.
"""
LEAST_EQUAL = 29
"""Windows that are all equal before this counts as having no spread. Ties have no chance in a normal model, in a count
of tokens they do: where a tenth of all windows differs from the others, 29 in a row do not with a chance of 0.9^29 <
5 %. Where fewer differ, it is more: equal windows say that few others differ, not how much those do.
"""


def order(windows: int, ids_sha256: str) -> list[int]:
    """Windows shuffled in an order that the corpus fixes, by the SHA-256 of its hash and their place: every variant is
    asked about the same windows first, and nobody chooses them.
    """
    return sorted(range(windows), key=lambda at: hashlib.sha256(f"{ids_sha256} {at}".encode()).digest())


def anytime_interval(values: NDArray[np.floating], confidence: float = CONFIDENCE) -> Interval:
    """The means that are not rejected after these values, [windows] in `order`: those whose Bayes factor is below
    1 / (1 - confidence), which is mean ± s `half_width`, s being the sample deviation.

    With the confidence stated, it holds the true mean after every window at once. It is infinite for fewer windows than
    LEAST, or than LEAST_EQUAL where they are all equal.
    """
    n, mean = len(values), float(np.mean(values, dtype=np.float64))
    if _are_equal(values):
        mean, half = float(values[0]), 0.0 if n >= LEAST_EQUAL else math.inf
        return Interval(mean, mean - half, mean + half, n)
    half = half_width(n, confidence) * float(np.std(values, ddof=1, dtype=np.float64))
    return Interval(mean, mean - half, mean + half, n)


def anytime_bounds(values: NDArray[np.floating], confidence: float = CONFIDENCE) -> tuple[Bounds, Bounds]:
    """Low and high of `anytime_interval` after each window: float64 [..., windows], of values of this shape."""
    counts = np.arange(1, values.shape[-1] + 1)
    first = values[..., :1].astype(np.float64)
    away = values - first  # so that squares do not cancel
    mean = np.cumsum(away, axis=-1) / counts
    squares = np.maximum(np.cumsum(away**2, axis=-1) - counts * mean**2, 0)
    equal = np.maximum.accumulate(np.abs(away), axis=-1) == 0
    spread = np.where(equal, 1.0, np.sqrt(squares / np.maximum(counts - 1, 1)))
    half = np.array([half_width(int(n), confidence) for n in counts]) * spread
    half = np.where(equal, np.where(counts < LEAST_EQUAL, np.inf, 0.0), half)
    return first + mean - half, first + mean + half


def half_width(n: int, confidence: float = CONFIDENCE) -> float:
    """Of the interval of n windows, in sample deviations: √((b - 1) / (1 - b / r) · (n - 1) / n), with r = 1 + ng and
    b = (√r / (1 - confidence))^(2/n); infinite while n < LEAST or b ≥ r.
    """
    ratio = 1 + n * PRIOR_VARIANCE
    bound = (math.sqrt(ratio) / (1 - confidence)) ** (2 / n)
    return math.sqrt((bound - 1) / (1 - bound / ratio) * (n - 1) / n) if n >= LEAST and bound < ratio else math.inf


def _are_equal(values: NDArray[np.floating]) -> bool:
    return bool(values.min() == values.max())
