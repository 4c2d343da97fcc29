"""How far the engine that scored and the artifact's own runtime are apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import numpy as np
import pytest

from pipeline.errors import MeasurementError
from pipeline.metrics import parity
from pipeline.types import Engine, Windows

VOCAB, CONTEXT, SCORED = 7, 12, 5
ENGINE = Engine("own", "1", "none", "cpu", "f32", "auto", 1)


def untouched(logits: np.ndarray) -> np.ndarray:
    return logits


@dataclass
class Own:
    """Gives the logits of a window in chunks of 2, after `change`."""

    logits: np.ndarray
    ids: np.ndarray
    change: Callable[[np.ndarray], np.ndarray] = untouched
    asked: list[int] = field(default_factory=list)
    wait: threading.Barrier | None = None
    engine: Engine = ENGINE
    vocab_size: int = VOCAB

    def score(self, ids: np.ndarray, start: int) -> Iterator[np.ndarray]:
        if self.wait:
            self.wait.wait()
        (window,) = np.flatnonzero((self.ids == ids).all(1))
        self.asked.append(int(window))
        rows = self.change(self.logits[window])
        assert len(rows) == CONTEXT - start
        for at in range(0, len(rows), 2):
            yield rows[at : at + 2]


@pytest.fixture
def windows() -> Windows:
    ids = np.random.default_rng(0).integers(0, VOCAB, (4, CONTEXT)).astype(np.int32)
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(4, 10))


@pytest.fixture
def logits() -> np.ndarray:
    return np.random.default_rng(1).standard_normal((4, CONTEXT - CONTEXT // 2, VOCAB)).astype(np.float32)


@pytest.fixture
def logprob(windows: Windows, logits: np.ndarray) -> np.ndarray:
    """By float64 and another formula."""
    wide = logits[:, :SCORED].astype(np.float64)
    found = np.empty((4, SCORED))
    for window, ids in enumerate(windows.ids):
        for row in range(SCORED):
            p = np.exp(wide[window, row]) / np.exp(wide[window, row]).sum()
            found[window, row] = np.log(p[ids[CONTEXT // 2 + 1 + row]])
    return found.astype(np.float32)


def test_the_first_two_windows_are_compared(windows: Windows, logits: np.ndarray, logprob: np.ndarray) -> None:
    own, told = Own(logits, windows.ids), []
    logprob[2:] = 0.0  # not looked at
    logprob[1, 3] += 2.5e-4
    found = parity.check(own, windows, logprob, "other", told.append)
    assert sorted(own.asked) == [0, 1]
    assert told == [1, 1]
    assert found.pop("max_difference") == pytest.approx(2.5e-4, abs=1e-6)
    assert found == {"windows": 2, "tokens": 10, "limit": 1e-3, "engine": asdict(ENGINE)}


def test_one_window_is_enough(windows: Windows, logits: np.ndarray, logprob: np.ndarray) -> None:
    only = Windows("sample", "", "", windows.ids[:1], windows.span_bytes[:1])
    assert parity.check(Own(logits, windows.ids), only, logprob[:1], "other")["tokens"] == SCORED


def test_each_window_has_a_thread(
    windows: Windows, logits: np.ndarray, logprob: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parity, "usable_cores", lambda: 2)
    own = Own(logits, windows.ids, wait=threading.Barrier(2, timeout=10))
    assert parity.check(own, windows, logprob, "other")["max_difference"] < 1e-6


def test_beyond_the_limit_is_an_error_that_says_where(
    windows: Windows, logits: np.ndarray, logprob: np.ndarray
) -> None:
    logprob[1, 2] -= 0.25
    with pytest.raises(MeasurementError) as caught:
        parity.check(Own(logits, windows.ids), windows, logprob, "other")
    said = str(caught.value)
    assert said.startswith("own does not compute what was scored by other: the log-probability of a target differs by")
    assert "differs by 0.25 nats in window 1, position 8; at most 0.001 is expected" in said
    assert "rope_theta" in said


def test_logits_that_are_not_finite_are_an_error(windows: Windows, logits: np.ndarray, logprob: np.ndarray) -> None:
    with pytest.raises(MeasurementError, match="differs by nan nats in window"):
        parity.check(Own(logits, windows.ids, lambda rows: rows * np.nan), windows, logprob, "other")
