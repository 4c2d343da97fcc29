"""Prefill and decode times: variants side by side, rounds in rotated order, every sample kept."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MeasurementError
from pipeline.metrics.stats import interval_json, median_interval
from pipeline.metrics.trends import mann_kendall_p, theil_sen_slope
from pipeline.progress import Advance, silent
from pipeline.runtimes import Runtime
from pipeline.types import Engine, Interval

AGREEMENT = 0.05  # two warm-up rounds closer than this end the warm-up
WARM_UP_ROUNDS = 10  # at most
BUSY = 0.85  # CPU time over wall × threads: below it something else had the cores
REPEATS = 3  # of a disturbed round, at most
DRIFT = 0.05  # a change of speed from the first to the last round beyond this is a drift
DRIFT_P = 0.05  # where chance gives a trend as clear as this less often


@dataclass(frozen=True)
class Task:
    """Prefill of `tokens`, or decode of `tokens` behind a prompt of `behind`, whose prefill is not counted."""

    kind: str
    tokens: int
    behind: int = 0


@dataclass
class Samples:
    """Seconds by task, in order of rounds, and the rounds that stayed disturbed."""

    seconds: dict[Task, list[float]] = field(default_factory=dict)
    disturbed: dict[Task, list[int]] = field(default_factory=dict)
    warm_up: dict[Task, list[float]] = field(default_factory=dict)

    def add(self, later: Samples) -> None:
        """Append what a later visit measured; its rounds are counted on."""
        for task, seconds in later.seconds.items():
            mine = self.seconds.setdefault(task, [])
            if task in later.disturbed:
                self.disturbed.setdefault(task, []).extend(len(mine) + at for at in later.disturbed[task])
            mine.extend(seconds)
        for task, seconds in later.warm_up.items():
            self.warm_up.setdefault(task, []).extend(seconds)


@dataclass(frozen=True)
class Drift:
    """How far the speed went from the first to the last round, as a share of its median (negative: slower), and how
    often chance alone shows as clear a trend.
    """

    share: float
    p_value: float

    @property
    def drifted(self) -> bool:
        return abs(self.share) > DRIFT and self.p_value < DRIFT_P


class Prompts:
    """Prompts of random ids, no two alike, the same in every run; after `given` others that went before."""

    def __init__(self, vocab_size: int, given: int = 0) -> None:
        self._rng = np.random.default_rng(given)
        self._vocab_size = vocab_size
        self.given = given

    def next(self, length: int) -> NDArray[np.int32]:
        ids = self._rng.integers(0, self._vocab_size, length).astype(np.int32)
        ids[0] = self.given % self._vocab_size  # short prompts would repeat by chance
        self.given += 1
        return ids


def tasks_of(prompt_lengths: Sequence[int], decode: int) -> list[Task]:
    """What a visit does: prefill every length, the shortest first, and decode behind the shortest."""
    lengths = sorted(set(prompt_lengths))
    return [*(Task("prefill", length) for length in lengths), Task("decode", decode, behind=lengths[0])]


def rotated(names: Sequence[str], rounds: int) -> Iterator[str]:
    """Whom interleaved rounds visit: a b c, b c a, c a b, …"""
    for round_number in range(rounds):
        turn = round_number % len(names)
        yield from [*names[turn:], *names[:turn]]


def measure(
    runtimes: Mapping[str, Runtime],
    tasks: Mapping[str, Sequence[Task]],
    rounds: int,
    prompts: Prompts | None = None,
    advance: Advance = silent,
) -> dict[str, Samples]:
    """Do the tasks of every runtime in `rounds` interleaved rounds; `advance` is told of each visit.

    Each prompt is one that no cache has seen.

    Raises:
        MeasurementError: a time that is zero, negative or infinite.
    """
    prompts = prompts or Prompts(min(runtime.vocab_size for runtime in runtimes.values()))
    for runtime in runtimes.values():
        engine_of(runtime)  # loaded now, where it loads late
    samples = {name: Samples() for name in runtimes}
    for name in runtimes:
        for task in tasks[name]:
            _warm_up(runtimes[name], samples[name], task, prompts)
        advance(1)
    for name in rotated([*runtimes], rounds):
        for task in tasks[name]:
            found, (seconds, disturbed) = samples[name], _undisturbed(runtimes[name], task, prompts)
            if disturbed:
                found.disturbed.setdefault(task, []).append(len(found.seconds.get(task, [])))
            found.seconds.setdefault(task, []).append(seconds)
        advance(1)
    return samples


def engine_of(runtime: Runtime) -> Engine:
    """What computes a prefill and a decode: the artifact's own runtime, which need not be the one that scores."""
    return (runtime.native or runtime).engine


