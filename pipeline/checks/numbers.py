"""Whether every number that the report shows is there: a gate never passes over a hole."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from pipeline.checks.identity import mapping
from pipeline.checks.limits import number
from pipeline.checks.verdicts import Check, failed

OF_A_VARIANT = (
    *("size_bytes", "folder_bytes", "bits_per_weight", "windows", "scored_tokens"),
    *("target_probability_rms", "bits_per_byte", "ppl.value", "ln_ppl_ratio.value", "same_top.value"),
    *("kld.mean.value", "kld.median.value", "kld.p99.value", "kld.p99_9.value", "kld.max.value"),
)
"""What is measured of every variant. Times may be missing: not all machines can tell them."""
OF_ALL = ("reference.ppl",)
"""What is measured once."""
SHOWN = 5


def checks(
    where: str, figures: Mapping[str, Any], needed: Collection[str], judged: Collection[str] = ()
) -> list[Check]:
    """A fail that names what is missing or not finite, nothing where all is there.

    `needed` must be numbers; whatever else is a number must be finite. What lies at `judged` has checks of its own.
    """
    absent = [path for path in needed if _at(figures, path) is None]
    strange = [path for path, value in _numbers(figures) if not math.isfinite(value)]
    told = tuple(f"{path}." for path in judged)
    found = [path for path in dict.fromkeys((*absent, *strange)) if not f"{path}.".startswith(told)]
    if not found:
        return []
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    reason = f"missing or not finite: {', '.join(found[:SHOWN])}{more}: run dvc repro"
    return [failed(where, "numbers", reason)]


def _at(figures: Mapping[str, Any], path: str) -> float | None:
    *above, last = path.split(".")
    for key in above:
        figures = mapping(figures, key)
    return number(figures, last)


def _numbers(value: Any, path: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _numbers(item, f"{path}.{key}" if path else str(key))
    elif isinstance(value, float):
        yield path, value
