"""A variant that the gate passes, how to change it, and what the gate says."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from figures import IDENTITY, coreml_variant

from pipeline.checks.limits import CHECKS
from pipeline.checks.verdicts import Check, Result
from pipeline.gate import judge
from pipeline.params import Gate
from pipeline.types import Limits


@dataclass(frozen=True)
class Project:
    """What the gate reads of params.yaml."""

    variants: Mapping[str, Any]
    gate: Gate
    asked: Mapping[str, Mapping[str, str]] = field(default_factory=dict)


LIMITS = Limits(max_ln_ppl_ratio=0.04, max_kld_mean=0.06, min_same_top=0.83)


def figure(value: float | None, low: float | None, high: float | None) -> dict[str, float | None]:
    return {"value": value, "low": low, "high": high}


def good() -> dict[str, Any]:
    """A variant that is within LIMITS by all three intervals."""
    whole = coreml_variant(5, 0.02, 0.01)
    return {
        **{key: whole[key] for key in ("size_bytes", "folder_bytes", "bits_per_weight", "windows", "scored_tokens")},
        **{key: whole[key] for key in ("target_probability_rms", "bits_per_byte", "ppl")},
        "ln_ppl_ratio": figure(0.01, 0.005, 0.015),
        "kld": whole["kld"] | {"mean": figure(0.02, 0.01, 0.03)},
        "same_top": figure(0.9, 0.88, 0.92),
        "identity": deepcopy(IDENTITY),
    }


def report(variants: dict[str, Any], **other: Any) -> dict[str, Any]:
    return {"reference": {"ppl": 80.0}, "identity": IDENTITY, "variants": variants, **other}


def put(variant: dict[str, Any], name: str, found: Any) -> None:
    *path, last = CHECKS[name]
    for key in path:
        variant = variant[key]
    variant[last] = found


SHOWN = {  # of two values, how a reason tells them apart
    "text_sha256": ("111111111111…", "999999999999…"),
    "tokenizer_sha256": ("222222222222…", "999999999999…"),
    "ids_sha256": ("333333333333…", "999999999999…"),
    "context": ("512", "256"),
    "windows": ("40", "39"),
    "corpus": ("sample", "file"),
}


def project(
    inconclusive: str,
    names: Iterable[str] = ("v",),
    limits: Limits = LIMITS,
    asked: Mapping[str, Mapping[str, str]] = MappingProxyType({}),
) -> Project:
    """All variants have the same limits."""
    return Project(dict.fromkeys(names), Gate(inconclusive, {"default": limits}), asked)


def judged(variant: dict[str, Any] | None, limits: Limits = LIMITS, inconclusive: str = "fail") -> Result:
    variants = {} if variant is None else {"v": variant}
    return judge(report(variants), project(inconclusive, limits=limits))


def only(result: Result, name: str) -> Check:
    (check,) = [check for check in result.checks if check.name == name]
    return check
