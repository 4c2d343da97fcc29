"""Functions called in processes of their own, which end with their caller whatever ends that."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.resource_tracker import ensure_running
from typing import Any, TypeVar

from pipeline.cores import usable_cores
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
            with sending, _unreached_by_ctrl_c():
                process.start()
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


@contextmanager
def workers(what: str) -> Iterator[Callable[..., Any]]:
    """`call(function, *args)` -> its result, computed by one of as many processes as there are cores: for work that
    threads would do one at a time, since it holds Python's lock. To be called from several threads.

    Raises:
        PipelineError: what a function raised, or a process died; `what` names it.
    """
    context = multiprocessing.get_context("spawn")
    others = {child.pid for child in multiprocessing.active_children()}
    with ProcessPoolExecutor(usable_cores(), context, _end_with_caller) as pool:

        def call(function: Callable[..., Any], *args: Any) -> Any:
            try:
                with _unreached_by_ctrl_c():
                    answer = pool.submit(function, *args)  # which may start a process
                return answer.result()
            except BrokenProcessPool as error:
                raise PipelineError(
                    f"{what}: a process of it died. If memory was short, free some, and run it again."
                ) from error

        try:
            yield call
        except BaseException:
            for child in multiprocessing.active_children():
                if child.pid not in others:
                    child.kill()  # nobody waits for what it computes any more
            raise


@contextmanager
def _unreached_by_ctrl_c() -> Iterator[None]:
    """A process that is started here does not hear of Ctrl-C on the terminal: its caller ends it."""
    ensure_running()  # which the first start would do, and unblock Ctrl-C before the process is there
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # the process inherits the mask
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _answer(sending: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    _end_with_caller()
    try:
        answer = (True, function(*args))
    except PipelineError as error:
        answer = (False, error)
    sending.send(answer)


def _end_with_caller() -> None:
    """From now on this process ends when the one that started it does."""
    threading.Thread(target=_end_with_parent, daemon=True).start()


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
