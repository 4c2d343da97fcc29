"""p-values, pairs and Holm's test against scipy, closed testing by brute force, and by hand."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pytest
import scipy.stats
from simulation import p_below

from pipeline.metrics.stats import clipped, holm, mean_interval, p_above, paired_interval, standard_error
from pipeline.types import Interval

# p-values


@pytest.mark.parametrize("n", [2, 5, 16, 592])
@pytest.mark.parametrize("limit", [-1.0, 0.0, 0.29, 0.3, 0.5, 3.0])
def test_p_values_are_those_of_scipy(n: int, limit: float) -> None:
    values = np.random.default_rng(n).normal(0.3, 0.2, n)
    found = mean_interval(values)
    above = scipy.stats.ttest_1samp(values, limit, alternative="greater").pvalue
    below = scipy.stats.ttest_1samp(values, limit, alternative="less").pvalue
    assert p_above(found, limit) == pytest.approx(above, rel=1e-8, abs=1e-300)
    assert p_below(found, limit) == pytest.approx(below, rel=1e-8, abs=1e-300)


@pytest.mark.parametrize("n", [2, 3, 16, 592])
def test_half_of_what_lies_outside_is_the_p_value_on_an_end(n: int) -> None:
    found = mean_interval(np.random.default_rng(n).normal(0.3, 0.2, n))
    assert p_above(found, found.low) == pytest.approx(0.025, rel=1e-9)
    assert p_below(found, found.high) == pytest.approx(0.025, rel=1e-9)
    assert p_above(found, found.high) == pytest.approx(0.975, rel=1e-9)
    assert p_above(found, found.value) == p_below(found, found.value) == 0.5


def test_small_p_values_do_not_become_0() -> None:
    found = mean_interval(np.array([1.0, 1.001, 0.999, 1.0005] * 8))
    assert 0 < p_above(found, 0.5) < 1e-80
    assert 0 < p_below(found, 1.5) < 1e-80


def test_a_clipped_end_does_not_change_a_p_value() -> None:
    found = mean_interval(np.array([0.99, 1.0, 0.97, 0.9, 1.0, 0.98]))
    assert found.high > 1
    cut = clipped(found, 0, 1)
    assert standard_error(cut) == pytest.approx(standard_error(found), rel=1e-12)
    assert p_below(cut, 0.99) == pytest.approx(p_below(found, 0.99), rel=1e-9)
    values = np.array([0.01, 0.0, 0.03, 0.1, 0.0, 0.02])
    assert p_above(clipped(mean_interval(values), 0, 1), 0.02) == pytest.approx(
        scipy.stats.ttest_1samp(values, 0.02, alternative="greater").pvalue, rel=1e-9
    )


def test_where_both_ends_are_clipped_nothing_is_significant() -> None:
    found = clipped(mean_interval(np.array([0.1, 0.9])), 0, 1)
    assert (found.low, found.high) == (0, 1)
    assert p_above(found, 0.01) > 0.025
    assert p_below(found, 0.99) > 0.025


def test_without_spread_a_p_value_is_0_or_1() -> None:
    point = Interval(0.25, 0.25, 0.25, 12)
    assert [p_above(point, limit) for limit in (0.2, 0.25, 0.3)] == [0.0, 1.0, 1.0]
    assert [p_below(point, limit) for limit in (0.2, 0.25, 0.3)] == [1.0, 1.0, 0.0]


def test_one_window_is_no_evidence() -> None:
    alone = mean_interval(np.array([7.0]))
    assert standard_error(alone) == math.inf
    assert p_above(alone, 0.1) == p_below(alone, 9.0) == 1.0


# Pairs


def test_pairs_are_those_of_scipy() -> None:
    rng = np.random.default_rng(3)
    hard = rng.normal(3.0, 1.0, 40)  # windows differ far more than variants do
    before, now = hard + rng.normal(0, 0.01, 40), hard + 0.004 + rng.normal(0, 0.01, 40)
    expected = scipy.stats.ttest_rel(now, before)
    found = paired_interval(now, before)
    assert (found.low, found.high) == pytest.approx(tuple(expected.confidence_interval(0.95)), rel=1e-9)
    assert 2 * min(p_above(found, 0), p_below(found, 0)) == pytest.approx(expected.pvalue, rel=1e-9)
    assert found.high - found.low < (mean_interval(now).high - mean_interval(now).low) / 20


def test_float32_pairs_are_subtracted_in_float64() -> None:
    now, before = np.full(4, 1.0, np.float32), np.full(4, 1e-9, np.float32)
    assert paired_interval(now, before).value == 1 - float(np.float32(1e-9))
    assert paired_interval(now, now) == Interval(0.0, 0.0, 0.0, 4)


def test_other_windows_are_no_pairs() -> None:
    with pytest.raises(ValueError, match=r"\(3,\) values cannot be paired with \(1,\)"):
        paired_interval(np.zeros(3), np.zeros(1))


# Holm


def test_holm_is_closed_testing_with_bonferroni() -> None:
    """A hypothesis falls where every set that holds it does (Marcus, Peritz and Gabriel, Biometrika 63, 1976)."""
    rng = np.random.default_rng(5)
    for m in [1, 2, 3, 4, 5, 6] * 20:
        p = (rng.random(m) ** 3).round(2).tolist()  # with ties and zeros
        sets = [s for size in range(1, m + 1) for s in combinations(range(m), size)]
        closed = [max(min(1.0, len(s) * min(p[at] for at in s)) for s in sets if i in s) for i in range(m)]
        assert holm(p) == pytest.approx(closed, rel=1e-14)


def test_holm_by_hand() -> None:
    assert holm([0.04, 0.01, 0.03]) == pytest.approx([0.06, 0.03, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []
