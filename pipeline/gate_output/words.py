"""A gate's checks and verdict in words, the same on a terminal, in Markdown, in JUnit and in annotations."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from pipeline.checks.speed import NAME as MAX_SLOWDOWN
from pipeline.checks.verdicts import (
    CHANGED,
    FAIL,
    FAILING,
    INCONCLUSIVE,
    NO_BASELINE,
    NOT_COMPARABLE,
    PASS,
    SLOWER,
    Check,
    Result,
)

NAMES = {
    "max_ln_ppl_ratio": "perplexity",
    "max_kld_mean": "KL, nats/token",
    "min_same_top": "same top-1",
    "max_regression": "regression",
    MAX_SLOWDOWN: "time",
}
"""Of checks whose name in gate.json is not plain English."""
BASELINE = "baseline"
AS_PERPLEXITY = frozenset({"max_ln_ppl_ratio", "max_regression"})
"""Figures in nats per token whose exponential is a ratio of perplexities."""
PASSED = Check("", "", None, None, None, None, PASS, "")
"""Any check that passes."""
ORDER = (FAIL, CHANGED, NOT_COMPARABLE, SLOWER, INCONCLUSIVE, NO_BASELINE)
"""Verdicts other than a pass, the worst first."""
DETAILS = 12
"""Lines of what differs that are shown; gate.json has all."""
NOT_PRINTED = re.compile("[^\t\n\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""Control characters and halves of surrogate pairs: XML has no place for them, and a terminal would obey them."""


def printed(text: str) -> str:
    """A text without what cannot be printed: names and reasons hold what files say."""
    return NOT_PRINTED.sub("", text)


def printable(result: Result) -> Result:
    """The result with texts that can be printed anywhere."""
    checks = (
        replace(
            check,
            variant=printed(check.variant),
            name=printed(check.name),
            reason=printed(check.reason),
            details=tuple(map(printed, check.details)),
        )
        for check in result.checks
    )
    return replace(result, checks=tuple(checks))


def named(check: Check) -> str:
    """'perplexity' for max_ln_ppl_ratio, 'prefill 512 time' for a speed."""
    if check.name.startswith(f"{MAX_SLOWDOWN}_"):
        return f"{check.name.removeprefix(f'{MAX_SLOWDOWN}_').replace('_', ' ')} time"
    return NAMES.get(check.name, check.name.replace("_", " "))


def asked(check: Check) -> str:
    """'at most +4.08 %': of perplexity or time more, of tokens, or nats per token."""
    if check.limit is None:
        return "as accepted" if check.name == BASELINE else "-"
    return f"at {'least' if _is_least(check) else 'most'} {_limit(check)}{_unit(check)}"


def found(check: Check) -> str:
    """'+3.73 % [+2.70, +4.77]', in the unit of `asked`."""
    if check.value is None:
        if check.name == BASELINE:
            return "the same" if check.verdict == PASS else check.verdict
        return "no number" if check.limit is not None and check.verdict == FAIL else "-"
    bracket = ""
    if check.low is not None and check.high is not None:
        bracket = f" [{_shown(check, check.low)}, {_shown(check, check.high)}]"
    return f"{_shown(check, check.value)}{_unit(check)}{bracket}"


def needed(check: Check) -> str:
    """What would decide the check or let it pass, in a few words: '678 windows', '4.13 less' of the figure."""
    if check.verdict == INCONCLUSIVE and check.windows_needed:
        return f"{check.windows_needed} windows"
    end = check.low if _is_least(check) else check.high
    if check.verdict in {FAIL, SLOWER} and end is not None and check.limit is not None:
        gap = abs(_scaled(check, end) - _scaled(check, check.limit))
        return f"{gap:.{_digits(check)}f} {'more' if _is_least(check) else 'less'}"
    if check.verdict == INCONCLUSIVE and check.name.startswith(MAX_SLOWDOWN):
        return "steadier times"
    fixed = {PASS: "nothing", CHANGED: "a look", NO_BASELINE: "a baseline"}
    return fixed.get(check.verdict, "see below")


def in_nats(check: Check) -> str | None:
    """'0.0366 [0.0266, 0.0466] nats/token, limit 0.04', of a figure that `found` has as perplexity."""
    if check.name not in AS_PERPLEXITY or check.value is None or check.limit is None:
        return None
    bracket = "" if check.low is None or check.high is None else f" [{check.low:.4f}, {check.high:.4f}]"
    return f"{check.value:.4f}{bracket} nats/token, limit {check.limit:g}"


def details(check: Check) -> list[str]:
    """Lines of what differs, and how many more gate.json has."""
    more = len(check.details) - DETAILS
    return [*check.details[:DETAILS], *([f"… and {more} more in reports/gate.json"] if more > 0 else [])]


def grouped(checks: Iterable[Check]) -> dict[str, list[Check]]:
    """Checks by variant, in their order."""
    groups: dict[str, list[Check]] = {}
    for check in checks:
        groups.setdefault(check.variant, []).append(check)
    return groups


def alike(groups: Mapping[str, Sequence[Check]]) -> list[list[str]]:
    """Variants that stand alike, in their order: the same verdicts for the same reasons and figures."""
    standing: dict[tuple[Check, ...], list[str]] = {}
    for name, checks in groups.items():
        shown = (check if check.verdict != PASS else PASSED for check in checks)
        standing.setdefault(tuple(replace(check, variant="") for check in shown), []).append(name)
    return [*standing.values()]


