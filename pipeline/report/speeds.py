"""Speed and memory as text: the same words in reports/pareto.md and on the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.report.text import megabytes, ranged

NOT_MEASURED = "not measured"
DISTURBED, DRIFTED = "†", "‡"
COSTS = ("load, s", "first prefill, s", "peak memory, MB", "KV cache, MB")

Variants = Mapping[str, Mapping[str, Any]]


def tokens_of(variants: Variants, kind: str) -> list[str]:
    """Numbers of tokens of the prefills or decodes of all variants, also of those that were not measured."""
    asked = [task.split() for v in variants.values() for task in v["not_measured"]]
    measured = {n for v in variants.values() for n in v[kind]}
    return sorted(measured | {n for of, n in asked if of == kind}, key=int)


def tasks_of(variant: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """'prefill 512' and its figures, and so on."""
    for kind in ("prefill", "decode"):
        for n, task in variant[kind].items():
            yield f"{kind} {n}", task


def rate(task: Mapping[str, Any] | None, digits: int = 0, bracket: bool = True) -> str:
    """'300 [290, 310] †': tokens per second with the marks of its footnotes."""
    if task is None:
        return NOT_MEASURED
    shown = ranged(task if bracket else {**task, "low": None, "high": None}, digits)
    return " ".join(filter(None, (shown, marks(task))))


def marks(task: Mapping[str, Any]) -> str:
    return (DISTURBED if task["disturbed_rounds"] else "") + (DRIFTED if task["drift"]["drifted"] else "")


def costs(variant: Mapping[str, Any]) -> list[str]:
    """Seconds of a cold start and megabytes, in the order of COSTS."""
    if not variant["cold_start"]:
        return [NOT_MEASURED] * len(COSTS)
    seconds = [variant["cold_start"][key]["value"] for key in ("load_seconds", "first_prefill_seconds")]
    return [*(f"{s:.2f}" for s in seconds), *(megabytes(variant[key]) for key in ("peak_rss_bytes", "kv_bytes"))]


def rate_notes(variants: Variants) -> list[str]:
    """What the marks mean and why something was not measured; nothing where all is well."""
    notes = []
    found = [(name, task, figures) for name, v in variants.items() for task, figures in tasks_of(v)]
    worst = max((figures for *_, figures in found), key=lambda figures: figures["disturbed_rounds"], default=None)
    if worst and worst["disturbed_rounds"]:
        notes.append(
            f"{DISTURBED} Some rounds were disturbed, at most {worst['disturbed_rounds']} of {worst['rounds']}: other "
            "work took the cores, also when they were repeated."
        )
    drifts = [
        f"{name} {task} {figures['drift']['value'] * 100:+.0f} %"
        for name, task, figures in found
        if figures["drift"]["drifted"]
    ]
    if drifts:
        notes.append(
            f"{DRIFTED} The speed drifted: from the first round to the last it changed by more than 5 %, more steadily "
            f"than by chance: {', '.join(drifts)}."
        )
    alike: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, v in variants.items():
        for task, reason in v["not_measured"].items():
            alike[task, reason].append(name)
    notes += [f"Not measured: {task} of {', '.join(names)}: {reason}." for (task, reason), names in alike.items()]
    return notes


def cost_notes(variants: Variants) -> list[str]:
    """How the cold starts and the memory came about."""
    starts = [v["cold_start"] for v in variants.values() if v["cold_start"]]
    if not starts:
        return []
    n, tokens = starts[0]["load_seconds"]["n"], " or ".join(dict.fromkeys(str(start["tokens"]) for start in starts))
    dropped = all(start["page_cache_dropped"] for start in starts)
    cache = "the weights dropped from the page cache before" if dropped else "the page cache not dropped before"
    return [
        f"Load and first prefill ({tokens} tokens) are of a cold start: medians of {n}, each in a process of its own, "
        f"{cache}. Peak memory is all that such a process had resident after the longest prompt and decoding, mapped "
        "weights included. KV cache: for the longest prompt and the tokens decoded."
    ]
