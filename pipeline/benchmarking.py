"""Artifact folders timed side by side or one at a time: what the stage `benchmark` and the command line both do."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from functools import reduce
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any

from pipeline import artifact as artifacts
from pipeline.errors import MeasurementError, ParamsError
from pipeline.formats import room
from pipeline.metrics import machine, timing
from pipeline.metrics.timing import Samples
from pipeline.metrics.visits import PASSES, ColdStart, Opening, cold_start, there_and_back, visit
from pipeline.processes import in_own_process
from pipeline.progress import progress
from pipeline.runtimes import Placement, Runtime
from pipeline.types import Engine

COLD_STARTS = 3  # of each artifact
ROUNDS_OF_NO_USER = 3  # of an artifact whose speed here says nothing: enough to see that it runs
MEMORY = ("peak_memory_bytes", "memory_by", "kv_bytes")


@dataclass(frozen=True)
class Timed:
    """Samples and engine of each variant, and whom the rounds visited, in order: those whose speed is a user's, where
    there are any.
    """

    order: str = "interleaved"  # or abba
    visits: list[str] = field(default_factory=list)
    rounds_per_visit: int = 1
    samples: dict[str, Samples] = field(default_factory=dict)
    engines: dict[str, Engine] = field(default_factory=dict)
    placements: dict[str, Placement | None] = field(default_factory=dict)

    def and_then(self, later: Timed) -> Timed:
        """With the samples of others, which were timed behind these."""
        return replace(
            self,
            samples=self.samples | later.samples,
            engines=self.engines | later.engines,
            placements=self.placements | later.placements,
        )


def named(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders by their names.

    Raises:
        ParamsError: two bear the same name.
    """
    by_name = {folder.resolve().name: folder for folder in folders}
    if len(by_name) < len(folders):
        raise ParamsError("two artifacts bear the same folder name: rename one, so that the table can tell them apart.")
    return by_name


