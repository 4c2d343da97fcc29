"""Speeds against those that were accepted on the same machine, figures by hand."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
from figures import MACHINE, TIMING, TIMING_ENGINE, drift, mlx_variant, variant

from pipeline.checks import speed
from pipeline.checks.baseline import Baseline
from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, NO_BASELINE, PASS, SLOWER, Check
from pipeline.metrics.machine import short_id
from pipeline.types import Limits

LIMITS = Limits(max_slowdown=0.1)
HERE = short_id(MACHINE)
PREFILL, DECODE = "max_slowdown_prefill_512", "max_slowdown_decode_64"
ACCEPT = "run `quantgate baseline accept --speed` on this machine"


def rate(value: float | None, low: float | None, high: float | None, **other: Any) -> dict[str, Any]:
    return {"value": value, "low": low, "high": high, "rounds": 7, "disturbed_rounds": 0, "drift": drift()} | other


def measured(prefill_512: dict[str, Any] | None = None, **other: Any) -> dict[str, Any]:
    """As measurements.json: tokens per second."""
    figures = variant(5, 0.01, 0.01) | {"prefill": {"512": prefill_512 or rate(1000, 990, 1010)}}
    figures["decode"] = {"64": rate(100, 99, 101)}
    return {
        "machine": MACHINE,
        "power_source": "mains",
        "timing": {**TIMING, "order": "interleaved"},
        "variants": {"v": figures | other},
    }


def accepted(**other: Any) -> dict[str, Any]:
    """As baseline.json keeps it."""
    now = measured()
    figures = now["variants"]["v"]
    kept = {key: figures[key] for key in ("prefill", "decode")} | {
        "tensors": figures["tensors_sha256"],
        "engine": figures["timing_engine"],
    }
    return {**{key: now[key] for key in ("machine", "power_source", "timing")}, "variants": {"v": kept | other}}


def judged(now: dict[str, Any], then: dict[str, Any] | None = None, limits: Limits = LIMITS) -> dict[str, Check]:
    baseline = Baseline(speeds={HERE: then or accepted()})
    return {check.name: check for check in speed.checks("v", limits, now, baseline)}


def test_it_is_off_unless_a_limit_is_set() -> None:
    assert judged(measured(), limits=Limits(max_kld_mean=0.1)) == {}


def test_the_same_speed_passes() -> None:
    found = judged(measured())
    assert [*found] == [PREFILL, DECODE]
    check = found[PREFILL]
    assert (check.verdict, check.limit, check.value, check.p_value, check.details) == (PASS, 0.1, 0.0, None, ())
    assert (check.low, check.high) == (pytest.approx(990 / 1010 - 1), pytest.approx(1010 / 990 - 1))


@pytest.mark.parametrize(
    ("now", "verdict", "value", "low", "high"),
    [  # of 1000 [990, 1010] tokens per second; time is its inverse
        (rate(800, 790, 810), SLOWER, 0.25, 990 / 810 - 1, 1010 / 790 - 1),
        (rate(950, 940, 960), PASS, 1000 / 950 - 1, 990 / 960 - 1, 1010 / 940 - 1),
        (rate(900, 850, 950), INCONCLUSIVE, 1000 / 900 - 1, 990 / 950 - 1, 1010 / 850 - 1),
        (rate(2000, 1990, 2010), PASS, -0.5, 990 / 2010 - 1, 1010 / 1990 - 1),
        (rate(500, 495, 495), SLOWER, 1.0, 1.0, 1010 / 495 - 1),
    ],
)
def test_the_whole_interval_of_the_ratio_decides(
    now: dict[str, Any], verdict: str, value: float, low: float, high: float
) -> None:
    check = judged(measured(now))[PREFILL]
    assert check.verdict == verdict
    assert (check.value, check.low, check.high) == tuple(pytest.approx(end) for end in (value, low, high))


@pytest.mark.parametrize("where", ["now", "then"])
@pytest.mark.parametrize(
    ("unsteady", "said"),
    [
        ({"disturbed_rounds": 2}, "other work took the cores in 2 of 7 rounds"),
        ({"drift": drift(-0.2)}, "the speed drifted by -20 % over the rounds"),
        (
            {"drift": drift(-0.2), "disturbed_rounds": 1},
            "other work took the cores in 1 of 7 rounds and the speed drifted by -20 % over the rounds",
        ),
        ({"disturbed_rounds": None}, "other work took the cores in 0 of 7 rounds"),
        ({"drift": None}, "the speed drifted by +0 % over the rounds"),
    ],
)
@pytest.mark.parametrize("fast", [True, False])
def test_rounds_that_were_not_alike_decide_nothing(unsteady: dict[str, Any], said: str, where: str, fast: bool) -> None:
    """Neither for better nor for worse; what a report does not say is not taken as quiet."""
    one, other = (rate(*((1000, 990, 1010) if fast else (500, 490, 510)), **unsteady), rate(1000, 990, 1010))
    now, then = (one, other) if where == "now" else (other, one | {"value": 1000, "low": 990, "high": 1010})
    check = judged(measured(now), accepted(prefill={"512": then}))[PREFILL]
    when = {"now": "now", "then": "when the baseline was accepted"}[where]
    assert check.verdict == INCONCLUSIVE
    assert check.reason == f"{said} {when}: time it on a quiet machine"
    assert judged(measured(now), accepted(prefill={"512": then}))[DECODE].verdict == PASS


def test_another_power_source_decides_nothing() -> None:
    found = judged(measured() | {"power_source": "battery"})
    assert {check.verdict for check in found.values()} == {INCONCLUSIVE}
    assert "power source battery, and mains when the baseline was accepted" in found[PREFILL].reason


def test_without_speeds_of_this_machine_there_is_no_baseline() -> None:
    other = MACHINE | {"cpu": "Another CPU"}
    baseline = Baseline(speeds={short_id(other): accepted() | {"machine": other}})
    (check,) = speed.checks("v", LIMITS, measured(), baseline)
    assert (check.name, check.verdict, check.limit, check.value) == ("max_slowdown", NO_BASELINE, 0.1, None)
    assert check.reason == (
        f"the baseline has no speeds of this machine ({HERE}), only those of Another CPU ({short_id(other)}): {ACCEPT}"
    )


@pytest.mark.parametrize("baseline", [None, Baseline()])
def test_without_any_speeds_there_is_no_baseline(baseline: Baseline | None) -> None:
    (check,) = speed.checks("v", LIMITS, measured(), baseline)
    assert (check.verdict, check.reason) == (
        NO_BASELINE,
        f"the baseline has no speeds of this machine ({HERE}): {ACCEPT}",
    )


def test_a_variant_that_the_baseline_lacks_has_none() -> None:
    (check,) = judged(measured(), accepted() | {"variants": {"other": {}}}).values()
    assert check.reason == f"the baseline of this machine ({HERE}) has no speeds of it: {ACCEPT}"


def test_a_task_that_the_baseline_lacks_has_none() -> None:
    found = judged(measured(), accepted(prefill={"128": rate(500, 490, 510)}))
    assert found[PREFILL].verdict == NO_BASELINE
    assert found[PREFILL].reason == f"the baseline has no prefill 512: {ACCEPT}"
    assert found["max_slowdown_prefill_128"].verdict == INCONCLUSIVE
    assert found["max_slowdown_prefill_128"].reason == (
        "prefill 128 is in the baseline and was not timed now: it is not among the tasks asked for"
    )
    assert found[DECODE].verdict == PASS


def test_what_is_not_timed_any_more_does_not_pass() -> None:
    gone = {"prefill": {}, "decode": {}, "timing_engine": {}, "not_measured": {"prefill 512": "beyond its context"}}
    found = judged(measured(**gone))
    assert {check.verdict for check in found.values()} == {INCONCLUSIVE}
    assert found[PREFILL].reason.endswith("was not timed now: beyond its context")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"version": "b2"}, "timing engine: version is b2, and was b1 when the baseline was accepted"),
        ({"threads": 8}, "timing engine: threads is 8, and was 4 when the baseline was accepted"),
        ({"flash_attention": "off"}, "timing engine: flash_attention is off, and was auto when"),
    ],
)
def test_another_engine_has_no_baseline(change: dict[str, Any], said: str) -> None:
    (check,) = judged(measured(timing_engine=TIMING_ENGINE | change)).values()
    assert check.verdict == NO_BASELINE
    assert check.reason.startswith(said)
    assert check.reason.endswith(ACCEPT)


def test_other_settings_have_no_baseline_but_for_the_rounds() -> None:
    now = measured()
    now["timing"] |= {"order": "abba"}
    (check,) = judged(now).values()
    assert check.verdict == NO_BASELINE
    assert check.reason.startswith("timing: order is abba, and was interleaved when the baseline was accepted")
    now["timing"] |= {"order": "interleaved", "rounds": 21}
    assert {check.verdict for check in judged(now).values()} == {PASS}


def test_speeds_that_are_no_user_s_are_not_judged() -> None:
    now = measured()
    now["variants"]["v"] = mlx_variant(5, 0.01, 0.01)
    assert judged(now) == {}


@pytest.mark.parametrize("then", [None, accepted() | {"variants": {}}])
def test_what_cannot_be_timed_here_is_not_judged(then: dict[str, Any] | None) -> None:
    now = measured(prefill={}, decode={})
    now["variants"]["v"] |= {"timing_engine": {}}
    baseline = Baseline(speeds={HERE: then}) if then else None
    assert speed.checks("v", LIMITS, now, baseline) == []


@pytest.mark.parametrize("number", [None, float("nan"), 0, "1000"])
@pytest.mark.parametrize("where", ["now", "then"])
def test_a_number_that_is_missing_fails(number: Any, where: str) -> None:
    bad = rate(number, 990, 1010)
    now, then = (measured(bad), accepted()) if where == "now" else (measured(), accepted(prefill={"512": bad}))
    check = judged(now, then)[PREFILL]
    assert (check.verdict, check.value, check.reason) == (FAIL, None, "the number is missing: run dvc repro")


@pytest.mark.parametrize("where", ["now", "then"])
def test_too_few_rounds_decide_nothing(where: str) -> None:
    few = rate(500, None, None)
    now, then = (measured(few), accepted()) if where == "now" else (measured(), accepted(prefill={"512": few}))
    check = judged(now, then)[PREFILL]
    assert (check.verdict, check.low, check.high) == (INCONCLUSIVE, None, None)
    assert check.reason == "so few rounds bound nothing: ask for at least 6 in params.yaml, benchmark.rounds"


def test_other_tensors_are_said() -> None:
    found = judged(measured(rate(500, 490, 510)), accepted(tensors="other"))
    assert found[PREFILL].verdict == SLOWER
    assert found[PREFILL].details == ("its tensors are not those that the baseline's speed is of",)


def test_what_files_lack_never_ends_in_a_traceback() -> None:
    now, then = measured(), accepted()
    for whole, other in ((now, "now"), (then, "then")):
        for key in [*whole]:
            broken = deepcopy(whole)
            del broken[key]
            found = judged(broken, then) if other == "now" else judged(now, broken)
            decides = key == "variants" or (key, other) == ("machine", "then")  # speeds are found by its id
            assert PASS not in {check.verdict for check in found.values()} or decides


@pytest.mark.parametrize(
    ("now", "verdict"),
    [(rate(500, 495, 495), INCONCLUSIVE), (rate(510, 505, 515), PASS), (rate(480, 475, 490), SLOWER)],
)
def test_the_limit_itself_is_within_it(now: dict[str, Any], verdict: str) -> None:
    """Intervals of [1, 1.04], [0.92, 1] and [1.02, 1.13]."""
    assert judged(measured(now), limits=Limits(max_slowdown=1.0))[PREFILL].verdict == verdict
