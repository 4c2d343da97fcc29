"""How the functions of a package are called: tokens padded to the sizes they take, one state for a conversation."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MeasurementError
from pipeline.formats.coreml.graph import DECODE, INPUT_IDS, LENGTH, POSITION, PREFILL, SCORE
from pipeline.formats.coreml.plan import Sizes

ROWS = 128  # of logits at once: those of a window are 300 MB with Qwen's vocabulary

Inputs = Mapping[str, NDArray[np.int32]]


class Model(Protocol):
    """Whatever runs the functions of a package."""

    def new_state(self) -> Any:
        """An empty KV state, which `prefill` and `decode` share."""
        ...

    def logits(self, function: str, inputs: Inputs, state: Any = None) -> NDArray[Any]:
        """Its output, floats [1, positions, vocab]."""
        ...


def score(model: Model, sizes: Sizes, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
    """See Scorer. What fills the window lies behind every token of `ids`, where none of them looks.

    Raises:
        MeasurementError: more ids than `score` takes.
    """
    if problem := window_problem(sizes.score_window, len(ids)):
        raise MeasurementError(problem)
    found = model.logits(SCORE, {INPUT_IDS: _filled(ids, sizes.score_window)})[0]  # (score_window, V)
    for at in range(start, len(ids), ROWS):
        yield found[at : min(at + ROWS, len(ids))].astype(np.float32, copy=False)


class Conversation:
    """Tokens taken in one behind the other, into a state of their own."""

    def __init__(self, model: Model, sizes: Sizes) -> None:
        self._model = model
        self._sizes = sizes
        self._state = model.new_state()
        self._held = 0

    def take_in(self, ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float32]:
        """Append `ids` [n] by `prefill`, a chunk at a time: logits float32 [vocab] behind the last.

        Raises:
            MeasurementError: no ids, or no room for them.
        """
        if not len(ids):
            raise MeasurementError("a conversation begins with a token at least: none was given.")
        self._check_room(len(ids))
        found = np.empty(0, np.float32)
        for at in range(0, len(ids), self._sizes.chunk):
            part = ids[at : at + self._sizes.chunk]
            inputs = {
                INPUT_IDS: _filled(part, self._sizes.chunk),
                POSITION: np.array([self._held], np.int32),
                LENGTH: np.array([len(part)], np.int32),
            }
            found = self._logits(PREFILL, inputs)
            self._held += len(part)
        return found

    def step(self, token: int) -> NDArray[np.float32]:
        """Append one token by `decode`: logits float32 [vocab] behind it.

        Raises:
            MeasurementError: no room for it.
        """
        self._check_room(1)
        inputs = {INPUT_IDS: _filled([token], 1), POSITION: np.array([self._held], np.int32)}
        found = self._logits(DECODE, inputs)
        self._held += 1
        return found

    def _logits(self, function: str, inputs: Inputs) -> NDArray[np.float32]:
        found = self._model.logits(function, inputs, self._state)  # (1, 1, V)
        logits: NDArray[np.float32] = found[0, 0].astype(np.float32, copy=False)
        return logits

    def _check_room(self, tokens: int) -> None:
        if problem := conversation_problem(self._sizes, self._held + tokens):
            raise MeasurementError(problem)


def greedy(model: Model, sizes: Sizes, ids: Sequence[int], limit: int, stop_ids: Collection[int]) -> list[int]:
    """The most likely tokens behind `ids`: at most `limit`, one of `stop_ids` being the last.

    Raises:
        MeasurementError: the context has no room for both.
    """
    if problem := conversation_problem(sizes, len(ids) + limit):
        raise MeasurementError(problem)  # before the long work
    conversation = Conversation(model, sizes)
    found = [int(np.argmax(conversation.take_in(ids)))]
    while len(found) < limit and found[-1] not in stop_ids:
        found.append(int(np.argmax(conversation.step(found[-1]))))
    return found


def window_problem(score_window: int, tokens: int) -> str | None:
    """Why a window of so many tokens cannot be scored; None where it can."""
    if tokens <= score_window:
        return None
    return (
        f"a window of {tokens} tokens is longer than the {score_window} that the package scores at once. Convert with "
        f"--score-window {tokens} (params.yaml: score_window), or take a context of {score_window}."
    )


def conversation_problem(sizes: Sizes, tokens: int) -> str | None:
    """Why a conversation of so many tokens cannot be held; None where it can."""
    if tokens <= sizes.max_context:
        return None
    return (
        f"a conversation of {tokens} tokens is longer than the {sizes.max_context} that the package holds. Convert "
        f"with --max-context {tokens} (params.yaml: max_context), or ask for fewer tokens."
    )


def _filled(ids: Sequence[int] | NDArray[np.int32], size: int) -> NDArray[np.int32]:
    """Ids int32 [1, size], zeros behind them."""
    filled = np.zeros((1, size), np.int32)
    filled[0, : len(ids)] = ids
    return filled
