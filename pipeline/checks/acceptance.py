"""What `quantgate baseline accept` does to a baseline, and what a run is beside one, as data."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline import paths
from pipeline.checks import record
from pipeline.checks.baseline import Baseline, of_engine
from pipeline.checks.differences import Difference, another, compare, incomparable
from pipeline.checks.identity import IDENTITY, mapping, shown
from pipeline.checks.record import ENGINE, Record, engine_key
from pipeline.files import read_object
from pipeline.metrics.machine import short_id

NEW, SAME, CHANGED, NOT_COMPARABLE, DROPPED, ABSENT = "new", "same", "changed", "not comparable", "dropped", "absent"


@dataclass(frozen=True)
class Change:
    """What becomes of one record, or what a run is beside it: one of the words above, and why, with what differs.

    NEW: there is no record by this engine. DROPPED: it is no longer kept. ABSENT: this run has none.
    """

    variant: str
    what: str
    record: Record | None
    reason: str = ""
    difference: Difference | None = None


def problems(
    names: Iterable[str],
    asked: Mapping[str, Mapping[str, str]],
    corpus: Mapping[str, Any],
    root: Path,
    checkpoint: str | None = None,
) -> list[str]:
    """Why the figures that the stages left are not those of params.yaml; empty where all of them are.

    `asked` is the format, and the scheme or path, of each variant, `corpus` its name, windows and context: None for
    what params.yaml leaves open. `checkpoint` is its folder or Hub id.

    Raises:
        PipelineError: a file that cannot be read, or is not as this version writes it.
    """
    place = root / paths.REFERENCE / "meta.json"
    reference = read_object(place) if place.is_file() else {}
    stale = [] if checkpoint is None or not reference else _stale(reference, checkpoint)
    return stale + [
        f"{name}: {problem}" for name in names for problem in _problems(name, asked[name], corpus, reference, root)
    ]


def _stale(reference: Mapping[str, Any], checkpoint: str) -> list[str]:
    """Why the reference is not of the checkpoint that params.yaml names: a Hub id or a folder's name."""
    name = mapping(reference, "source").get("name")
    if name in {checkpoint, Path(checkpoint).resolve().name}:
        return []
    return [f"the reference is of the checkpoint {name}, params.yaml says {checkpoint}: run dvc repro"]


def _problems(
    name: str, asked: Mapping[str, str], corpus: Mapping[str, Any], reference: Mapping[str, Any], root: Path
) -> Iterator[str]:
    if problem := record.problem(name, root):
        yield problem
        return
    found = record.read(name, root)
    for key, wanted in asked.items():
        if (is_now := getattr(found, key)) != wanted:
            yield f"it was measured as {is_now}, params.yaml says {wanted}: run dvc repro"
    for key, wanted in corpus.items():
        if wanted is not None and found.identity[key] != wanted:
            yield f"its {key} is {found.identity[key]}, params.yaml says {wanted}: run dvc repro"
    for key in IDENTITY:
        if found.identity[key] != reference.get(key):
            expected, is_now = shown(reference.get(key)), shown(found.identity[key])
            yield f"its {key} is not the reference's: expected {expected}, found {is_now}; run dvc repro"


def accept(
    baseline: Baseline, records: Mapping[str, Record], names: Sequence[str]
) -> tuple[Baseline, tuple[Change, ...]]:
    """The baseline with the records of this run, and what that does to each of them.

    A record takes the place of the one by the same engine, whatever its version: a repository pins one. Those by other
    engines, or of other instruction sets, stay beside it as long as they can be compared with it. Variants that are
    none of `names`, those of params.yaml, are dropped, and with them their speeds.
    """
    changes: list[Change] = []
    kept: dict[str, tuple[Record, ...]] = {}
    for name in names:
        before = baseline.records.get(name, ())
        if name not in records:
            kept[name] = before
            continue
        now, stay = records[name], []
        changes.append(_accepted(name, now, before))
        for old in before:
            if _place(old) == _place(now):
                continue
            if apart := incomparable(now, old):
                changes.append(Change(name, DROPPED, old, f"of {another(apart)} than is accepted now"))
            else:
                stay.append(old)
        kept[name] = tuple(sorted([now, *stay], key=lambda record: engine_key(record.engine)))
    for name, before in baseline.records.items():
        if name not in names:
            changes += [Change(name, DROPPED, old, "params.yaml has no such variant") for old in before]
    speeds = {
        machine: {**speed, "variants": {n: timed for n, timed in speed["variants"].items() if n in names}}
        for machine, speed in baseline.speeds.items()
    }
    return Baseline({name: found for name, found in kept.items() if found}, speeds), tuple(changes)