def run(runtime: Runtime, task: Task, prompts: Prompts) -> float:
    """Seconds of one task.

    Raises:
        MeasurementError: a time that is zero, negative or infinite.
    """
    if task.kind == "decode":
        runtime.prefill(prompts.next(task.behind))
        seconds = runtime.decode(task.tokens)
    else:
        seconds = runtime.prefill(prompts.next(task.tokens))
    if not (0 < seconds < math.inf):
        raise MeasurementError(
            f"{task.kind} of {task.tokens} tokens took {seconds} seconds, which cannot be: was a prompt cached?"
        )
    return seconds


def _warm_up(runtime: Runtime, samples: Samples, task: Task, prompts: Prompts) -> None:
    """Repeat the task until its last two times agree, at most WARM_UP_ROUNDS times."""
    times = samples.warm_up.setdefault(task, [])
    while not _agree(times) and len(times) < WARM_UP_ROUNDS:
        times.append(run(runtime, task, prompts))


def _agree(times: list[float]) -> bool:
    return len(times) > 1 and abs(times[-1] - times[-2]) <= AGREEMENT * min(times[-2:])


def _undisturbed(runtime: Runtime, task: Task, prompts: Prompts) -> tuple[float, bool]:
    """Seconds of the task, repeated while something else has the cores; and whether it stayed so."""
    seconds = 0.0
    for _ in range(1 + REPEATS):
        begin, cpu = time.perf_counter(), time.process_time()
        seconds = run(runtime, task, prompts)
        wall = time.perf_counter() - begin
        engine = engine_of(runtime)
        told = engine.device == "cpu" and engine.threads  # else CPU time says nothing
        if not told or time.process_time() - cpu >= BUSY * wall * told:
            return seconds, False
    return seconds, True


def as_json(samples: Samples) -> dict[str, dict[str, Any]]:
    """Prefill and decode by tokens: the raw seconds, the rate in tokens per second and how it drifted."""
    return {
        kind: {str(task.tokens): _figures(samples, task) for task in samples.seconds if task.kind == kind}
        for kind in ("prefill", "decode")
    }


def _figures(samples: Samples, task: Task) -> dict[str, Any]:
    seconds = samples.seconds[task]
    drift = drift_of(seconds)
    return {
        "seconds": seconds,
        "warm_up_seconds": samples.warm_up[task],
        "disturbed_rounds": samples.disturbed.get(task, []),
        "tokens_per_second": interval_json(rate_of(seconds, task.tokens)),
        "drift": {"value": drift.share, "p_value": drift.p_value, "drifted": drift.drifted},
    }


def rate_of(seconds: Sequence[float], tokens: int) -> Interval:
    """Median tokens per second with the interval of its order statistics."""
    return median_interval([tokens / s for s in seconds])


def drift_of(seconds: Sequence[float]) -> Drift:
    """Drift of the speed over rounds of one task: Theil-Sen slope times the rounds between first and last, over the
    median; its p-value is Mann-Kendall's. A single round has none.
    """
    if len(seconds) < 2:
        return Drift(0.0, 1.0)
    speeds = [1 / s for s in seconds]
    return Drift(theil_sen_slope(speeds) * (len(speeds) - 1) / float(np.median(speeds)), mann_kendall_p(speeds))
