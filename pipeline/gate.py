"""The gate: absolute limits, three verdicts, never a pass for lack of data."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pipeline.metrics.stats import windows_needed
from pipeline.types import Interval, Limits

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"

CHECKS = {
    "max_ln_ppl_ratio": ("ln_ppl_ratio",),
    "max_kld_mean": ("kld", "mean"),
    "min_same_top": ("same_top",),
}
"""Where measurements.json holds the figure of each limit."""


@dataclass(frozen=True)
class Check:
    """One limit of one variant: what was asked, found and decided."""

    variant: str
    name: str
    limit: float | None
    value: float | None
    low: float | None
    high: float | None
    verdict: str
    reason: str
    windows_needed: int | None = None


@dataclass(frozen=True)
class Result:
    """All checks and what follows from them under `inconclusive` (fail or warn)."""

    checks: tuple[Check, ...]
    inconclusive: str

    @property
    def verdict(self) -> str:
        found = {check.verdict for check in self.checks}
        if FAIL in found or not self.checks:
            return FAIL
        if INCONCLUSIVE in found:
            return INCONCLUSIVE
        return PASS

    @property
    def passes(self) -> bool:
        return self.verdict == PASS or (self.verdict == INCONCLUSIVE and self.inconclusive == "warn")

    def as_json(self) -> dict[str, Any]:
        """gate.json: nested dicts, variant -> check."""
        variants: dict[str, dict[str, Any]] = {}
        for check in self.checks:
            entry = {key: value for key, value in asdict(check).items() if key not in {"variant", "name"}}
            variants.setdefault(check.variant, {})[check.name] = entry
        return {"verdict": self.verdict, "passes": self.passes, "inconclusive": self.inconclusive, "variants": variants}


def judge(
    measurements: Mapping[str, Any], names: Iterable[str], limits_of: Callable[[str], Limits], inconclusive: str
) -> Result:
    """Check every variant named against its limits."""
    checks: list[Check] = []
    for name in names:
        variant = measurements["variants"].get(name)
        if variant is None:
            checks.append(_failed(name, "measured", "it was not measured: run dvc repro"))
            continue
        checks += [
            _failed(name, "comparable", reason)
            for reason in _differences(variant["identity"], measurements["identity"])
        ]
        limits = {key: limit for key, limit in asdict(limits_of(name)).items() if limit is not None}
        if not limits:
            checks.append(_failed(name, "limits", "it has no limit: set gate.limits.default in params.yaml"))
        checks += [_check(name, key, limit, variant) for key, limit in limits.items()]
    return Result(tuple(checks), inconclusive)


def _failed(variant: str, name: str, reason: str) -> Check:
    return Check(variant, name, None, None, None, None, FAIL, reason)


def _differences(found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[str]:
    return [
        f"its {key} is not the reference's: expected {_short(expected[key])}, found {_short(found.get(key))}; "
        "run dvc repro"
        for key in expected
        if found.get(key) != expected[key]
    ]


def _short(value: Any) -> str:
    text = str(value.get("name") if isinstance(value, Mapping) else value)
    return text if len(text) <= 20 else f"{text[:12]}…"


def _check(variant: str, name: str, limit: float, figures: Mapping[str, Any]) -> Check:
    figure: Any = figures
    for key in CHECKS[name]:
        figure = figure.get(key, {}) if isinstance(figure, Mapping) else {}
    value, low, high = (_number(figure, key) for key in ("value", "low", "high"))
    if value is None:
        return Check(variant, name, limit, None, low, high, FAIL, "the number is missing: run dvc repro")
    n = int(figures.get("windows") or 0)
    if low is None or high is None:
        reason = f"{n} window bounds nothing: ask for at least 2 in params.yaml, corpus.windows"
        return Check(variant, name, limit, value, low, high, INCONCLUSIVE, reason)
    upper = name.startswith("max_")
    if high <= limit if upper else low >= limit:
        return Check(variant, name, limit, value, low, high, PASS, "the whole 95 % interval is within the limit")
    if low > limit if upper else high < limit:
        return Check(variant, name, limit, value, low, high, FAIL, "the whole 95 % interval is beyond the limit")
    needed = windows_needed(Interval(value, low, high, n), limit)
    would = (
        f"about {needed} windows would decide it, {n} were used" if needed else "no number of windows would decide it"
    )
    return Check(
        variant, name, limit, value, low, high, INCONCLUSIVE, f"the limit lies in the interval; {would}", needed
    )


def _number(figure: Any, key: str) -> float | None:
    value = figure.get(key) if isinstance(figure, Mapping) else None
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None
