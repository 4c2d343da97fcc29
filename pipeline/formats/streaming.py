"""Checkpoint -> tensors at their place in a file, in one pass: threads read blocks of rows, encode and write them.

Memory stays at a few blocks however large the checkpoint is.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from pipeline.cores import usable_cores
from pipeline.errors import OutputError, QuantizationError, listed
from pipeline.progress import Advance
from pipeline.types import Planned

BLOCK_WEIGHTS = 1 << 19  # of one job: 2 MB of float32 stay in a core's cache share

BATCH_JOBS = 256


@dataclass(frozen=True)
class Rows:
    """Rows [start, start + count) of a tensor; a vector is one row."""

    planned: Planned
    start: int
    count: int


Encode = Callable[[Rows], None]
"""Reads rows, encodes and writes them. Called from several threads.

Raises QuantizationError: weights that cannot be encoded.
"""


@dataclass(frozen=True)
class _Done:
    rows: Rows
    problem: QuantizationError | None = None


def encode_all(
    source: Path, planned: Iterable[Planned], encode: Encode, advance: Advance, spare: int = 0, multiple: int = 1
) -> None:
    """Have every tensor encoded, block by block; `advance` is told of weights done. `source` is for errors.

    A thread works for each core, and `spare` more where `encode` waits for threads of its own. Blocks begin at rows
    that are multiples of `multiple`.

    Raises:
        QuantizationError: what `encode` raised, all tensors listed.
    """

    def work(rows: Rows) -> _Done:
        try:
            encode(rows)
        except QuantizationError as error:  # collected: all tensors are named in one error below
            return _Done(rows, error)
        return _Done(rows)

    problems: dict[str, QuantizationError] = {}  # of each tensor the first, with the weights of all like it
    jobs = _jobs(planned, multiple)
    with ThreadPoolExecutor(usable_cores() + spare) as threads:
        try:
            while batch := list(islice(jobs, BATCH_JOBS)):  # a batch at a time: 27B weights are 50,000 jobs
                for done in threads.map(work, batch):
                    advance(done.rows.count * done.rows.planned.tensor.shape[-1])
                    if done.problem is not None:
                        _collect(problems, done.rows.planned.tensor.name, done.problem)
        except BaseException:
            threads.shutdown(cancel_futures=True)
            raise
    if problems:
        lines = [f"{name}: {problem}{_counted(problem.weights)}" for name, problem in problems.items()]
        raise QuantizationError(
            f"{source} cannot be encoded:\n{listed(lines)}\n"
            "Repair the checkpoint; weights that are only too large or too small fit bf16."
        )


def _jobs(planned: Iterable[Planned], multiple: int) -> Iterator[Rows]:
    for p in planned:
        rows = p.tensor.rows
        step = max(1, BLOCK_WEIGHTS // p.tensor.shape[-1] // multiple) * multiple
        for start in range(0, rows, step):
            yield Rows(p, start, min(step, rows - start))


def _collect(problems: dict[str, QuantizationError], name: str, problem: QuantizationError) -> None:
    first = problems.setdefault(name, problem)
    if first is not problem and str(first) == str(problem):
        problems[name] = QuantizationError(str(first), first.weights + problem.weights)


def _counted(weights: int) -> str:
    return f" ({weights} of them)" if weights else ""


def check_disk(folder: Path, needed: int) -> None:
    """Raises: OutputError: less than `needed` bytes are free where `folder` lies."""
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{folder.parent}: the artifact needs {needed / 1e6:.0f} MB, {free / 1e6:.0f} MB are free. Make room."
        )


@contextmanager
def opened(path: Path, length: int) -> Iterator[int]:
    """The descriptor of a file that gets its whole length at once, to be filled by `pwrite`."""
    descriptor = os.open(path, os.O_WRONLY)
    try:
        os.truncate(path, length)
        yield descriptor
    finally:
        os.close(descriptor)


def pwrite(descriptor: int, array: NDArray[Any], offset: int) -> None:
    """All bytes of an array at `offset`."""
    data = memoryview(array.data).cast("B")
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written
