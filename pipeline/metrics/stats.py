"""Intervals for figures whose unit is the window: tokens of one window are dependent, windows are not. And trends.

Percentile bootstraps of a mean cover only 90 to 92 % at 16 windows (measured), so means get Student's t.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from pipeline.types import Interval

CONFIDENCE = 0.95
RESAMPLES = 1000
EXACT_TREND = 33  # values; beyond, the normal approximation is as good


def mean_interval(values: NDArray[np.floating]) -> Interval:
    """Mean of n independent values with its two-sided Student t interval (Student, Biometrika 6, 1908).

    Zero variance gives [x, x]; a single value gives an infinite interval, since it says nothing about spread.
    """
    n, mean = len(values), float(np.mean(values, dtype=np.float64))
    if n < 2:
        return Interval(mean, -math.inf, math.inf, n)
    deviation = float(np.std(values, ddof=1, dtype=np.float64))
    half = t_quantile((1 + CONFIDENCE) / 2, n - 1) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def clipped(interval: Interval, least: float, most: float) -> Interval:
    """The interval without ends that the figure cannot reach; unbounded ones stay so."""
    if not math.isfinite(interval.low):
        return interval
    return Interval(interval.value, max(interval.low, least), min(interval.high, most), interval.n)


def quantile_intervals(values: NDArray[np.floating], levels: list[float], seed: int) -> list[Interval]:
    """Quantiles over all tokens of values [windows, tokens], with intervals from resampled windows.

    Percentile bootstrap over clusters (Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapters 8 and
    13).
    """
    rng = np.random.default_rng(seed)
    n = len(values)
    points = np.quantile(values, levels)
    if n < 2:
        return [Interval(float(p), -math.inf, math.inf, n) for p in points]
    draws = np.array(
        [np.quantile(values[rng.integers(0, n, n)], levels) for _ in range(RESAMPLES)]
    )  # (resamples, levels)
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(draws, [tail, 1 - tail], axis=0)
    return [Interval(float(p), float(lo), float(hi), n) for p, lo, hi in zip(points, low, high, strict=True)]


def median_interval(samples: Sequence[float]) -> Interval:
    """Median of independent samples with the narrowest interval of order statistics that covers it by at least 95 %.

    Distribution-free (David and Nagaraja, Order Statistics, 2003, section 7.1): the count of samples below the median
    is binomial(n, 1/2). Below 6 samples no two order statistics reach 95 %: the interval is infinite.
    """
    n, ordered = len(samples), sorted(samples)
    middle = float(np.median(ordered))
    below, cut = 0.0, 0  # P(count < cut)
    while cut < n // 2 and 2 * (below + math.comb(n, cut) / 2**n) <= 1 - CONFIDENCE:
        below += math.comb(n, cut) / 2**n
        cut += 1
    if cut == 0:
        return Interval(middle, -math.inf, math.inf, n)
    return Interval(middle, ordered[cut - 1], ordered[n - cut], n)


def theil_sen_slope(values: Sequence[float]) -> float:
    """Median slope of all pairs of values over their index (Sen, J. Am. Stat. Assoc. 63, 1968); at least two values."""
    pairs = combinations(range(len(values)), 2)
    return float(np.median([(values[j] - values[i]) / (j - i) for i, j in pairs]))


def mann_kendall_p(values: Sequence[float]) -> float:
    """Two-sided p-value that values which do not depend on their order rise or fall as much (Mann, Econometrica 13,
    1945).

    Exact without ties up to EXACT_TREND values: permutations of n are counted by their inversions (Kendall, Rank
    Correlation Methods, 1970, chapter 5). Else the normal approximation, its variance corrected for ties.
    """
    n = len(values)
    if n < 2:
        return 1.0
    signs = [(values[j] > values[i]) - (values[j] < values[i]) for i, j in combinations(range(n), 2)]
    score = sum(signs)
    ties = Counter(values).values()
    if max(ties) == 1 and n <= EXACT_TREND:
        discordant = signs.count(-1)
        counts = _inversions(n)
        return min(1.0, 2 * sum(counts[: min(discordant, len(signs) - discordant) + 1]) / math.factorial(n))
    variance = (n * (n - 1) * (2 * n + 5) - sum(t * (t - 1) * (2 * t + 5) for t in ties)) / 18
    return math.erfc(abs(score) / math.sqrt(2 * variance)) if variance else 1.0


def _inversions(n: int) -> list[int]:
    """How many permutations of n have 0, 1, 2, … inversions: the k-th element adds 0 to k - 1."""
    counts = [1]
    for k in range(2, n + 1):
        wider = len(counts) + k - 1
        counts = [sum(counts[max(0, i - k + 1) : i + 1]) for i in range(wider)]
    return counts


def windows_needed(interval: Interval, limit: float) -> int | None:
    """About how many windows make the interval narrow enough to fall on one side of `limit`; None if never.

    The spread of the windows seen is taken as that of the windows to come, the mean as it stands.
    """
    margin = abs(limit - interval.value)
    if margin == 0 or interval.n < 2 or not math.isfinite(interval.high):
        return None
    deviation = (
        (interval.high - interval.value) * math.sqrt(interval.n) / t_quantile((1 + CONFIDENCE) / 2, interval.n - 1)
    )
    needed = interval.n + 1
    while t_quantile((1 + CONFIDENCE) / 2, needed - 1) * deviation / math.sqrt(needed) > margin:
        needed = math.ceil(needed * 1.05) + 1
        if needed > 10_000_000:
            return None
    return needed


def t_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t for p > 1/2, by bisection of its distribution function to 1e-12."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < p:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_cdf(middle, freedom) < p:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_cdf(t: float, freedom: int) -> float:
    """P(T ≤ t) for t ≥ 0: 1 - I_x(v/2, 1/2) / 2 with x = v / (v + t²) (Abramowitz and Stegun 26.7.1).

    Near 0 its complement 1/2 + I_(1-x)(1/2, v/2) / 2 keeps the digits.
    """
    if t * t > freedom:
        return 1 - _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t)) / 2
    return 0.5 + _incomplete_beta(0.5, freedom / 2, t * t / (freedom + t * t)) / 2


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """Regularised I_x(a, b) by its continued fraction (DLMF 8.17.22), in the arrangement of Lentz."""
    if x in (0.0, 1.0):
        return x
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this point
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x))
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 1000):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d = 1 / (1 + even * d)
        c = 1 + even / c
        fraction *= c * d
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d = 1 / (1 + odd * d)
        c = 1 + odd / c
        fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    return front * fraction / a


def interval_json(interval: Interval) -> dict[str, float | None]:
    """Value, low and high."""
    return {"value": interval.value, **bounds(interval)}


def bounds(interval: Interval) -> dict[str, float | None]:
    """Low and high; null where too few units bound nothing."""
    return {name: end if math.isfinite(end) else None for name, end in (("low", interval.low), ("high", interval.high))}
