"""Intervals against the Bayes factor that they invert, that against its definition, and what is promised of errors."""

from __future__ import annotations

import math

import numpy as np
import pytest
import scipy.integrate
import scipy.stats
from simulation import pools, resampled

from pipeline.metrics.sequential import (
    LEAST,
    LEAST_EQUAL,
    PRIOR_VARIANCE,
    anytime_bounds,
    anytime_interval,
    half_width,
    order,
)

VALUES = np.array([0.31, 0.12, 0.48, 0.22, 0.05, 0.39, 0.27, 0.18, 0.33, 0.2, 0.41, 0.29])

# e-values: how a bet against a mean has grown


def e_value(values: np.ndarray, mean: float) -> float:
    """The Bayes factor against `mean`, by its closed form (Gönen, Johnson, Lu and Westfall, American Statistician 59,
    2005): (1 + ng)^(-1/2) ((1 + u) / (1 + u / (1 + ng)))^(n/2), with u = n (x̄ - mean)² / Σ(x - x̄)² = t² / (n - 1).

    Of fewer values than LEAST it is 1, as of fewer than LEAST_EQUAL that are all equal: nothing has been bet.
    """
    n, ratio = len(values), 1 + len(values) * PRIOR_VARIANCE
    is_equal = values.min() == values.max()
    if n < (LEAST_EQUAL if is_equal else LEAST):
        return 1.0
    if is_equal:  # u is infinite, or 0 at the values themselves
        return 1 / math.sqrt(ratio) if values[0] == mean else math.sqrt(ratio) ** (n - 1)
    u = float(scipy.stats.ttest_1samp(values, mean).statistic) ** 2 / (n - 1)
    return ((1 + u) / (1 + u / ratio)) ** (n / 2) / math.sqrt(ratio)


def mixture(values: np.ndarray, mean: float) -> float:
    """The Bayes factor as it is defined: both densities integrated over dσ/σ, one over the prior of the mean too."""
    y = (values - mean).tolist()
    low, high = -5.0, 4.0  # of ln σ

    def density(log_deviation: float, effect: float) -> float:
        deviation = math.exp(log_deviation)
        squares = sum((of / deviation - effect) ** 2 for of in y)
        return math.exp(-squares / 2 - len(y) * (log_deviation + math.log(2 * math.pi) / 2))

    def weighted(log_deviation: float, effect: float) -> float:
        return density(log_deviation, effect) * math.exp(-(effect**2) / 2) / math.sqrt(2 * math.pi)

    null = scipy.integrate.quad(lambda s: density(s, 0.0), low, high, epsabs=0, epsrel=1e-9)[0]
    against = scipy.integrate.dblquad(weighted, -7, 7, low, high, epsabs=0, epsrel=1e-5)[0]
    return float(against / null)


@pytest.mark.parametrize(("n", "mean"), [(10, 0.0), (11, 0.25), (12, 0.1)])
def test_an_e_value_is_the_integrated_mixture(n: int, mean: float) -> None:
    assert PRIOR_VARIANCE == 1
    assert e_value(VALUES[:n], mean) == pytest.approx(mixture(VALUES[:n], mean), rel=2e-5)


@pytest.mark.parametrize("confidence", [0.9, 0.95])
def test_an_interval_ends_where_the_integrated_mixture_rejects(confidence: float) -> None:
    found = anytime_interval(VALUES, confidence)
    for end in (found.low, found.high):
        assert mixture(VALUES, end) == pytest.approx(1 / (1 - confidence), rel=2e-5)


@pytest.mark.parametrize("n", [10, 11, 12])
def test_under_the_null_no_growth_is_to_be_expected(n: int) -> None:
    """Given the ratios of y so far, and dσ/σ, the next is √(Σy² / n) times a t of n degrees of freedom (Lai's
    martingale): the e-value expected of it is the one that is.
    """
    seen, mean = VALUES[:n], 0.2
    scale = math.sqrt(float(np.mean((seen - mean) ** 2)))

    def expected(t: float) -> float:
        return e_value(np.append(seen, mean + scale * t), mean) * float(scipy.stats.t.pdf(t, n))

    found = scipy.integrate.quad(expected, -np.inf, np.inf, epsrel=1e-10, limit=200)[0]
    assert found == pytest.approx(e_value(seen, mean), rel=1e-7)


