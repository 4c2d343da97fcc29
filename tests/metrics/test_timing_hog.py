"""A real engine on real cores, which other work takes half way."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import pytest

from pipeline.cores import usable_cores
from pipeline.formats.gguf.run import open_runtime
from pipeline.formats.gguf.write import write
from pipeline.metrics.timing import as_json, measure, tasks_of
from pipeline.source.checkpoint import Checkpoint

ROUNDS = 8
SPIN = "import time\nend = time.monotonic() + 60\nwhile time.monotonic() < end: pass"


@contextmanager
def hog() -> Iterator[None]:
    """Twice as many busy processes as there are cores, which leave one thread two fifths of a core or less."""
    processes = [subprocess.Popen([sys.executable, "-c", SPIN]) for _ in range(2 * usable_cores())]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
        for process in processes:
            process.wait()


@pytest.mark.slow
def test_rounds_in_which_other_work_takes_the_cores_are_marked(tiny: Path, tmp_path: Path) -> None:
    """One thread: two that wait for each other would take minutes beside the hog."""
    with Checkpoint(tiny) as checkpoint:
        artifact = write(checkpoint, "bf16", tmp_path)
    visits = 0  # the first is the warm-up
    with ExitStack() as stack:

        def advance(done: float) -> None:
            nonlocal visits
            visits += 1
            if visits == 1 + ROUNDS // 2:
                stack.enter_context(hog())

        runtime = stack.enter_context(closing(open_runtime(tmp_path, artifact, context=132, threads=1, device="cpu")))
        samples = measure({"a": runtime}, {"a": tasks_of([128], 4)}, ROUNDS, advance=advance)["a"]
    marked = as_json(samples)["prefill"]["128"]["disturbed_rounds"]
    hogged = [at for at in marked if at >= ROUNDS // 2]
    quiet = [at for at in marked if at < ROUNDS // 2]
    assert len(hogged) >= 3  # of 4
    assert len(quiet) < len(hogged)
