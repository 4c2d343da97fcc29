"""Intervals against scipy, direct computation, and what simulated data say of their coverage."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats

from pipeline.metrics.stats import (
    bounds,
    clipped,
    interval_json,
    mean_interval,
    median_interval,
    power_of,
    quantile_intervals,
    windows_needed,
)
from pipeline.types import Interval

# Means


@pytest.mark.parametrize("n", [2, 3, 5, 16, 40, 400, 20_000])
def test_a_mean_has_the_interval_of_scipy(n: int) -> None:
    values = np.random.default_rng(n).normal(0.3, 2.0, n)
    found = mean_interval(values)
    low, high = scipy.stats.t.interval(0.95, n - 1, loc=values.mean(), scale=scipy.stats.sem(values))
    assert found.n == n
    assert found.value == pytest.approx(values.mean(), rel=1e-13)
    assert (found.low, found.high) == pytest.approx((low, high), rel=1e-10)


def test_float32_values_are_summed_in_float64() -> None:
    values = np.full(300_000, 0.1, np.float32)
    values[:3] = 1e6
    exact = values.astype(np.float64)
    found = mean_interval(values)
    assert found.value == pytest.approx(exact.mean(), rel=1e-13)
    assert found.high - found.value == pytest.approx(1.96 * scipy.stats.sem(exact), rel=1e-4)


def test_zero_variance_is_a_point() -> None:
    assert mean_interval(np.full(12, 0.25)) == Interval(0.25, 0.25, 0.25, 12)
    for value in (0.1, 0.7, 1 / 3, -2.2):  # whose sums are rounded
        assert mean_interval(np.full(13, value)) == Interval(value, value, value, 13)


def test_one_value_says_nothing_of_spread() -> None:
    assert mean_interval(np.array([0.7])) == Interval(0.7, -math.inf, math.inf, 1)


def test_a_mean_is_covered_as_often_as_promised() -> None:
    rng = np.random.default_rng(11)
    runs = rng.normal(1.5, 0.4, (4000, 16))
    covered = np.mean([(found := mean_interval(run)).low <= 1.5 <= found.high for run in runs])
    assert 0.94 <= covered <= 0.97


def test_an_interval_is_clipped_to_what_can_be_reached() -> None:
    assert clipped(Interval(0.9, 0.7, 1.1, 5), 0, 1) == Interval(0.9, 0.7, 1, 5)
    assert clipped(Interval(0.1, -0.1, 0.3, 5), 0, math.inf) == Interval(0.1, 0, 0.3, 5)
    assert clipped(Interval(0.5, 0.4, 0.6, 5), 0, 1) == Interval(0.5, 0.4, 0.6, 5)
    assert clipped(Interval(0.5, -math.inf, math.inf, 1), 0, 1) == Interval(0.5, -math.inf, math.inf, 1)


# Medians


@pytest.mark.parametrize("n", [6, 7, 8, 9, 11, 12, 20, 21, 50])
def test_a_median_has_the_narrowest_order_statistics_that_cover_it(n: int) -> None:
    samples = list(np.random.default_rng(n).permutation(n).astype(float))  # 0 … n - 1: values are ranks

    def coverage(cut: int) -> float:
        """P(x_cut < median < x_n-1-cut): more than `cut` samples lie on each side."""
        below = scipy.stats.binom.cdf(cut, n, 0.5)
        return 1 - 2 * below

    cut = max(c for c in range(n // 2) if coverage(c) >= 0.95)
    assert median_interval(samples) == Interval((n - 1) / 2, float(cut), float(n - 1 - cut), n)


def test_seven_samples_are_bounded_by_the_least_and_the_greatest() -> None:
    assert median_interval([5.0, 1.0, 9.0, 3.0, 4.0, 8.0, 2.0]) == Interval(4.0, 1.0, 9.0, 7)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_below_six_samples_a_median_is_not_bounded(n: int) -> None:
    found = median_interval([float(i) for i in range(n)])
    assert found == Interval((n - 1) / 2, -math.inf, math.inf, n)


@pytest.mark.parametrize("n", [6, 7, 10, 25])
def test_a_median_is_covered_by_at_least_what_is_promised(n: int) -> None:
    runs = np.random.default_rng(n).lognormal(0.0, 1.0, (4000, n))  # skewed, its median is 1
    covered = np.mean([(found := median_interval(list(run))).low <= 1.0 <= found.high for run in runs])
    assert covered >= 0.95 - 2 * math.sqrt(0.95 * 0.05 / 4000)


def test_the_order_of_samples_does_not_matter() -> None:
    samples = [3.0, 1.0, 2.0, 7.0, 5.0, 6.0, 4.0, 9.0]
    assert median_interval(samples) == median_interval(sorted(samples))
    assert samples[0] == 3.0  # and they are left as they were


# Quantiles


def test_quantiles_are_those_of_numpy_and_the_seed_decides_the_rest() -> None:
    values = np.random.default_rng(1).exponential(1.0, (12, 30)).astype(np.float32)
    levels = [0.5, 0.99, 0.999]
    first, again, other = (quantile_intervals(values, levels, seed) for seed in (7, 7, 8))
    assert first == again
    assert [(f.low, f.high) for f in first] != [(f.low, f.high) for f in other]
    assert [f.value for f in first] == [float(q) for q in np.quantile(values, levels)]
    assert [f.n for f in first] == [12, 12, 12]
    for found in first:
        assert found.low <= found.value <= found.high
        assert found.low < found.high


def test_bounds_of_quantiles_are_those_of_scipys_bootstrap() -> None:
    """But for chance: both resample, as often and by other random numbers."""
    values = np.random.default_rng(1).exponential(1.0, (16, 30)) * np.linspace(0.5, 2, 16)[:, None]
    (found,) = quantile_intervals(values, [0.9], 7)
    expected = scipy.stats.bootstrap(
        (np.arange(16),),
        lambda rows: np.quantile(values[rows], 0.9),
        vectorized=False,
        n_resamples=1000,
        method="percentile",
        rng=np.random.default_rng(0),
    ).confidence_interval
    assert (found.low, found.high) == pytest.approx(tuple(expected), abs=0.1 * (expected.high - expected.low))


def test_quantiles_of_constant_values_have_no_width() -> None:
    values = np.full((8, 5), 0.5, np.float32)
    assert quantile_intervals(values, [0.5, 0.99], 0) == [Interval(0.5, 0.5, 0.5, 8)] * 2


def test_whole_windows_are_resampled() -> None:
    """Windows that differ, each constant: resampled tokens would pin the median between 0 and 9 to one value."""
    rows = np.repeat(np.arange(10.0)[:, None], 200, axis=1)
    (clustered,) = quantile_intervals(rows, [0.5], 0)
    assert clustered.high - clustered.low >= 3
    (independent,) = quantile_intervals(rows.reshape(-1, 1), [0.5], 0)
    assert independent.high - independent.low <= 1


# How many windows would decide


@pytest.mark.parametrize(("n", "off"), [(4, 0.015), (8, 0.003), (16, 0.001), (64, 0.0001), (592, 1e-5)])
def test_power_is_that_of_the_noncentral_t(n: int, off: float) -> None:
    q = scipy.stats.t.ppf(0.975, n - 1)
    for noncentrality in np.linspace(0.01, 4 * q, 60):
        found = power_of(float(noncentrality) * 0.3 / math.sqrt(n), 0.3, n)
        assert found == pytest.approx(scipy.stats.nct.sf(q, n - 1, noncentrality), abs=off)


def test_power_among_several_tests_is_that_of_bonferroni() -> None:
    q = scipy.stats.t.ppf(1 - 0.025 / 12, 39)
    found = power_of(0.1, 0.2, 40, tests=12)
    assert found == pytest.approx(scipy.stats.nct.sf(q, 39, 0.1 * math.sqrt(40) / 0.2), abs=0.001)
    assert found < power_of(0.1, 0.2, 40)


@pytest.mark.parametrize("n", [3, 16, 40])
@pytest.mark.parametrize("part", [0.1, 0.3, 0.8, -0.5])
def test_the_windows_needed_are_the_least_that_have_the_power(n: int, part: float) -> None:
    """`part` is how far the limit lies from the mean towards a bound."""
    values = np.random.default_rng(n).normal(1.0, 0.3, n)
    interval = mean_interval(values)
    margin = abs(part) * (interval.high - interval.value)
    limit = interval.value + math.copysign(margin, part)
    needed = windows_needed(interval, limit)
    assert needed is not None
    assert needed > n

    def power(count: int) -> float:
        q = scipy.stats.t.ppf(0.975, count - 1)
        return float(scipy.stats.nct.sf(q, count - 1, margin * math.sqrt(count) / values.std(ddof=1)))

    assert power(needed) >= 0.8 - 0.005  # of the approximation, at few windows
    assert needed == n + 1 or power(needed - 1) < 0.8 + 0.005


def test_what_is_decided_as_it_stands_needs_one_more_at_least() -> None:
    assert windows_needed(Interval(0.1, 0.09, 0.11, 40), 0.3) == 41
    assert windows_needed(Interval(0.1, 0.1, 0.1, 40), 0.3) == 41


def test_more_tests_and_more_power_need_more_windows() -> None:
    interval = Interval(0.1, 0.0, 0.2, 10)
    needed = [windows_needed(interval, 0.15, power, tests) or 0 for power, tests in ((0.5, 1), (0.8, 1), (0.8, 9))]
    assert needed == sorted(set(needed))


def test_a_limit_on_the_edge_needs_more_windows() -> None:
    interval = mean_interval(np.array([0.1, 0.2, 0.3, 0.4]))
    needed = windows_needed(interval, interval.low)
    assert needed is not None
    assert needed > 4


def test_no_number_of_windows_decides_what_lies_on_the_limit() -> None:
    assert windows_needed(Interval(0.1, 0.0, 0.2, 10), 0.1) is None
    assert windows_needed(Interval(0.1, 0.1, 0.1, 10), 0.1) is None
    assert windows_needed(Interval(0.1, -math.inf, math.inf, 1), 0.2) is None
    assert windows_needed(Interval(0.1, -5.0, 5.2, 10), 0.1 + 1e-9) is None


def test_the_less_the_margin_the_more_windows() -> None:
    interval = Interval(0.1, 0.0, 0.2, 10)
    needed = [windows_needed(interval, limit) or 0 for limit in (0.19, 0.15, 0.12, 0.11)]
    assert needed[0] > 10
    assert all(fewer < more for fewer, more in pairwise(needed))


# JSON


def test_an_endless_bound_is_null() -> None:
    assert interval_json(Interval(1.0, -math.inf, math.inf, 1)) == {"value": 1.0, "low": None, "high": None}
    assert bounds(Interval(1.0, 0.5, 1.5, 4)) == {"low": 0.5, "high": 1.5}