def _accepted(name: str, now: Record, before: Iterable[Record]) -> Change:
    then = next((old for old in before if _place(old) == _place(now)), None)
    if then is None:
        return Change(name, NEW, now)
    if engine_key(then.engine) != engine_key(now.engine):
        reason = f"engine {then.engine['version']} -> {now.engine['version']}"
        return Change(name, CHANGED, now, reason, compare(now, then))
    return _beside(name, now, then)


def _beside(name: str, now: Record, then: Record) -> Change:
    found = compare(now, then)
    what = NOT_COMPARABLE if found.apart else CHANGED if found.is_change else SAME
    return Change(name, what, now, "", found)


def beside(
    baseline: Baseline, records: Mapping[str, Record], names: Iterable[str], known: Sequence[str]
) -> tuple[Change, ...]:
    """What this run's records of `names` are beside the accepted ones; `known` are the variants of params.yaml."""
    changes = []
    for name in names:
        accepted, now = baseline.records.get(name, ()), records.get(name)
        if now is None:
            changes.append(Change(name, ABSENT, None, "this run has no record of it"))
        elif (then := of_engine(accepted, now)) is None:
            reason = "accepted by another engine only" if accepted else "never accepted"
            changes.append(Change(name, NEW, now, reason))
        else:
            changes.append(_beside(name, now, then))
    for name, records_of in baseline.records.items():
        if name not in known:
            changes += [Change(name, DROPPED, old, "params.yaml has no such variant") for old in records_of]
    return tuple(changes)


def _place(record: Record) -> tuple[str, ...]:
    """An engine whatever its version."""
    return tuple(str(record.engine[key]) for key in ENGINE if key != "version")


# Speeds


TIMED = ("prefill", "decode")


def speed_problems(names: Iterable[str], measurements: Mapping[str, Any], root: Path) -> list[str]:
    """Why measurements.json has no speeds of these artifacts; empty where it has, or says why nothing was timed.

    Raises:
        PipelineError: an artifact.json is absent or broken.
    """
    found = []
    for name in names:
        measured = measurements["variants"].get(name)
        artifact = read_object(root / paths.variant(name) / "artifact.json")
        if measured is None or measured["tensors_sha256"] != artifact["tensors_sha256"]:
            found.append(f"{name}: {paths.MEASUREMENTS} is of another artifact: run dvc repro")
    return found


def accept_speeds(
    baseline: Baseline, measurements: Mapping[str, Any], names: Iterable[str]
) -> tuple[Baseline, tuple[str, ...], tuple[str, ...]]:
    """The baseline with the speeds of this machine, the variants that got one, and those whose earlier ones it drops:
    they were timed with other settings or another power source.
    """
    machine = measurements["machine"]
    then = baseline.speeds.get(short_id(machine))
    head = {key: measurements[key] for key in ("machine", "power_source", "timing")}
    variants = measurements["variants"]
    timed = {name: _speed(variants[name]) for name in names if _is_timed(variants[name])}
    kept = then["variants"] if then and all(then[key] == head[key] for key in head) else {}
    dropped = tuple(name for name in (then["variants"] if then else {}) if name not in {**kept, **timed})
    speeds = {**baseline.speeds, short_id(machine): {**head, "variants": {**kept, **timed}}}
    return replace(baseline, speeds=speeds), tuple(timed), dropped


def _is_timed(variant: Mapping[str, Any]) -> bool:
    """It has a speed that a user would have."""
    return variant["unrepresentative"] is None and any(variant[kind] for kind in TIMED)


def _speed(variant: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "tensors": variant["tensors_sha256"],
        "engine": variant["timing_engine"],
        **{kind: variant[kind] for kind in TIMED},
    }
