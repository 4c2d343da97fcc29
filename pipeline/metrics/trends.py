"""Whether a row of values rises or falls: its slope, and how likely chance alone would do that."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import combinations

import numpy as np

EXACT_TREND = 33  # values; beyond, the normal approximation is as good


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
