"""What a process of its own does: a cold start, and a visit of a variant that is too large to stay loaded."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pipeline.formats import room
from pipeline.metrics import timing
from pipeline.metrics.memory import drop_from_page_cache, peak_rss_bytes
from pipeline.metrics.timing import Prompts, Samples, Task
from pipeline.runtimes import Placement, Runtime
from pipeline.types import Artifact, Engine

RESIDENT = "resident set"  # as `memory_by`

PASSES = 2  # forward and backward: a drift that grows evenly falls on every variant alike


@dataclass(frozen=True)
class Opening:
    """An artifact, what is timed of it, and how it is opened: `settings` are its runtime's."""

    folder: Path
    artifact: Artifact
    prompt_lengths: tuple[int, ...]
    decode: int
    settings: Mapping[str, Any]

    @property
    def tasks(self) -> list[Task]:
        return timing.tasks_of(self.prompt_lengths, self.decode)

    def open(self) -> Runtime:
        """The runtime, with room for the longest prompt and the tokens decoded.

        Raises:
            PipelineError: as the format's Runtime.
        """
        context = max(self.prompt_lengths) + self.decode
        opened: Runtime = room(self.artifact.format, "run").open_runtime(
            self.folder, self.artifact, context=context, **self.settings
        )
        return opened


@dataclass(frozen=True)
class ColdStart:
    """Seconds to open the runtime and of its first prefill, of `tokens`; whether the weights came from the disk.

    `peak_memory_bytes` and by what they were counted are None where the process did not go on to the longest prompt.
    """

    load_seconds: float
    first_prefill_seconds: float
    tokens: int
    page_cache_dropped: bool
    kv_bytes: int
    peak_memory_bytes: int | None = None
    memory_by: str | None = None


@dataclass(frozen=True)
class Visit:
    """What one visit measured, by which engine and compute units, and how many prompts were given so far."""

    samples: Samples
    engine: Engine
    placement: Placement | None
    given: int


def cold_start(opening: Opening, and_memory: bool) -> ColdStart:
    """Open an artifact that is not in memory, in a process that has opened nothing.

    With `and_memory` it then takes in the longest prompt and decodes, and says what memory that took at most.

    Raises:
        PipelineError: as the format's Runtime.
    """
    shortest, longest = min(opening.prompt_lengths), max(opening.prompt_lengths)
    room(opening.artifact.format, "run").context_length(opening.folder, opening.artifact)  # the engine itself is warm
    dropped = drop_from_page_cache([opening.folder / name for name in opening.artifact.files])
    begin = time.perf_counter()
    runtime = opening.open()
    load_seconds = time.perf_counter() - begin
    try:
        prompts = Prompts(runtime.vocab_size)
        first = timing.run(runtime, Task("prefill", shortest), prompts)
        start = ColdStart(load_seconds, first, shortest, dropped, runtime.kv_bytes)
        if not and_memory:
            return start
        timing.run(runtime, Task("decode", opening.decode, behind=longest), prompts)
        peak, by = runtime.peak_memory() or (peak_rss_bytes(), RESIDENT)
        return replace(start, peak_memory_bytes=peak, memory_by=by)
    finally:
        runtime.close()


def visit(opening: Opening, rounds: int, given: int) -> Visit:
    """Open the artifact, warm up, time `rounds` rounds and close it; `given` prompts were given before.

    Raises:
        PipelineError: as the format's Runtime.
        MeasurementError: as timing.measure.
    """
    runtime = opening.open()
    try:
        prompts, placement = Prompts(runtime.vocab_size, given), runtime.placement()
        (samples,) = timing.measure({"": runtime}, {"": opening.tasks}, rounds, prompts).values()
        return Visit(samples, timing.engine_of(runtime), placement, prompts.given)
    finally:
        runtime.close()


def there_and_back(names: Sequence[str]) -> list[str]:
    """Whom visits go to one at a time: a b c, c b a."""
    return [name for i in range(PASSES) for name in (names if i % 2 == 0 else reversed(names))]
