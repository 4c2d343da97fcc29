"""What intervals, p-values and estimates of power promise, on windows drawn from real scores whose mean is known.

Shares of `RUNS` have a standard error of 0.3 points at 95 %, and of 0.6 at 80 %.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.stats
from simulation import p_below, pools, resampled

from pipeline.metrics.stats import CONFIDENCE, holm, mean_interval, p_above, windows_needed
from pipeline.types import Interval

RUNS = 4000
POOLS = pools()


def intervals(runs: np.ndarray) -> list[Interval]:
    return [mean_interval(run) for run in runs]


@pytest.mark.parametrize("windows", [16, 64, 592])
@pytest.mark.parametrize("name", [*POOLS])
def test_an_interval_covers_the_mean_as_often_as_it_says(name: str, windows: int) -> None:
    """A gate whose limit is the mean decides in the other runs, and wrongly: in at most 5 % on either side."""
    pool = POOLS[name]
    found = intervals(resampled(pool, RUNS, windows, seed=6))
    below = np.mean([interval.high < pool.mean() for interval in found])
    above = np.mean([interval.low > pool.mean() for interval in found])
    assert 0.94 <= 1 - below - above <= 0.97
    assert max(below, above) <= 0.05


@pytest.mark.parametrize("name", [*POOLS])
def test_p_values_are_as_likely_as_they_say(name: str) -> None:
    """Where the true mean is the limit, a p-value is below a in a share of a; but for what skewness g does to Student's
    t, about g (2 x² + 1) φ(x) / 6√n at its quantile x (Hall, The Bootstrap and Edgeworth Expansion, 1992, section 2.6).
    """
    pool, windows = POOLS[name], 64
    found = intervals(resampled(pool, RUNS, windows, seed=7))
    for test, side in ((p_above, -1), (p_below, 1)):
        p = np.array([test(interval, pool.mean()) for interval in found])
        for level in (0.025, 0.1, 0.5):
            x = scipy.stats.norm.ppf(level)
            skewed = scipy.stats.skew(pool) * (2 * x * x + 1) * scipy.stats.norm.pdf(x) / 6 / math.sqrt(windows)
            error = math.sqrt(level * (1 - level) / RUNS)
            assert np.mean(p <= level) == pytest.approx(level + side * skewed, abs=3 * error + 0.003)


@pytest.mark.parametrize("windows", [16, 64, 592])
def test_a_family_of_checks_seldom_fails_what_is_within_its_limits(windows: int) -> None:
    """Six checks of two variants, all on their limits, and dependent: of the same windows."""
    at = np.random.default_rng(8).integers(0, len(POOLS["q8_0 kld"]), (RUNS // 2, windows))
    p = np.empty((len(at), len(POOLS)))
    for column, (name, pool) in enumerate(POOLS.items()):
        test = p_below if name.endswith("same_top") else p_above
        p[:, column] = [test(interval, pool.mean()) for interval in intervals(pool[at])]
    level = (1 - CONFIDENCE) / 2
    failed = np.mean([min(holm(row)) <= level for row in p.tolist()])
    assert failed <= level + 2 * math.sqrt(level * (1 - level) / len(at))
    assert np.mean(p.min(axis=1) <= level) > failed  # which is what the correction is for


@pytest.mark.parametrize("margin", [0.25, 0.5, 1.0])
@pytest.mark.parametrize("name", [*POOLS])
def test_the_windows_needed_decide_in_about_80_of_100_runs(name: str, margin: float) -> None:
    """`margin` is that of the limit, on either side, in deviations of the windows: some 128, 34 and 10 are needed.
    Skewed windows take more on one side and less on the other, of which the estimate knows nothing.
    """
    pool = POOLS[name]
    decided = {}
    for side in (-1, 1):
        limit = pool.mean() + side * margin * pool.std()
        needed = windows_needed(Interval(pool.mean(), *ends_of(pool, 4), 4), limit)
        assert needed is not None
        found = intervals(resampled(pool, RUNS, needed, seed=9))
        decided[side] = np.mean([interval.high < limit if side > 0 else interval.low > limit for interval in found])
        assert decided[side] == pytest.approx(0.8, abs=0.02 + abs(scipy.stats.skew(pool)) / 2 / math.sqrt(needed))
    assert sum(decided.values()) / 2 == pytest.approx(0.8, abs=0.03)


def ends_of(pool: np.ndarray, windows: int) -> tuple[float, float]:
    """Of the interval of so many windows that have the pool's mean and deviation."""
    like = np.array([-1.0, 1.0] * (windows // 2))
    found = mean_interval(pool.mean() + pool.std() * like / like.std(ddof=1))
    return found.low, found.high
