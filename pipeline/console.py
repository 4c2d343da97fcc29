"""How a command line fails: a PipelineError is shown without a traceback, exit code 2; a signal leaves nothing half."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from io import TextIOWrapper
from types import FrameType
from typing import Any

import click

from pipeline.errors import PipelineError, unreadable

BAD_INPUT = 2
GATE_FAILED = 1


@contextmanager
def _shown() -> Iterator[None]:
    try:
        yield
    except PipelineError as error:
        raise _BadInput(str(error)) from error
    except OSError as error:  # of a path on the way to a file, such as a folder that may not be entered
        if not isinstance(error.filename, str | bytes):
            raise
        raise _BadInput(f"{os.fsdecode(error.filename)}: {error.strerror}. {unreadable(error)}") from error


def _print_all() -> None:
    """A letter that the terminal's encoding lacks, or a path's byte that is no letter, is shown as an escape."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


@contextmanager
def _stoppable() -> Iterator[None]:
    """SIGTERM, by which CI cancels, and SIGHUP end the process as Ctrl-C does: what is half written is removed."""
    if threading.current_thread() is not threading.main_thread():  # Python lets no other thread set handlers
        yield
        return
    old = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    caught = [number for number, handler in old.items() if handler is signal.SIG_DFL]  # nohup ignores SIGHUP
    for number in caught:
        signal.signal(number, _stop)
    try:
        yield
    finally:
        for number in caught:
            signal.signal(number, signal.SIG_DFL)


def _stop(number: int, frame: FrameType | None) -> None:
    sys.exit(128 + number)  # what a shell reports of a process that the signal killed


class _BadInput(click.ClickException):
    exit_code = BAD_INPUT


class Command(click.Command):
    def invoke(self, ctx: click.Context) -> Any:
        _print_all()
        with _stoppable(), _shown():
            return super().invoke(ctx)


class Group(click.Group):
    command_class = Command
