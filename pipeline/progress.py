"""Progress of long work: a bar on a terminal, plain lines elsewhere, always on standard error."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Advance = Callable[[float], None]
"""Called with how much more is done."""

Say = Callable[[str], None]
"""Called with how things stand."""

LINE_EVERY = 15.0  # seconds


def silent(done: float) -> None:
    """For callers who want no progress."""


@contextmanager
def progress(title: str, total: float) -> Iterator[Advance]:
    """Shows how much of `total` is done until the block ends."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

        columns = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn(), TimeRemainingColumn())
        with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
            task = bar.add_task(title, total=total)
            yield lambda done: bar.advance(task, done)
    else:
        yield _lines(title, total)


def _lines(title: str, total: float) -> Advance:
    done, said = 0.0, time.monotonic()

    def advance(more: float) -> None:
        nonlocal done, said
        done += more
        if time.monotonic() - said >= LINE_EVERY:
            said = time.monotonic()
            print(f"{title}: {done / total:.0%}", file=sys.stderr, flush=True)

    return advance


@contextmanager
def saying(title: str) -> Iterator[Say]:
    """Shows how work stands whose end is not known, until the block ends."""
    if sys.stderr.isatty():
        from rich.console import Console
        from rich.markup import escape

        with Console(stderr=True).status(escape(title)) as status:
            yield lambda text: status.update(escape(f"{title}: {text}"))
    else:
        said = time.monotonic()

        def say(text: str) -> None:
            nonlocal said
            if time.monotonic() - said >= LINE_EVERY:
                said = time.monotonic()
                print(f"{title}: {text}", file=sys.stderr, flush=True)

        yield say
