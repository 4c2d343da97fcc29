"""Prefill and decode times: variants side by side, rounds in rotated order, every sample kept."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MeasurementError
from pipeline.metrics.stats import interval_json, median_interval
from pipeline.progress import Advance, silent
from pipeline.types import Interval, Runtime

AGREEMENT = 0.05  # two warm-up rounds closer than this end the warm-up
WARM_UP_ROUNDS = 10  # at most
BUSY = 0.85  # CPU time over wall × threads: below it something else had the cores
REPEATS = 3  # of a disturbed round, at most


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


def measure(
    runtimes: Mapping[str, Runtime],
    *,
    prompt_lengths: Sequence[int],
    decode: int,
    rounds: int,
    advance: Advance = silent,
) -> dict[str, Samples]:
    """Time every runtime in `rounds` interleaved rounds; `advance` is told of each visit.

    A visit prefills every length in order and decodes behind the shortest. Each prompt is one that no cache has seen.

    Raises:
        MeasurementError: a time that is zero, negative or infinite.
    """
    prompts = _Prompts(min(runtime.vocab_size for runtime in runtimes.values()))
    samples = {name: Samples() for name in runtimes}
    order = list(runtimes)
    lengths = sorted(set(prompt_lengths))
    tasks = [*(Task("prefill", length) for length in lengths), Task("decode", decode, behind=lengths[0])]
    for name in order:
        for task in tasks:
            _warm_up(runtimes[name], samples[name], task, prompts)
        advance(1)
    for round_number in range(rounds):
        turn = round_number % len(order)
        for name in order[turn:] + order[:turn]:
            for task in tasks:
                seconds, disturbed = _undisturbed(runtimes[name], task, prompts)
                samples[name].seconds.setdefault(task, []).append(seconds)
                if disturbed:
                    samples[name].disturbed.setdefault(task, []).append(round_number)
            advance(1)
    return samples


class _Prompts:
    """Prompts of random ids, no two alike, the same in every run."""

    def __init__(self, vocab_size: int) -> None:
        self._rng = np.random.default_rng(0)
        self._vocab_size = vocab_size
        self._given = 0

    def next(self, length: int) -> NDArray[np.int32]:
        ids = self._rng.integers(0, self._vocab_size, length).astype(np.int32)
        ids[0] = self._given % self._vocab_size  # short prompts would repeat by chance
        self._given += 1
        return ids


def _run(runtime: Runtime, task: Task, prompts: _Prompts) -> float:
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


def _warm_up(runtime: Runtime, samples: Samples, task: Task, prompts: _Prompts) -> None:
    """Repeat the task until its last two times agree, at most WARM_UP_ROUNDS times."""
    times = samples.warm_up.setdefault(task, [])
    while not _agree(times) and len(times) < WARM_UP_ROUNDS:
        times.append(_run(runtime, task, prompts))


def _agree(times: list[float]) -> bool:
    return len(times) > 1 and abs(times[-1] - times[-2]) <= AGREEMENT * min(times[-2:])


def _undisturbed(runtime: Runtime, task: Task, prompts: _Prompts) -> tuple[float, bool]:
    """Seconds of the task, repeated while something else has the cores; and whether it stayed so."""
    seconds = 0.0
    for _ in range(1 + REPEATS):
        begin, cpu = time.perf_counter(), time.process_time()
        seconds = _run(runtime, task, prompts)
        wall = time.perf_counter() - begin
        on_gpu = runtime.engine.device != "cpu"  # CPU time says nothing then
        if on_gpu or time.process_time() - cpu >= BUSY * wall * runtime.engine.threads:
            return seconds, False
    return seconds, True


def as_json(samples: Mapping[str, Samples], engines: Mapping[str, Any]) -> dict[str, Any]:
    """Variant -> engine, and per task the raw seconds and the rate in tokens per second."""
    return {
        name: {
            "engine": engines[name],
            "prefill": {str(task.tokens): _figures(of, task) for task in of.seconds if task.kind == "prefill"},
            "decode": {str(task.tokens): _figures(of, task) for task in of.seconds if task.kind == "decode"},
        }
        for name, of in samples.items()
    }


def _figures(samples: Samples, task: Task) -> dict[str, Any]:
    seconds = samples.seconds[task]
    return {
        "seconds": seconds,
        "warm_up_seconds": samples.warm_up[task],
        "disturbed_rounds": samples.disturbed.get(task, []),
        "tokens_per_second": interval_json(rate_of(seconds, task.tokens)),
    }


def rate_of(seconds: Sequence[float], tokens: int) -> Interval:
    """Median tokens per second with the interval of its order statistics."""
    return median_interval([tokens / s for s in seconds])
