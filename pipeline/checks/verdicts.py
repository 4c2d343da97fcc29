"""Verdicts: what a check says, and what all of them together do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PASS, FAIL, INCONCLUSIVE = "pass", "fail", "inconclusive"
CHANGED, NOT_COMPARABLE, NO_BASELINE = "changed", "not comparable", "no baseline"
SLOWER = "slower"

FAILING = frozenset({FAIL, CHANGED, NOT_COMPARABLE, SLOWER})
"""Verdicts that fail the gate whatever params.yaml says."""
UNDECIDED = frozenset({INCONCLUSIVE, NO_BASELINE})
"""Verdicts that gate.inconclusive decides about."""


@dataclass(frozen=True)
class Check:
    """One question about one variant: what was asked, found and decided.

    limit, value, low and high are in the unit of the figure that `name` limits. `p_value` is one-sided: how likely a
    figure this far beyond the limit is where the true one is within it. A check hands in its own, of a figure on either
    side; of a gate's result it is the one after Holm over all checks, and None where the figure is within the limit.
    `windows` is how many the figure is of, `windows_needed` how many would decide, None where none would or none need.
    `details` are lines that say what differs.
    """

    variant: str
    name: str
    limit: float | None
    value: float | None
    low: float | None
    high: float | None
    verdict: str
    reason: str
    windows_needed: int | None = None
    p_value: float | None = None
    details: tuple[str, ...] = ()
    windows: int | None = None


@dataclass(frozen=True)
class Result:
    """All checks and what follows from them under `inconclusive` (fail or warn)."""

    checks: tuple[Check, ...]
    inconclusive: str

    @property
    def verdict(self) -> str:
        found = {check.verdict for check in self.checks}
        if found & FAILING or not self.checks:
            return FAIL
        if found & UNDECIDED:
            return INCONCLUSIVE
        return PASS

    @property
    def passes(self) -> bool:
        return self.verdict == PASS or (self.verdict == INCONCLUSIVE and self.inconclusive == "warn")

    def fails(self, check: Check) -> bool:
        """Whether this check alone would make the gate exit with 1."""
        return check.verdict in FAILING or (check.verdict in UNDECIDED and self.inconclusive == "fail")

    def as_json(self) -> dict[str, Any]:
        """gate.json: nested dicts, variant -> check."""
        variants: dict[str, dict[str, Any]] = {}
        for check in self.checks:
            entry = {key: value for key, value in asdict(check).items() if key not in {"variant", "name"}}
            variants.setdefault(check.variant, {})[check.name] = entry | {"details": list(check.details)}
        return {"verdict": self.verdict, "passes": self.passes, "inconclusive": self.inconclusive, "variants": variants}


def failed(variant: str, name: str, reason: str) -> Check:
    """A check that fails for what is missing or differs, not for a figure."""
    return Check(variant, name, None, None, None, None, FAIL, reason)
