"""Holm's correction over all checks of a gate: with many checks, one is beyond its limit by chance sooner or later."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pipeline.checks.limits import excess, is_upper, would_decide
from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, Check
from pipeline.metrics.stats import CONFIDENCE, holm, windows_needed
from pipeline.types import Interval

LEVEL = (1 - CONFIDENCE) / 2
"""One-sided: the chance of at most this that any of all fails is wrong."""


def corrected(checks: Sequence[Check]) -> tuple[Check, ...]:
    """The checks with p-values after Holm; a fail whose p-value is then above LEVEL becomes inconclusive.

    The family is every check with a p-value, on whichever side of its limit the figure is. A pass needs no correction:
    all of them must pass, so none gains by their number. What is undecided beyond its limit, and so heading for a fail,
    needs the windows that let it fail at Holm's next level, LEVEL over the checks not yet rejected.
    """
    family = [at for at, check in enumerate(checks) if check.p_value is not None]
    adjusted = dict(zip(family, holm([checks[at].p_value or 0.0 for at in family]), strict=True))
    left = sum(p > LEVEL for p in adjusted.values())
    return tuple(
        _weighed(check, adjusted[at], len(family), left) if at in adjusted else check for at, check in enumerate(checks)
    )


def _weighed(check: Check, p_value: float, family: int, left: int) -> Check:
    beyond = _beyond(check)
    if beyond <= 0:
        return replace(check, p_value=None)
    if p_value <= LEVEL or check.verdict not in {FAIL, INCONCLUSIVE}:
        return replace(check, p_value=p_value)
    needed = _needed(check, left)
    reason = f"the limit lies in the interval; {would_decide(needed, check.windows or 0)}"
    if check.verdict == FAIL:
        reason = (
            f"the whole 95 % interval is beyond the limit, but of {family} checks one is so by chance too often: after "
            f"Holm's correction p is {p_value:.3g}, more than {LEVEL:g}; {would_decide(needed, check.windows or 0)}"
        )
    return replace(check, verdict=INCONCLUSIVE, reason=reason, windows_needed=needed, p_value=p_value)


def _beyond(check: Check) -> float:
    """How far the figure is beyond its limit, negative within it."""
    if check.value is None or check.limit is None:
        return 0.0
    return check.value - check.limit if is_upper(check.name) else check.limit - check.value


def _needed(check: Check, left: int) -> int | None:
    """Windows that let it fail at LEVEL / left."""
    if check.value is None or check.limit is None or check.low is None or check.high is None:
        return None
    above = excess(check.name, Interval(check.value, check.low, check.high, check.windows or 0))
    most = check.limit if is_upper(check.name) else -check.limit
    return windows_needed(above, most, tests=left)
