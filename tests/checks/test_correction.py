"""Holm over a gate's checks, by hand, and what verdicts do."""

from __future__ import annotations

import pytest

from pipeline.checks.correction import LEVEL, corrected
from pipeline.checks.limits import of_interval
from pipeline.checks.verdicts import (
    CHANGED,
    FAIL,
    FAILING,
    INCONCLUSIVE,
    NO_BASELINE,
    NOT_COMPARABLE,
    PASS,
    SLOWER,
    UNDECIDED,
    Check,
    Result,
)
from pipeline.metrics.stats import windows_needed
from pipeline.types import Interval

FIGURES = (0.07, 0.05, 0.09)  # of a limit of 0.06


def given(p_value: float | None, verdict: str, figures: tuple[float, float, float] = FIGURES) -> Check:
    return Check("v", "max_kld_mean", 0.06, *figures, verdict, "said", None, p_value, windows=40)


def test_fails_that_holm_takes_back_are_inconclusive() -> None:
    """By hand, of four: 4 x 0.001, 3 x 0.008, 2 x 0.02, and the fourth within its limit; the level is 0.025."""
    found = corrected([given(0.02, FAIL), given(0.001, FAIL), given(0.9, PASS, (0.03, 0.02, 0.04)), given(0.008, FAIL)])
    assert LEVEL == pytest.approx(0.025)
    assert [check.verdict for check in found] == [INCONCLUSIVE, FAIL, PASS, FAIL]
    assert [check.p_value for check in found] == [pytest.approx(0.04), pytest.approx(0.004), None, pytest.approx(0.024)]
    needed = windows_needed(Interval(*FIGURES, 40), 0.06, tests=2)  # two of the four are not rejected
    assert [check.windows_needed for check in found] == [needed, None, None, None]
    assert found[0].reason == (
        "the whole 95 % interval is beyond the limit, but of 4 checks one is so by chance too often: after Holm's "
        f"correction p is 0.04, more than 0.025; about {needed} windows would decide it, 40 were used"
    )
    assert [check.reason for check in found[1:]] == ["said"] * 3


def test_a_check_alone_needs_no_correction() -> None:
    assert [(c.verdict, c.p_value) for c in corrected([given(0.02, FAIL)])] == [(FAIL, 0.02)]


def test_a_p_value_is_never_below_that_of_a_smaller_one() -> None:
    """3 x 0.009 is beyond the level, and so is what follows it, though 2 x 0.0124 by itself would not be."""
    found = corrected([given(0.009, FAIL), given(0.0124, FAIL), given(0.6, PASS, (0.03, 0.02, 0.04))])
    assert [check.verdict for check in found] == [INCONCLUSIVE, INCONCLUSIVE, PASS]
    assert [check.p_value for check in found] == [pytest.approx(0.027), pytest.approx(0.027), None]
    assert found[0].windows_needed == found[1].windows_needed == windows_needed(Interval(*FIGURES, 40), 0.06, tests=3)


def test_what_is_undecided_beyond_its_limit_needs_the_windows_that_holm_asks_for() -> None:
    beyond, within = (0.061, 0.05, 0.072), (0.059, 0.05, 0.068)
    undecided = [given(0.4, INCONCLUSIVE, beyond), given(0.6, INCONCLUSIVE, within)]
    alone, other = corrected([*undecided, *([given(0.9, PASS, (0.03, 0.02, 0.04))] * 8)])[:2]
    assert alone.windows_needed == windows_needed(Interval(*beyond, 40), 0.06, tests=10)
    assert f"about {alone.windows_needed} windows" in alone.reason
    assert (other.windows_needed, other.reason) == (None, "said")  # heading for a pass: as its own check said


def test_checks_without_a_p_value_are_no_part_of_the_family() -> None:
    missing = Check("v", "measured", None, None, None, None, FAIL, "gone")
    slower = Check("v", "max_slowdown_decode_64", 0.1, 0.2, 0.15, 0.25, SLOWER, "said")
    assert corrected([given(0.02, FAIL), missing, slower]) == (given(0.02, FAIL), missing, slower)


def test_a_lower_limit_is_tested_from_its_side() -> None:
    least = of_interval("v", "min_same_top", 0.83, Interval(0.80, 0.78, 0.82, 40))
    most = of_interval("v", "max_kld_mean", -0.83, Interval(-0.80, -0.82, -0.78, 40))
    assert (least.verdict, most.verdict) == (FAIL, FAIL)
    assert least.p_value == most.p_value
    assert least.p_value == pytest.approx(0.0021399788, rel=1e-6)  # 1.5 half-widths beyond: t of 39 beyond 3.0341


@pytest.mark.parametrize("verdict", [FAIL, CHANGED, NOT_COMPARABLE, SLOWER, INCONCLUSIVE, NO_BASELINE, PASS])
@pytest.mark.parametrize("inconclusive", ["fail", "warn"])
def test_what_a_verdict_does(verdict: str, inconclusive: str) -> None:
    check = given(None, verdict)
    result = Result((check,), inconclusive)
    assert (verdict in FAILING, verdict in UNDECIDED) == (
        verdict in {FAIL, CHANGED, NOT_COMPARABLE, SLOWER},
        verdict in {INCONCLUSIVE, NO_BASELINE},
    )
    assert result.verdict == (FAIL if verdict in FAILING else INCONCLUSIVE if verdict in UNDECIDED else PASS)
    assert result.passes == (verdict == PASS or (verdict in UNDECIDED and inconclusive == "warn"))
    assert result.fails(check) != result.passes