def benchmark_folders(
    folders: Mapping[str, Path],
    prompt_lengths: Sequence[int],
    decode: int,
    rounds: int,
    settings: Mapping[str, Any],
    overrides: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> dict[str, Any]:
    """speed.json: machine, settings, and of each artifact the raw samples, rates, cold start and memory.

    `settings` are device, threads, flash_attention and kv_type of the params' `benchmark`, `overrides` those in which
    an artifact differs, by name. Artifacts stay loaded side by side while their files are less than half of memory;
    else each has a process of its own, one at a time. Where a format's runtime says that its speed here is no user's,
    only the shortest prompt and decoding are timed, in fewer rounds, and after the others, which it shall not disturb.
    Where it says that nothing can be timed here, an artifact is not opened.

    Raises:
        ParamsError: settings that a format does not have.
        MeasurementError: no prompt length fits the context of an artifact, a process of its own died, or a time that
            cannot be.
    """
    loaded = {name: artifacts.load(folder) for name, folder in folders.items()}
    openings, left_out = {}, {}
    reasons: dict[str, str | None] = {}
    for name, artifact in loaded.items():
        run, own = room(artifact.format, "run"), {**settings, **overrides.get(name, {})}
        flash = own["flash_attention"]
        own["flash_attention"] = None if flash == "auto" else flash
        run.check_settings(own["kv_type"], own["flash_attention"], own["device"])
        if (reason := run.unmeasurable()) is not None:
            reasons[name], left_out[name] = None, dict.fromkeys(_asked(prompt_lengths, decode), reason)
            continue
        reasons[name] = run.unrepresentative(own["device"])
        opening = Opening(artifacts.location(folders[name], artifact), artifact, tuple(prompt_lengths), decode, own)
        openings[name], left_out[name] = _fitted(name, opening, reasons[name])
    users = {name: opening for name, opening in openings.items() if reasons[name] is None}
    others = {name: opening for name, opening in openings.items() if name not in users}
    cold = _cold_starts(users)  # first: a file that is mapped stays in the page cache
    parts = [(users, rounds), (others, min(rounds, ROUNDS_OF_NO_USER))]
    first, *second = [_timed(part, count) for part, count in parts if part] or [Timed()]
    timed = reduce(Timed.and_then, second, first)
    return {
        "machine": machine.fingerprint(),
        "power_source": machine.power_source(),
        "settings": {"prompt_lengths": list(prompt_lengths), "decode": decode, "rounds": rounds, **settings},
        "order": timed.order,
        "visits": timed.visits,
        "rounds_per_visit": timed.rounds_per_visit,
        "variants": {
            name: {
                "artifact": loaded[name].files,
                "engine": asdict(timed.engines[name]) if name in timed.engines else None,
                "placement": timed.placements.get(name),
                **timing.as_json(timed.samples.get(name, Samples())),
                "unrepresentative": reasons[name],
                "not_measured": left_out[name],
                **_cold_json(cold.get(name, [])),
            }
            for name in loaded
        },
    }


def _asked(lengths: Sequence[int], decode: int) -> list[str]:
    """The tasks by the names of speed.json."""
    return [*(f"prefill {length}" for length in sorted({*lengths})), f"decode {decode}"]


def _timed(openings: Mapping[str, Opening], rounds: int) -> Timed:
    if sum(opening.artifact.size_bytes for opening in openings.values()) < half_of_memory():
        return _side_by_side(openings, rounds)
    return _one_at_a_time(openings, rounds)


def half_of_memory() -> float:
    """Bytes that artifacts may take together to stay loaded side by side."""
    import psutil

    return float(psutil.virtual_memory().total) / 2


def _fitted(name: str, opening: Opening, unrepresentative: str | None) -> tuple[Opening, dict[str, str]]:
    """With those of its lengths that fit the artifact's context, and why the others are not measured."""
    lengths, decode = opening.prompt_lengths, opening.decode
    context = room(opening.artifact.format, "run").context_length(opening.folder, opening.artifact)
    fitting = tuple(length for length in lengths if length + decode <= context)
    if not fitting:
        raise MeasurementError(
            f"{name}: no prompt fits its context of {context} tokens: the shortest takes {min(lengths)} and "
            f"{decode} to decode. Ask for a shorter prompt or fewer tokens to decode."
        )
    beyond = f"with {decode} tokens to decode it is beyond its context of {context}"
    timed = fitting if unrepresentative is None else (min(fitting),)
    left_out = {
        f"prefill {length}": unrepresentative if unrepresentative and length in fitting else beyond
        for length in sorted({*lengths} - {*timed})
    }
    return replace(opening, prompt_lengths=timed), left_out


def _cold_starts(openings: Mapping[str, Opening]) -> dict[str, list[ColdStart]]:
    """Cold starts of each artifact; the last one goes on to measure memory."""
    found: dict[str, list[ColdStart]] = {name: [] for name in openings}
    with progress("cold starts", len(openings) * COLD_STARTS) as advance:
        for i in range(COLD_STARTS):
            for name, opening in openings.items():
                last = i == COLD_STARTS - 1
                found[name].append(in_own_process(f"{name}, cold start", cold_start, opening, last))
                advance(1)
    return found


def _side_by_side(openings: Mapping[str, Opening], rounds: int) -> Timed:
    with ExitStack() as stack:
        runtimes: dict[str, Runtime] = {}
        for name, opening in openings.items():
            runtimes[name] = opening.open()
            stack.callback(runtimes[name].close)
        placements = {name: runtime.placement() for name, runtime in runtimes.items()}  # it may fail: before long work
        tasks = {name: opening.tasks for name, opening in openings.items()}
        with progress("timing", len(runtimes) * (rounds + 1)) as advance:
            samples = timing.measure(runtimes, tasks, rounds, advance=advance)
        engines = {name: timing.engine_of(runtime) for name, runtime in runtimes.items()}
    return Timed("interleaved", [*timing.rotated([*openings], rounds)], 1, samples, engines, placements)


def _one_at_a_time(openings: Mapping[str, Opening], rounds: int) -> Timed:
    """Each visit in a process of its own, which has all of memory."""
    order, share = there_and_back([*openings]), math.ceil(rounds / PASSES)
    samples = {name: Samples() for name in openings}
    engines: dict[str, Engine] = {}
    placements: dict[str, Placement | None] = {}
    given = 0
    with progress("timing, one at a time", len(order)) as advance:
        for name in order:
            found = in_own_process(f"{name}, timing", visit, openings[name], share, given)
            samples[name].add(found.samples)
            engines[name], placements[name], given = found.engine, found.placement, found.given
            advance(1)
    return Timed("abba", order, share, samples, engines, placements)


def _cold_json(starts: Sequence[ColdStart]) -> dict[str, Any]:
    """Medians beside their samples; the memory of the process that went on. Nothing where there were none."""
    if not starts:
        return {"cold_start": {}, **dict.fromkeys(MEMORY)}
    return {
        "cold_start": {
            **{
                key: {"value": median(samples), "samples": samples}
                for key in ("load_seconds", "first_prefill_seconds")
                for samples in [[getattr(start, key) for start in starts]]
            },
            "tokens": starts[0].tokens,
            "page_cache_dropped": all(start.page_cache_dropped for start in starts),
        },
        **{key: getattr(starts[-1], key) for key in MEMORY},
    }