def counted(checks: Iterable[Check]) -> str:
    """'1 fails, 2 are inconclusive, 3 pass': checks by verdict, the worst first."""
    verdicts = [check.verdict for check in checks]
    says = {FAIL: ("fails", "fail"), PASS: ("passes", "pass"), CHANGED: ("is changed", "are changed")}
    parts = []
    for verdict in (*ORDER, PASS):
        if count := verdicts.count(verdict):
            one, many = says.get(verdict, (f"is {verdict}", f"are {verdict}"))
            if verdict == NO_BASELINE:
                one, many = "has no baseline", "have no baseline"
            parts.append(f"{count} {one if count == 1 else many}")
    return ", ".join(parts)


def nearest(checks: Iterable[Check]) -> Check | None:
    """Of checks that pass, the one whose interval takes most of what its limit allows; None where none has a figure."""
    shares = {check: share for check in checks if (share := _used(check)) is not None}
    return max(shares, key=shares.__getitem__, default=None)


def brackets(result: Result) -> str | None:
    """What a bracket is; None where there is none."""
    bounded = [check for check in result.checks if check.low is not None]
    windows = sorted({check.windows for check in bounded if check.windows})
    parts = [f"over {' or '.join(map(str, windows))} windows of text"] if windows else []
    if any(check.name.startswith(MAX_SLOWDOWN) for check in bounded):
        parts.append("of times from the intervals of both medians")
    return f"Brackets are 95 % intervals {'; '.join(parts)}." if parts else None


def verdict(result: Result) -> str:
    """'The gate fails: of 45 checks of 15 variants 1 fails, 44 pass.'"""
    if not result.checks:
        return "The gate fails: there is no variant to check."
    variants = len(grouped(result.checks))
    of = f"{_count(len(result.checks), 'check')} of {_count(variants, 'variant')}"
    if result.verdict == PASS:
        return f"The gate passes: all {of} pass." if len(result.checks) > 1 else f"The gate passes: {of}."
    passes = "passes, with reservations" if result.passes else "fails"
    return f"The gate {passes}: of {of} {counted(result.checks)}."


def next_steps(result: Result) -> list[str]:
    """What to do, each thing once; nothing where all pass."""
    if not result.checks:
        return ["name a variant in params.yaml, then run `dvc repro`"]
    bad = [check for check in result.checks if check.verdict != PASS]
    steps = dict.fromkeys(filter(None, map(_step, sorted(bad, key=lambda check: ORDER.index(check.verdict)))))
    windows = [check.windows_needed for check in bad if check.windows_needed]
    if windows:
        more = f"score about {max(windows)} windows (corpus.windows in params.yaml; take a longer text if need be)"
        steps[more] = None
    if not result.passes and not any(check.verdict in FAILING for check in bad):
        steps["or let what is undecided pass (gate.inconclusive: warn)"] = None
    return [*steps]


def last_line(result: Result) -> str:
    """The verdict and what to do next."""
    steps = next_steps(result)
    return f"{verdict(result)} Next: {'; '.join(steps)}." if steps else verdict(result)


def _step(check: Check) -> str | None:
    """What to do about a check that does not pass, beside scoring more windows."""
    accept = f"`quantgate baseline accept{' --speed' if check.name.startswith(MAX_SLOWDOWN) else ''}`"
    if check.verdict == FAIL:
        if check.value is None or check.low is None:
            return "run `dvc repro`" if "run dvc repro" in check.reason else "do what the reasons say"
        if check.name == "max_regression":
            return f"find what made it lose more than the baseline, or {accept} where that is meant"
        return "take a scheme that loses less, or a limit that you accept (gate.limits in params.yaml)"
    return {
        CHANGED: f"see what changed, and where it is meant {accept} and commit reports/baseline.json",
        NOT_COMPARABLE: f"measure as the baseline was, or {accept} and commit reports/baseline.json",
        SLOWER: "time it again on a quiet machine, then look for what slowed it",
        NO_BASELINE: f"look at the figures, then {accept} on this machine and commit reports/baseline.json",
        INCONCLUSIVE: None if check.windows_needed else "do what the undecided checks say",
    }[check.verdict]


def level(result: Result, check: Check) -> str:
    """Of a check that does not pass 'error' where it fails the gate, else 'warning'."""
    return "error" if result.fails(check) else "warning"


def outcome(result: Result) -> str:
    """'error', 'warning' or 'notice': how the gate as a whole came out."""
    if not result.passes:
        return "error"
    return "notice" if result.verdict == PASS else "warning"


def _used(check: Check) -> float | None:
    if check.verdict != PASS or check.limit is None or check.low is None or check.high is None:
        return None
    used, allowed = (1 - check.low, 1 - check.limit) if check.name.startswith("min_") else (check.high, check.limit)
    return used / allowed if allowed > 0 else math.inf


def _is_least(check: Check) -> bool:
    return check.name.startswith("min_")


def _unit(check: Check) -> str:
    return "" if check.name == "max_kld_mean" else " %"


def _digits(check: Check) -> int:
    """Decimal places."""
    return 4 if check.name == "max_kld_mean" else 1 if check.name.startswith(MAX_SLOWDOWN) else 2


def _scaled(check: Check, value: float) -> float:
    """A figure in the unit that is shown: of perplexity and shares per cent."""
    if check.name == "max_kld_mean":
        return value
    return min(math.expm1(min(value, 700.0)) if check.name in AS_PERPLEXITY else value, 1e6) * 100


def _signed(check: Check) -> str:
    return "" if check.name in {"max_kld_mean", "min_same_top"} else "+"


def _shown(check: Check, value: float) -> str:
    return f"{_scaled(check, value):{_signed(check)}.{_digits(check)}f}"


def _limit(check: Check) -> str:
    """Without the zeros at its end."""
    digits = 4 if _is_least(check) else 3  # 99.95 % is not 100 %
    return f"{_scaled(check, check.limit or 0.0):{_signed(check)}.{digits}g}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"
