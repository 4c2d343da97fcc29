"""Absolute limits: the whole 95 % interval decides, in both directions."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, PASS, Check
from pipeline.metrics.stats import MOST_WINDOWS, p_above, windows_needed
from pipeline.types import Interval, Limits

CHECKS = {
    "max_ln_ppl_ratio": ("ln_ppl_ratio",),
    "max_kld_mean": ("kld", "mean"),
    "min_same_top": ("same_top",),
}
"""Where measurements.json holds the figure of each limit."""

MISSING, NO_INTERVAL = "the number is missing: run dvc repro", "its interval is missing: run dvc repro"


def checks(variant: str, limits: Limits, figures: Mapping[str, Any]) -> list[Check]:
    """A check of each limit that is set, of the figures of measurements.json."""
    return [_check(variant, name, limit, figures) for name, limit in _asked(limits).items()]


def judged(limits: Limits) -> list[str]:
    """Where measurements.json has what `checks` looks at: a hole there is a fail of its own."""
    figures = [".".join(CHECKS[name]) for name in _asked(limits)]
    return [*figures, "windows"] if figures else []


def _asked(limits: Limits) -> dict[str, float]:
    return {name: limit for name, limit in asdict(limits).items() if name in CHECKS and limit is not None}


def _check(variant: str, name: str, limit: float, figures: Mapping[str, Any]) -> Check:
    figure: Any = figures
    for key in CHECKS[name]:
        figure = figure.get(key, {}) if isinstance(figure, Mapping) else {}
    value, low, high = (number(figure, key) for key in ("value", "low", "high"))
    n = int(number(figures, "windows") or 0)
    if value is None:
        return Check(variant, name, limit, None, low, high, FAIL, MISSING, windows=n)
    if (low is None or high is None) and n >= 2:
        return Check(variant, name, limit, value, low, high, FAIL, NO_INTERVAL, windows=n)
    if low is None or high is None:
        return of_interval(variant, name, limit, Interval(value, -math.inf, math.inf, n))
    if not 2 <= n <= MOST_WINDOWS or low > high:
        reason = f"{n} windows and an interval from {low:g} to {high:g} cannot be: run dvc repro"
        return Check(variant, name, limit, value, low, high, FAIL, reason, windows=n)
    return of_interval(variant, name, limit, Interval(value, low, high, n))


def of_interval(variant: str, name: str, limit: float, interval: Interval) -> Check:
    """A pass where the whole interval over windows is within the limit, a fail where it is wholly beyond, both by its
    own interval: `correction.corrected` then weighs all checks of the gate. A name in min_ limits from below.
    """
    value, n = interval.value, interval.n
    if not (math.isfinite(interval.low) and math.isfinite(interval.high)):
        reason = f"{n} window bounds nothing: ask for at least 2 in params.yaml, corpus.windows"
        return Check(variant, name, limit, value, None, None, INCONCLUSIVE, reason, windows=n)
    above, most = excess(name, interval), limit if is_upper(name) else -limit
    verdict, reason, needed = PASS, "the whole 95 % interval is within the limit", None
    if above.low > most:
        verdict, reason = FAIL, "the whole 95 % interval is beyond the limit"
    elif above.high > most:
        needed = windows_needed(above, most)
        verdict, reason = INCONCLUSIVE, f"the limit lies in the interval; {would_decide(needed, n)}"
    p_value = p_above(above, most)
    return Check(variant, name, limit, value, interval.low, interval.high, verdict, reason, needed, p_value, windows=n)


def is_upper(name: str) -> bool:
    """Whether a check limits from above."""
    return not name.startswith("min_")


def excess(name: str, interval: Interval) -> Interval:
    """A figure so that more is worse: with its sign turned where its limit is the least it may be."""
    return interval if is_upper(name) else Interval(-interval.value, -interval.high, -interval.low, interval.n)


def would_decide(needed: int | None, used: int) -> str:
    """'about 120 windows would decide it, 40 were used'."""
    return (
        f"about {needed} windows would decide it, {used} were used"
        if needed
        else "no number of windows would decide it"
    )


def number(figure: Any, key: str) -> float | None:
    """A finite number of a file; None where it holds none."""
    value = figure.get(key) if isinstance(figure, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
