"""Two variants compared with each other: by their own paired difference, never by whether two intervals overlap.

The text makes the KL of all variants rise and fall together, so a difference of two by window varies far less than
either, and tells apart what their own intervals do not.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.metrics.stats import mean_interval
from pipeline.types import Interval


def by_window(tokens: NDArray[np.floating]) -> NDArray[np.float64]:
    """Means [windows] of a figure per token [windows, scored]."""
    means: NDArray[np.float64] = tokens.mean(axis=1, dtype=np.float64)
    return means


def difference(a: NDArray[np.float64], b: NDArray[np.float64]) -> Interval:
    """Mean of a - b, figures of two variants on the same windows, each [windows], with its paired t interval.

    A single window gives an infinite interval, equal figures exactly [0, 0]. The order that "wholly above 0" makes is
    transitive: where a - b and b - c have means above t times their standard errors, so has a - c, whose standard error
    is at most the sum of theirs.
    """
    return mean_interval(a - b)


def surely_above(interval: Interval, limit: float = 0.0) -> bool:
    """Whether the whole interval is."""
    return interval.low > limit


def faster(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether the interval of a's median rate (`low`, `high`; null where there is none) lies wholly above b's."""
    return None not in (a["low"], b["high"]) and bool(a["low"] > b["high"])
