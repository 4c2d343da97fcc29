"""A function called in a process of its own, which ends with its caller whatever ends that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from pipeline.errors import MeasurementError, PipelineError

T = TypeVar("T")


def in_own_process(what: str, function: Callable[..., T], *args: Any) -> T:
    """`function(*args)` in a new Python process; function, arguments and result are pickled.

    The process is spawned, never forked: llama.cpp's threads and locks would be copied half way.

    Raises:
        PipelineError: what the function raised.
        MeasurementError: the process died; `what` names it.
    """
    context = multiprocessing.get_context("spawn")
    receiving, sending = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(sending, function, args), daemon=True)
    with receiving:
        try:
            with sending:
                _start(process)
            try:
                found, value = receiving.recv()
            except EOFError:
                process.join()
                raise MeasurementError(f"{what}: {_cause(process.exitcode)}") from None
            process.join()
        finally:
            if process.pid is not None:
                process.kill()  # Ctrl-C came: nobody waits for it any more
                process.join()
    if not found:
        raise value
    result: T = value
    return result


def _start(process: BaseProcess) -> None:
    """Start a process that Ctrl-C on the terminal does not reach: its caller ends it."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()  # which inherits the mask
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(sending: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        answer = (True, function(*args))
    except PipelineError as error:
        answer = (False, error)
    sending.send(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _cause(exitcode: int | None) -> str:
    """Why a process gave no answer, and what to do."""
    if exitcode == -signal.SIGKILL:
        return (
            "its process was killed (signal 9). If memory was short, free some, or take a smaller artifact or a "
            "shorter context."
        )
    if exitcode is not None and exitcode < 0:
        return f"its process died of signal {-exitcode} ({signal.strsignal(-exitcode)}). See above what it said."
    return f"its process ended with exit code {exitcode} and no answer. See above what it said."
