"""The gate: absolute limits, three verdicts, never a pass for lack of data."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from types import MappingProxyType
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

IDENTITY = ("source", "corpus", "text_sha256", "tokenizer_sha256", "ids_sha256", "context", "windows")
"""What must be the reference's for figures to be comparable."""


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
    measurements: Mapping[str, Any],
    names: Iterable[str],
    limits_of: Callable[[str], Limits],
    inconclusive: str,
    asked: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Result:
    """Check every variant named against its limits.

    `asked` is the format, and the scheme or path, that params.yaml asks of each variant: figures of another one are
    stale.
    """
    checks: list[Check] = []
    measured, identity = (_mapping(measurements, key) for key in ("variants", "identity"))
    for name in names:
        variant = measured.get(name)
        if not isinstance(variant, Mapping):
            checks.append(_failed(name, "measured", "it was not measured: run dvc repro"))
            continue
        for key, wanted in asked.get(name, {}).items():
            if variant.get(key) != wanted:
                reason = f"it was measured as {variant.get(key)}, params.yaml says {wanted}: run dvc repro"
                checks.append(_failed(name, f"same_{key}", reason))
        checks += _differences(name, _mapping(variant, "identity"), identity)
        limits = {key: limit for key, limit in asdict(limits_of(name)).items() if limit is not None}
        if not limits:
            checks.append(_failed(name, "limits", "it has no limit: set gate.limits.default in params.yaml"))
        checks += [_check(name, key, limit, variant) for key, limit in limits.items()]
    return Result(tuple(checks), inconclusive)


def _failed(variant: str, name: str, reason: str) -> Check:
    return Check(variant, name, None, None, None, None, FAIL, reason)


def _mapping(value: Any, key: str) -> Mapping[str, Any]:
    """A nested mapping, empty where a file does not hold it: what is missing then fails by name."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def _differences(variant: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Check]:
    checks = []
    for key in IDENTITY:
        if key not in expected:
            checks.append(_failed(variant, f"same_{key}", f"the reference's {key} is missing: run dvc repro"))
        elif found.get(key) != expected[key]:
            wanted, is_now = _shown(expected[key]), _shown(found.get(key))
            reason = f"its {key} is not the reference's: expected {wanted}, found {is_now}; run dvc repro"
            checks.append(_failed(variant, f"same_{key}", reason))
    return checks


def _shown(value: Any) -> str:
    """A figure whole, a hash by its start, a source by its name and a hash of its files."""
    if isinstance(value, Mapping):
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        return f"{value.get('name')} ({digest[:12]}…)"
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"


def _check(variant: str, name: str, limit: float, figures: Mapping[str, Any]) -> Check:
    figure: Any = figures
    for key in CHECKS[name]:
        figure = figure.get(key, {}) if isinstance(figure, Mapping) else {}
    value, low, high = (_number(figure, key) for key in ("value", "low", "high"))
    if value is None:
        return Check(variant, name, limit, None, low, high, FAIL, "the number is missing: run dvc repro")
    n = int(_number(figures, "windows") or 0)
    if (low is None or high is None) and n >= 2:
        return Check(variant, name, limit, value, low, high, FAIL, "its interval is missing: run dvc repro")
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
