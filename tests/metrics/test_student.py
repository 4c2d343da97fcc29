"""Student's t against scipy, and against closed forms where scipy itself loses digits."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.stats

from pipeline.metrics.student import t_quantile, t_upper


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 39, 299, 10_000])
@pytest.mark.parametrize("p", [0.51, 0.6, 0.9, 0.975, 0.995, 0.99999])
def test_quantiles_of_t_are_those_of_scipy(p: float, freedom: int) -> None:
    assert t_quantile(p, freedom) == pytest.approx(scipy.stats.t.ppf(p, freedom), rel=1e-10, abs=1e-10)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 39, 299, 10_000])
@pytest.mark.parametrize("t", [0.0, 1e-6, 0.1, 0.7, 1.0, 2.5, 12.0, 300.0])
def test_the_distribution_of_t_is_that_of_scipy(t: float, freedom: int) -> None:
    assert t_upper(-t, freedom) == pytest.approx(scipy.stats.t.cdf(t, freedom), abs=1e-10)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 39, 299, 10_000])
def test_both_branches_of_the_distribution_of_t_are_those_of_scipy(freedom: int) -> None:
    """They meet at t² = freedom; a distribution function never falls."""
    edge = math.sqrt(freedom)
    ts = sorted([*np.geomspace(1e-6, 1e4, 200), *(edge * (1 + step) for step in (-1e-3, -1e-9, 0.0, 1e-9, 1e-3))])
    found = [t_upper(-float(t), freedom) for t in ts]
    assert found == pytest.approx(scipy.stats.t.cdf(ts, freedom), rel=0, abs=1e-10)
    assert all(later >= earlier for earlier, later in pairwise(found))


@pytest.mark.parametrize("t", [1e-12, 1e-8, 1e-4, 0.3, 0.999, 1.0, 1.001, 5.0, 1e6])
def test_one_degree_of_freedom_is_cauchy(t: float) -> None:
    """scipy itself loses digits near 0 here: P(T ≤ t) is 1/2 + atan(t) / π."""
    assert t_upper(-t, 1) == pytest.approx(0.5 + math.atan(t) / math.pi, rel=0, abs=4e-16)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 15, 39, 99, 199, 200, 299, 591, 10_000])
def test_an_upper_tail_keeps_its_digits_however_small(freedom: int) -> None:
    for t in (-40.0, -1.0, 0.0, 1e-6, 0.5, 1.7, 2.0, 4.0, 9.0, 35.0):
        cauchy = 0.5 - math.atan(t) / math.pi  # near 0 scipy loses digits of this one
        expected = cauchy if (t, freedom) == (1e-6, 1) else scipy.stats.t.sf(t, freedom)
        assert t_upper(t, freedom) == pytest.approx(expected, rel=2e-11, abs=1e-300)


def test_tails_below_the_digits_of_1_are_told_apart() -> None:
    """Of two degrees of freedom: P(T > t) = (1 - t / √(2 + t²)) / 2 = 1 / (2 + t² + t √(2 + t²))."""
    for t in (1e3, 1e6, 1e12):
        root = math.sqrt(2 + t * t)
        assert t_upper(t, 2) == pytest.approx(1 / (2 + t * t + t * root), rel=1e-14)
    assert 0 < t_upper(40.0, 300) < t_upper(39.0, 300) < 1e-119
    assert t_upper(1e200, 5) == 0.0
    assert t_upper(-1e200, 5) == 1.0


def test_both_tails_sum_to_1() -> None:
    for t in (0.0, 0.3, 2.0, 50.0):
        assert t_upper(t, 7) + t_upper(-t, 7) == pytest.approx(1, abs=1e-15)
