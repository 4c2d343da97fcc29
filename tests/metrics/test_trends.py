"""Slopes and their p-values against scipy."""

from __future__ import annotations

import numpy as np
import pytest
import scipy.stats

from pipeline.metrics.trends import EXACT_TREND, mann_kendall_p, theil_sen_slope


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