def test_the_first_bet_is_fair() -> None:
    """Nothing is bet before LEAST windows, and what is then bet on all of them at once is worth 1 under the null. Then
    u = t² / (n - 1), t of n - 1 degrees of freedom: two values that differ are enough to have any u.
    """
    assert all(e_value(VALUES[:n], 0.9) == 1.0 for n in range(1, LEAST))
    half = np.repeat([-1.0, 1.0], LEAST // 2)

    def weighted(t: float) -> float:
        return e_value(half, t / math.sqrt(LEAST - 1)) * float(scipy.stats.t.pdf(t, LEAST - 1))

    found = scipy.integrate.quad(weighted, -np.inf, np.inf, epsrel=1e-10, limit=200)[0]
    assert found == pytest.approx(1, rel=1e-8)


# Intervals


@pytest.mark.parametrize("confidence", [0.5, 0.9, 0.95, 0.999])
@pytest.mark.parametrize("n", [10, 12, 40, 592])
def test_the_interval_is_what_the_e_values_have_not_rejected(n: int, confidence: float) -> None:
    values = np.random.default_rng(n).gamma(2.0, 0.1, n)
    found = anytime_interval(values, confidence)
    limit = 1 / (1 - confidence)
    assert found.n == n
    assert found.value == pytest.approx(values.mean(), rel=1e-13)
    for end in (found.low, found.high):
        assert e_value(values, end) == pytest.approx(limit, rel=1e-8)
    grid = np.linspace(found.low - 0.1, found.high + 0.1, 101)
    inside = [e_value(values, float(mean)) < limit for mean in grid]
    assert inside == [bool(found.low < mean < found.high) for mean in grid]


def test_neither_unit_nor_side_nor_order_matters() -> None:
    low, high = (found := anytime_interval(VALUES)).low, found.high
    for values, ends in (
        (VALUES * 1000, (low * 1000, high * 1000)),
        (VALUES + 5, (low + 5, high + 5)),
        (-VALUES, (-high, -low)),
        (VALUES[::-1], (low, high)),
    ):
        found = anytime_interval(values)
        assert (found.low, found.high) == pytest.approx(ends, rel=1e-12)


def test_the_first_look_is_after_ten_windows() -> None:
    assert LEAST == 10
    assert [math.isinf(anytime_interval(VALUES[:n]).high) for n in range(1, 13)] == [True] * 9 + [False] * 3
    assert [math.isinf(half_width(n)) for n in range(1, 13)] == [True] * 9 + [False] * 3


def test_far_more_confidence_needs_more_windows() -> None:
    """No spread of ten windows makes one surer than (1 + 10)^(-9/2)."""
    assert 60 < half_width(10, 1 - 1.01 * 11**-4.5) < math.inf
    assert half_width(10, 1 - 0.99 * 11**-4.5) == math.inf


def test_the_price_of_looking_at_will() -> None:
    """Half widths in deviations, beside those of a fixed number of windows."""
    found = {n: (half_width(n), scipy.stats.t.ppf(0.975, n - 1) / math.sqrt(n)) for n in (10, 16, 60, 592)}
    assert {n: round(anytime / fixed, 2) for n, (anytime, fixed) in found.items()} == {
        10: 1.71,
        16: 1.65,
        60: 1.66,
        592: 1.8,
    }


@pytest.mark.parametrize("name", [*pools()])
def test_bounds_of_many_runs_are_the_intervals_one_after_another(name: str) -> None:
    runs = resampled(pools()[name], 3, 80, seed=1)
    runs[0, :31] = runs[0, 0]
    low, high = anytime_bounds(runs)
    for run, lows, highs in zip(runs, low, high, strict=True):
        for n in (1, 2, 9, 10, 11, 28, 29, 31, 32, 80):
            found = anytime_interval(run[:n])
            assert (lows[n - 1], highs[n - 1]) == pytest.approx((found.low, found.high), rel=1e-9)


# Ties


def test_equal_windows_decide_nothing_before_there_are_many() -> None:
    same = np.full(LEAST_EQUAL, 0.1)
    few = anytime_interval(same[:-1])
    assert (few.value, few.low, few.high) == (0.1, -math.inf, math.inf)
    assert e_value(same[:-1], 0.2) == 1.0
    many = anytime_interval(same)
    assert (many.low, many.high) == (0.1, 0.1)
    assert e_value(same, 0.2) > 20 > 1 > e_value(same, 0.1)


def test_an_equal_file_is_decided() -> None:
    found = anytime_interval(np.zeros(LEAST_EQUAL, np.float32))
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_rare_differences_are_not_taken_for_none() -> None:
    """A tenth of the windows differs: at most one run in twenty begins with LEAST_EQUAL equal ones."""
    pool = np.where(np.arange(100) % 10 == 0, 0.99, 1.0)
    low, high = anytime_bounds(resampled(pool, 4000, 60, seed=2))
    sure = low == high
    assert not sure[:, : LEAST_EQUAL - 1].any()
    assert sure[:, LEAST_EQUAL - 1].mean() == pytest.approx(0.9**LEAST_EQUAL + 0.1**LEAST_EQUAL, abs=0.007)
    assert sure.any(axis=1).mean() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 4000)


# Errors, however often one looks: the truth lies on the limit, and every window is looked at


def test_normal_windows_are_seldom_decided_wrongly() -> None:
    runs = np.random.default_rng(3).normal(0.01, 0.3, (2000, 592))
    low, high = anytime_bounds(runs)
    assert ((low > 0.01) | (high < 0.01)).any(axis=1).mean() <= 0.05


def test_skewed_windows_are_seldom_decided_wrongly() -> None:
    """Of skewness 1: 5 %, to which two standard errors are added."""
    low, high = anytime_bounds(np.random.default_rng(3).gamma(4.0, 1.0, (4000, 592)))
    assert ((low > 4) | (high < 4)).any(axis=1).mean() <= 0.05 + 2 * math.sqrt(0.05 * 0.95 / 4000)


@pytest.mark.parametrize("name", [*pools()])
def test_real_windows_are_seldom_decided_wrongly(name: str) -> None:
    pool = pools()[name]
    low, high = anytime_bounds(resampled(pool, 2000, 592, seed=4))
    assert ((low > pool.mean()) | (high < pool.mean())).any(axis=1).mean() <= 0.05


@pytest.mark.parametrize("name", [*pools()])
def test_without_replacement_they_are_decided_wrongly_less_often(name: str) -> None:
    pool = pools()[name]
    runs = np.random.default_rng(5).permuted(np.tile(pool, (2000, 1)), axis=1)
    low, high = anytime_bounds(runs)
    assert ((low > pool.mean()) | (high < pool.mean())).any(axis=1).mean() <= 0.05


# Order


def test_the_order_is_of_the_corpus_and_shuffled() -> None:
    assert order(8, "ab" * 32) == order(8, "ab" * 32)
    assert order(8, "ab" * 32) != order(8, "cd" * 32)
    found = order(592, "ab" * 32)
    assert sorted(found) == list(range(592))
    correlation = scipy.stats.spearmanr(found, range(592))
    assert correlation.pvalue > 0.01


@pytest.mark.parametrize(("scheme", "within", "most"), [("q8_0", True, 60), ("q4_0", False, 10)])
def test_whether_a_real_variant_is_within_1_percent_is_decided_early(scheme: str, within: bool, most: int) -> None:
    pool = pools()[f"{scheme} ln_ppl_ratio"]
    low, high = anytime_bounds(pool)
    limit = math.log(1.01)
    passes, fails = high <= limit, low > limit
    first = int(np.argmax(passes | fails))
    assert (bool(passes[first]), bool(fails[first])) == (within, not within)
    assert first + 1 <= most
