"""Intervals against scipy, direct computation, and what simulated data say of their coverage."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats

from pipeline.metrics.stats import (
    EXACT_TREND,
    bounds,
    clipped,
    interval_json,
    mann_kendall_p,
    mean_interval,
    median_interval,
    quantile_intervals,
    t_cdf,
    t_quantile,
    theil_sen_slope,
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


def test_one_value_says_nothing_of_spread() -> None:
    assert mean_interval(np.array([0.7])) == Interval(0.7, -math.inf, math.inf, 1)


def test_a_mean_is_covered_as_often_as_promised() -> None:
    rng = np.random.default_rng(11)
    runs = rng.normal(1.5, 0.4, (4000, 16))
    covered = np.mean([(found := mean_interval(run)).low <= 1.5 <= found.high for run in runs])
    assert 0.94 <= covered <= 0.97


# Student's t


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 39, 299, 10_000])
@pytest.mark.parametrize("p", [0.51, 0.6, 0.9, 0.975, 0.995, 0.99999])
def test_quantiles_of_t_are_those_of_scipy(p: float, freedom: int) -> None:
    assert t_quantile(p, freedom) == pytest.approx(scipy.stats.t.ppf(p, freedom), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 39, 299, 10_000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.1, 0.7, 1.0, 2.5, 12.0, 300.0])
def test_the_distribution_of_t_is_that_of_scipy(t: float, freedom: int) -> None:
    assert t_cdf(t, freedom) == pytest.approx(scipy.stats.t.cdf(t, freedom), abs=1e-10)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 39, 299, 10_000])
def test_both_branches_of_the_distribution_of_t_are_those_of_scipy(freedom: int) -> None:
    """They meet at t² = freedom; a distribution function never falls."""
    edge = math.sqrt(freedom)
    ts = sorted([*np.geomspace(1e-6, 1e4, 200), *(edge * (1 + step) for step in (-1e-3, -1e-9, 0.0, 1e-9, 1e-3))])
    found = [t_cdf(float(t), freedom) for t in ts]
    assert found == pytest.approx(scipy.stats.t.cdf(ts, freedom), rel=0, abs=1e-10)
    assert all(later >= earlier for earlier, later in pairwise(found))


@pytest.mark.parametrize("t", [1e-12, 1e-8, 1e-4, 0.3, 0.999, 1.0, 1.001, 5.0, 1e6])
def test_one_degree_of_freedom_is_cauchy(t: float) -> None:
    """scipy itself loses digits near 0 here: P(T <= t) is 1/2 + atan(t) / pi."""
    assert t_cdf(t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, rel=0, abs=4e-16)


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


@pytest.mark.parametrize("n", [3, 16, 40])
@pytest.mark.parametrize("part", [0.3, 0.8, -0.5])
def test_the_windows_needed_do_decide(n: int, part: float) -> None:
    """`part` is how far the limit lies from the mean towards a bound."""
    deviation = 0.3

    def of_spread(count: int) -> Interval:
        values = np.random.default_rng(0).standard_normal(count)
        return mean_interval(1.0 + deviation * (values - values.mean()) / values.std(ddof=1))

    interval = of_spread(n)
    limit = 1.0 + part * (interval.high - 1.0)
    needed = windows_needed(interval, limit)
    assert needed is not None
    assert needed > n
    after = of_spread(needed)
    assert not after.low <= limit <= after.high
    before = of_spread(max(2, math.floor(needed / 1.1) - 2))  # and not many more than are needed
    assert before.low <= limit <= before.high


def test_a_limit_on_the_edge_needs_more_windows() -> None:
    interval = mean_interval(np.array([0.1, 0.2, 0.3, 0.4]))
    needed = windows_needed(interval, interval.low)
    assert needed is not None
    assert needed > 4


def test_no_number_of_windows_decides_what_lies_on_the_limit() -> None:
    assert windows_needed(Interval(0.1, 0.0, 0.2, 10), 0.1) is None
    assert windows_needed(Interval(0.1, -math.inf, math.inf, 1), 0.2) is None
    assert windows_needed(Interval(0.1, -5.0, 5.2, 10), 0.1 + 1e-9) is None


def test_the_less_the_margin_the_more_windows() -> None:
    interval = Interval(0.1, 0.0, 0.2, 10)
    needed = [windows_needed(interval, limit) or 0 for limit in (0.19, 0.15, 0.12, 0.11)]
    assert needed[0] > 10
    assert all(fewer < more for fewer, more in pairwise(needed))


# Trends


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8, 20, 33, 34, 60])
def test_slopes_and_their_p_values_are_those_of_scipy(n: int) -> None:
    rng = np.random.default_rng(n)
    for strength in (-1.0, -0.1, 0.0, 0.05, 2.0):
        values = (rng.normal(0, 1, n) + strength * np.arange(n)).tolist()
        expected = scipy.stats.kendalltau(range(n), values, method="exact" if n <= EXACT_TREND else "asymptotic")
        assert mann_kendall_p(values) == pytest.approx(expected.pvalue, rel=1e-10)
        assert theil_sen_slope(values) == pytest.approx(scipy.stats.theilslopes(values).slope, rel=1e-12)


@pytest.mark.parametrize("n", [3, 7, 12, 40])
def test_ties_take_the_normal_approximation(n: int) -> None:
    for seed in range(10):
        values = np.random.default_rng(seed).integers(0, max(2, n // 3), n).astype(float).tolist()
        if len(set(values)) > 1:
            expected = scipy.stats.kendalltau(range(n), values, method="asymptotic").pvalue
            assert mann_kendall_p(values) == pytest.approx(expected, rel=1e-10)


def test_what_does_not_change_has_no_trend() -> None:
    assert mann_kendall_p([2.0] * 7) == 1.0
    assert theil_sen_slope([2.0] * 7) == 0.0
    assert mann_kendall_p([1.0]) == 1.0


def test_an_outlier_does_not_bend_a_slope() -> None:
    values = [1.0, 2.0, 3.0, 100.0, 5.0, 6.0, 7.0]
    assert theil_sen_slope(values) == 1.0


# JSON


def test_an_endless_bound_is_null() -> None:
    assert interval_json(Interval(1.0, -math.inf, math.inf, 1)) == {"value": 1.0, "low": None, "high": None}
    assert bounds(Interval(1.0, 0.5, 1.5, 4)) == {"low": 0.5, "high": 1.5}
