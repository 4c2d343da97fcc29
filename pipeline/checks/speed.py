"""Whether a variant got slower than what was accepted on the same machine.

A ratio's interval is from both medians' intervals: its ends are the quotients of their opposite ends. It holds the true
ratio wherever both intervals hold their medians, so in at least 1 - 2 · 5 % of all cases and, from 7 rounds, of which
the interval of a median covers 98.4 %, in at least 96.8 %. Holm's correction is of windows, and not of these.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.checks.baseline import Baseline
from pipeline.checks.identity import mapping
from pipeline.checks.limits import MISSING, number
from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, NO_BASELINE, PASS, SLOWER, Check
from pipeline.metrics.machine import short_id
from pipeline.types import Limits

NAME = "max_slowdown"
KINDS = ("prefill", "decode")
ACCEPT = "run `quantgate baseline accept --speed` on this machine"
OTHER_TENSORS = "its tensors are not those that the baseline's speed is of"
ROUNDS = "rounds"
"""Of the settings, the one that may differ: more rounds narrow an interval and change no speed."""


def checks(variant: str, limits: Limits, measurements: Mapping[str, Any], baseline: Baseline | None) -> list[Check]:
    """A check of each task that was timed; nothing where max_slowdown is not set, where nothing can be timed here, or
    where a speed is no user's.
    """
    limit, figures = limits.max_slowdown, mapping(mapping(measurements, "variants"), variant)
    if limit is None or figures.get("unrepresentative") is not None:
        return []
    speeds = baseline.speeds if baseline else {}
    machine = short_id(mapping(measurements, "machine"))
    then = speeds.get(machine, {})
    accepted, timed = mapping(mapping(then, "variants"), variant), _tasks(figures)
    if not timed and not accepted:
        return []
    reason: str | None = _absent(machine, speeds)
    if accepted:
        reason = _differs(figures, measurements, accepted, then) if timed else None
    if reason:
        return [Check(variant, NAME, limit, None, None, None, NO_BASELINE, f"{reason}: {ACCEPT}")]
    found = [_check(variant, limit, task, figures, accepted) for task in dict.fromkeys((*timed, *_tasks(accepted)))]
    source, was = measurements.get("power_source"), then.get("power_source")
    if source != was:
        said = f"power source {source}, and {was} when the baseline was accepted: time it as then, or {ACCEPT}"
        found = [_undecided(check, said) for check in found]
    return found


def _tasks(figures: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Kind and tokens of each task that was timed."""
    return [(kind, tokens) for kind in KINDS for tokens in mapping(figures, kind)]


def _absent(machine: str, speeds: Mapping[str, Mapping[str, Any]]) -> str:
    """Why there is nothing to compare with."""
    if machine in speeds:
        return f"the baseline of this machine ({machine}) has no speeds of it"
    there = [f"{mapping(speed, 'machine').get('cpu')} ({known})" for known, speed in speeds.items()]
    others = f", only those of {', '.join(there)}" if there else ""
    return f"the baseline has no speeds of this machine ({machine}){others}"


def _differs(
    figures: Mapping[str, Any], measurements: Mapping[str, Any], accepted: Mapping[str, Any], then: Mapping[str, Any]
) -> str | None:
    """The first setting or engine fact by which both were timed in another way."""
    for what, now, before in (
        ("timing", mapping(measurements, "timing"), mapping(then, "timing")),
        ("timing engine", mapping(figures, "timing_engine"), mapping(accepted, "engine")),
    ):
        for key in {**before, **now}:
            if key != ROUNDS and now.get(key) != before.get(key):
                return f"{what}: {key} is {now.get(key)}, and was {before.get(key)} when the baseline was accepted"
    return None


def _check(
    variant: str, limit: float, task: tuple[str, str], figures: Mapping[str, Any], accepted: Mapping[str, Any]
) -> Check:
    name, text = "_".join((NAME, *task)), " ".join(task)
    kind, tokens = task
    rates = mapping(figures, kind).get(tokens), mapping(accepted, kind).get(tokens)
    if rates[1] is None:
        return Check(variant, name, limit, None, None, None, NO_BASELINE, f"the baseline has no {text}: {ACCEPT}")
    if rates[0] is None:
        why = mapping(figures, "not_measured").get(text, "it is not among the tasks asked for")
        reason = f"{text} is in the baseline and was not timed now: {why}"
        return Check(variant, name, limit, None, None, None, INCONCLUSIVE, reason)
    now, was = ({key: number(rate, key) for key in ("value", "low", "high")} for rate in rates)
    if not (now["value"] and was["value"]):
        return Check(variant, name, limit, None, None, None, FAIL, MISSING)
    value = was["value"] / now["value"] - 1
    if not (now["low"] and now["high"] and was["low"] and was["high"]):
        reason = "so few rounds bound nothing: ask for at least 6 in params.yaml, benchmark.rounds"
        return Check(variant, name, limit, value, None, None, INCONCLUSIVE, reason)
    low, high = was["low"] / now["high"] - 1, was["high"] / now["low"] - 1
    verdict, reason = INCONCLUSIVE, "the limit lies in the interval; more rounds (benchmark.rounds) may decide it"
    if high <= limit:
        verdict, reason = PASS, "the whole interval is within the limit"
    elif low > limit:
        verdict, reason = SLOWER, "the whole interval is beyond the limit"
    details = () if figures.get("tensors_sha256") == accepted.get("tensors") else (OTHER_TENSORS,)
    check = Check(variant, name, limit, value, low, high, verdict, reason, details=details)
    said = filter(None, map(_unsteady, rates, ("now", "when the baseline was accepted")))
    return _undecided(check, f"{text}: time it on a quiet machine") if (text := "; ".join(said)) else check


def _unsteady(rate: Any, when: str) -> str | None:
    """What kept the rounds of a speed from being alike."""
    disturbed, drift = number(rate, "disturbed_rounds"), mapping(rate, "drift")
    said = []
    if disturbed is None or disturbed > 0:
        rounds = number(rate, "rounds")
        said.append(f"other work took the cores in {disturbed or 0:.0f} of {rounds or 0:.0f} rounds")
    if drift.get("drifted") is not False:
        said.append(f"the speed drifted by {(number(drift, 'value') or 0) * 100:+.0f} % over the rounds")
    return f"{' and '.join(said)} {when}" if said else None


def _undecided(check: Check, said: str) -> Check:
    """Whatever the figures say, under these circumstances they decide nothing."""
    reason = f"{check.reason}; {said}" if check.verdict == INCONCLUSIVE else said
    return (
        replace(check, verdict=INCONCLUSIVE, reason=reason) if check.verdict in {PASS, SLOWER, INCONCLUSIVE} else check
    )
