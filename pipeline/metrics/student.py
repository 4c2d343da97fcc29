"""Student's t distribution, to the digits that floats have."""

from __future__ import annotations

import math
from functools import cache


@cache
def t_quantile(p: float, freedom: int) -> float:
    """Quantile of Student's t for p > 1/2 and at least one degree of freedom, by bisection of its upper tail to
    1e-12 of itself.
    """
    tail, low, high = 1 - p, 0.0, 1.0
    while t_upper(high, freedom) > tail:
        high *= 2
    while high - low > 1e-12 * high:
        middle = (low + high) / 2
        if t_upper(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def t_upper(t: float, freedom: int) -> float:
    """P(T > t) = I_x(v/2, 1/2) / 2 for t ≥ 0, with x = v / (v + t²) (Abramowitz and Stegun 26.7.1), and by symmetry
    below 0: however small it is, it keeps its digits.
    """
    if t < 0:
        return 1 - t_upper(-t, freedom)
    square = t * t
    if math.isinf(square):
        return 0.0
    total = freedom + square
    return _incomplete_beta(freedom / 2, 0.5, freedom / total, square / total) / 2


def _incomplete_beta(a: float, b: float, x: float, y: float) -> float:
    """Regularised I_x(a, b), where one of a and b is 1/2, by its continued fraction (DLMF 8.17.22) in the arrangement
    of Lentz; y is 1 - x, given because the subtraction would lose its digits.
    """
    if x == 0 or y == 0:
        return 1.0 if y == 0 else 0.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast below this point
        return 1 - _incomplete_beta(b, a, y, x)
    front = math.exp(a * _log(x, y) + b * _log(y, x)) / _beta_of_half(a + b - 0.5)
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


def _log(x: float, y: float) -> float:
    """ln x, where y is 1 - x."""
    return math.log(x) if x < 0.5 else math.log1p(-y)


def _beta_of_half(a: float) -> float:
    """B(a, 1/2) = √π Γ(a) / Γ(a + 1/2); of a large a by the series of that ratio (DLMF 5.11.13), where logarithms of
    Γ would cancel.
    """
    if a < 100:
        return math.sqrt(math.pi) * math.gamma(a) / math.gamma(a + 0.5)
    z = 1 / a
    ratio = 1 - z / 8 * (1 - z / 16 * (1 + 5 * z / 8 * (1 - 21 * z / 160 * (1 + 19 * z / 8))))
    return math.sqrt(math.pi / a) / ratio
