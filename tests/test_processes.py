"""A function in a process of its own: what it gives, raises and leaves when it or its caller is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psutil
import pytest

from pipeline.cores import usable_cores
from pipeline.errors import ArtifactError, MeasurementError, PipelineError, QuantizationError
from pipeline.processes import in_own_process, workers

ROOT = Path(__file__).parent.parent
CALLERS = (
    """
import time
from pipeline.processes import in_own_process
in_own_process("x", time.sleep, 60)
""",
    """
import threading, time
from contextlib import suppress
from pipeline.errors import PipelineError
from pipeline.processes import workers
def work(call):
    with suppress(PipelineError):
        call(time.sleep, 60)
if __name__ == "__main__":
    with workers("x") as call:
        thread = threading.Thread(target=work, args=(call,))
        thread.start()
        thread.join()
""",
)


def test_the_answer_comes_from_another_process() -> None:
    assert in_own_process("x", os.getpid) not in {os.getpid(), os.getppid()}
    assert in_own_process("x", divmod, 17, 5) == (3, 2)


def test_an_answer_larger_than_a_pipe_holds() -> None:
    assert in_own_process("x", bytes, 1_000_000) == bytes(1_000_000)


def refuse(name: str) -> None:
    raise ArtifactError(f"{name} is broken")


def test_a_pipeline_error_is_raised_here() -> None:
    with pytest.raises(ArtifactError, match="b is broken"):
        in_own_process("a", refuse, "b")


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (signal.SIGKILL, r"^a, timing: its process was killed \(signal 9\). If memory was short, free some"),
        (signal.SIGABRT, r"^a, timing: its process died of signal 6 \(Aborted\)"),
        (signal.SIGSEGV, r"^a, timing: its process died of signal 11 \(Segmentation fault\)"),
    ],
)
def test_a_process_that_dies_is_named_with_its_signal(number: int, said: str) -> None:
    with pytest.raises(MeasurementError, match=said):
        in_own_process("a, timing", signal.raise_signal, number)


def test_a_process_that_exits_is_named_with_its_code() -> None:
    with pytest.raises(MeasurementError, match="a: its process ended with exit code 7 and no answer"):
        in_own_process("a", os._exit, 7)


def test_an_unforeseen_error_shows_its_traceback(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MeasurementError, match="exit code 1"):
        in_own_process("a", int, "x")
    assert "ValueError: invalid literal" in capfd.readouterr().err


def process_of(seconds: float) -> int:
    time.sleep(seconds)
    return os.getpid()


def miscount(weights: int) -> None:
    raise QuantizationError("weights that are not finite", weights)


def test_workers_compute_side_by_side_for_several_threads() -> None:
    with workers("x") as call, ThreadPoolExecutor(usable_cores()) as threads:
        found = [*threads.map(lambda _: call(process_of, 0.3), range(2 * usable_cores()))]
    assert len({*found} - {os.getpid()}) == usable_cores()


def test_a_worker_raises_as_the_function_does() -> None:
    with workers("x") as call:
        with pytest.raises(QuantizationError, match="not finite") as raised:
            call(miscount, 7)
        assert raised.value.weights == 7
        assert call(divmod, 17, 5) == (3, 2)


def test_a_worker_that_dies_is_an_error() -> None:
    with workers("palettizing") as call, pytest.raises(PipelineError, match="palettizing: a process of it died"):
        call(os._exit, 1)


def test_the_first_process_of_a_caller_is_started_deaf_to_ctrl_c() -> None:
    """Python's resource tracker, which the first start of all brings up, unblocks what was blocked before it."""
    script = """
import signal
from pipeline.processes import in_own_process
if __name__ == "__main__":
    print(signal.SIGINT in in_own_process("x", signal.pthread_sigmask, signal.SIG_BLOCK, []))
"""
    run = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("True\n", "")


@pytest.mark.parametrize("script", CALLERS, ids=["one", "workers"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_its_caller(number: int, script: str) -> None:
    """Ctrl-C goes to the whole group of processes, the others to the caller alone."""
    caller = subprocess.Popen(
        [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        children = sleeping(caller.pid)
        if number == signal.SIGINT:
            os.killpg(caller.pid, number)
        else:
            caller.send_signal(number)
        said = caller.communicate(timeout=20)[1]
    finally:
        os.killpg(caller.pid, signal.SIGKILL) if caller.poll() is None else None
    if number == signal.SIGINT:
        assert said.count("Traceback") == 1  # the caller's own: the process in between says nothing
    gone, alive = psutil.wait_procs(children, timeout=10)
    assert alive == []
    assert len(gone) >= 1


def sleeping(pid: int) -> list[psutil.Process]:
    """The processes of a caller, once the one that works has slept for a moment."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        children = psutil.Process(pid).children(recursive=True)
        if any("spawn_main" in " ".join(child.cmdline()) for child in children):
            time.sleep(0.5)
            return children
        time.sleep(0.02)
    raise AssertionError("no process was started")
