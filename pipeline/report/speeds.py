"""Speed and memory as text: the same words in reports/pareto.md and on the terminal."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.report.pareto import unmeasurable, unmeasured, unrepresentative
from pipeline.report.text import effective, megabytes, ranged

NOT_MEASURED = "not measured"
DISTURBED, DRIFTED, UNREPRESENTATIVE = "†", "‡", "§"
COSTS = ("load, s", "first prefill, s", "peak memory, MB", "KV cache, MB")
MEMORY_IS = {
    "resident set": "all that such a process had resident, mapped weights included",
    "mlx.core.get_peak_memory": "the most that MLX had allocated, without what else the process held",
}
"""By `memory_by` of speed.json."""
OF_COREML = (
    "Of Core ML, a load compiles both functions, which an app's build does beforehand, and the KV cache is the whole "
    "state of the package."
)
UNITS = {"cpu": "CPU", "gpu": "GPU", "neural_engine": "Neural Engine"}
PLACED = ("prefill", "decode")
NOT_SAID = "not said"  # where Core ML says nothing of a function

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


def rate(variant: Mapping[str, Any], kind: str, n: str, bracket: bool = True) -> str:
    """'300 [290, 310] †': tokens per second of the prefill or decode of n tokens, with the marks of its footnotes."""
    task = variant[kind].get(n)
    if task is None:
        return not_measured(variant)
    shown = ranged(task if bracket else {**task, "low": None, "high": None}, 0)
    return " ".join(filter(None, (shown, marks(variant, task))))


def not_measured(variant: Mapping[str, Any]) -> str:
    """'not measured', with the reason where nothing of the variant could be: 'not measured (needs macOS)'."""
    reason = unmeasured(variant)
    return NOT_MEASURED if reason is None else f"{NOT_MEASURED} ({reason})"


def marks(variant: Mapping[str, Any], task: Mapping[str, Any]) -> str:
    """The footnotes of one of a variant's rates."""
    there = {
        DISTURBED: task["disturbed_rounds"],
        DRIFTED: task["drift"]["drifted"],
        UNREPRESENTATIVE: variant["unrepresentative"] is not None,
    }
    return "".join(mark for mark, is_there in there.items() if is_there)


def costs(variant: Mapping[str, Any]) -> list[str]:
    """Seconds of a cold start and megabytes, in the order of COSTS."""
    if not variant["cold_start"]:
        return [not_measured(variant)] * len(COSTS)
    seconds = [variant["cold_start"][key]["value"] for key in ("load_seconds", "first_prefill_seconds")]
    return [*(f"{s:.2f}" for s in seconds), *(megabytes(variant[key]) for key in ("peak_memory_bytes", "kv_bytes"))]


def placements(variants: Variants) -> dict[str, list[str]]:
    """'CPU 9 %, Neural Engine 91 %' of prefill and of decode, of the variants that were asked where they run."""
    return {
        name: [
            effective({unit: share for key, unit in UNITS.items() if (share := v["placement"][task][key])}) or NOT_SAID
            for task in PLACED
        ]
        for name, v in variants.items()
        if v["placement"] is not None
    }


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
    notes += [
        f"{UNREPRESENTATIVE} Not representative, and so never picked: {', '.join(names)}: {reason}. Medians of "
        f"{_rounds(variants, names)}."
        for reason, names in unrepresentative(variants).items()
    ]
    return [*notes, *_not_measured(variants)]


def _rounds(variants: Variants, names: Sequence[str]) -> int:
    """How often each of the variants' tasks was timed, at most."""
    return max(int(task["rounds"]) for name in names for _, task in tasks_of(variants[name]))


def _not_measured(variants: Variants) -> list[str]:
    """Each reason once, with what was not measured for it, as long as it was of the same variants."""
    nothing = unmeasurable(variants)
    names: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name, v in variants.items():
        for task, reason in v["not_measured"].items():
            if name not in nothing.get(reason, ()):
                names[task, reason].append(name)
    tasks: dict[tuple[str, str], list[str]] = defaultdict(list)
    for (task, reason), of in names.items():
        tasks[", ".join(of), reason].append(task)
    parts = {(of, reason): ", ".join(left_out) for (of, reason), left_out in tasks.items()}
    parts |= {(", ".join(of), reason): "speed and memory" for reason, of in nothing.items()}
    return [f"Not measured: {what} of {of}: {reason}." for (of, reason), what in parts.items()]


def cost_notes(variants: Variants) -> list[str]:
    """How the cold starts and the memory came about."""
    started = {name: v for name, v in variants.items() if v["cold_start"]}
    if not started:
        return []
    starts = [v["cold_start"] for v in started.values()]
    n, tokens = starts[0]["load_seconds"]["n"], " or ".join(dict.fromkeys(str(start["tokens"]) for start in starts))
    dropped = all(start["page_cache_dropped"] for start in starts)
    cache = "the weights dropped from the page cache before" if dropped else "the page cache not dropped before"
    return [
        f"Load and first prefill ({tokens} tokens) are of a cold start: medians of {n}, each in a process of its own, "
        f"{cache}. Peak memory, after the longest prompt and decoding, is {_memory(started)}. KV cache: for the "
        "longest prompt and the tokens decoded, a hybrid's state included.",
        *([OF_COREML] if any(v["placement"] for v in started.values()) else []),
    ]


def _memory(started: Variants) -> str:
    """What was counted as peak memory; of which variants, where they differ."""
    by: dict[str, list[str]] = defaultdict(list)
    for name, v in started.items():
        by[v["memory_by"]].append(name)
    if len(by) == 1:
        return f"{MEMORY_IS[next(iter(by))]} ({next(iter(by))})"
    parts = [f"of {', '.join(names)} {MEMORY_IS[counted]} ({counted})" for counted, names in by.items()]
    return f"{'; '.join(parts)}; do not compare one with the other"
