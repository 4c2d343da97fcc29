"""Two variants by their own paired difference."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats as scipy_stats

from pipeline.metrics.pairs import by_window, difference, faster, surely_above

RNG = np.random.default_rng(7)


def test_the_difference_is_that_of_a_paired_t_test() -> None:
    a = RNG.gamma(2.0, 0.1, 40)
    b = a + RNG.normal(0.01, 0.02, 40)
    found, expected = difference(b, a), scipy_stats.ttest_rel(b, a).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((expected.low, expected.high), rel=1e-12)
    assert found.value == pytest.approx((b - a).mean(), rel=1e-12)
    assert found.n == 40
    other = difference(a, b)
    assert (other.value, other.low, other.high) == (-found.value, -found.high, -found.low)


def test_what_the_text_does_to_both_is_no_doubt() -> None:
    """Their own intervals overlap by far, since texts differ."""
    text = RNG.gamma(2.0, 0.1, 16)
    found = difference(text + 0.01, text)
    assert surely_above(found)
    assert (found.low, found.high) == pytest.approx((0.01, 0.01), abs=1e-12)


def test_equal_figures_and_a_single_window_tell_nothing_apart() -> None:
    a = RNG.gamma(2.0, 0.1, 16)
    assert vars(difference(a, a)) == {"value": 0.0, "low": 0.0, "high": 0.0, "n": 16}
    assert not surely_above(difference(a, a))
    assert not surely_above(difference(a[:1] + 5, a[:1]))
    assert difference(a[:1], a[:1]).high == math.inf


@pytest.mark.parametrize(("low", "limit", "expected"), [(0.1, 0.0, True), (0.0, 0.0, False), (0.1, 0.1, False)])
def test_surely_means_the_whole_interval(low: float, limit: float, expected: bool) -> None:
    shift = difference(np.array([low, low]), np.zeros(2))
    assert surely_above(shift, limit) is expected


def test_surely_nearer_is_transitive() -> None:
    """So that what is beaten is beaten by one on the front."""
    for _ in range(300):
        a, b, c = (RNG.normal(0.05 * i, 0.1 * RNG.random(), 8) for i in range(3))
        if surely_above(difference(b, a)) and surely_above(difference(c, b)):
            assert surely_above(difference(c, a))


def test_means_of_windows_are_in_float64() -> None:
    tokens = np.full((2, 3), 0.1, np.float32)
    tokens[1] = 1
    means = by_window(tokens)
    assert means.dtype == np.float64
    assert means.tolist() == [float(np.float32(0.1)), 1.0]


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ((90.0, 110.0), (70.0, 89.0), True),
        ((90.0, 110.0), (70.0, 90.0), False),  # they share a point
        ((70.0, 89.0), (90.0, 110.0), False),
        ((None, None), (1.0, 2.0), False),
        ((90.0, 110.0), (None, None), False),
        ((0.0, 0.0), (0.0, 0.0), False),
    ],
)
def test_faster_is_an_interval_wholly_above(a: tuple[float], b: tuple[float], expected: bool) -> None:
    rates = [dict(zip(("low", "high"), ends, strict=True)) for ends in (a, b)]
    assert faster(*rates) is expected
