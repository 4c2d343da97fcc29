"""What runs an artifact, and what it is asked: protocols and their nouns, without I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.types import Engine

Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""

Placement = Mapping[str, Mapping[str, float]]
"""Of prefill and decode, by name: the share of operations that each compute unit takes."""


@dataclass(frozen=True)
class Prompt:
    """A conversation as a chat template renders it, and its ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """What a model says to a prompt when each token is the most likely one.

    ids: the tokens, the one that ended the reply last. stopped: the text of that one, None where the limit came first.
    text: of the others.
    """

    ids: tuple[int, ...]
    text: str
    stopped: str | None


REFERENCE_EXECUTOR = "reference executor"
"""As the name of an Engine: what runs a Core ML package where Core ML does not."""


class Scorer(Protocol):
    """Whatever gives logits."""

    @property
    def engine(self) -> Engine: ...

    @property
    def vocab_size(self) -> int: ...

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """Logits [rows, vocab] float32 of positions `start` to the last of `ids` [context], in chunks of rows.

        A chunk is valid until the next one is asked for.
        """
        ...


class Runtime(Scorer, Protocol):
    """A loaded artifact, which can be timed and spoken to as well. `kv_bytes`: its KV cache, for its whole context.

    `native` is the artifact's own runtime where `score` is another one, for a check that both agree; else None. Its
    `score` may be called from several threads at once. `prefill` and `decode` are always of the artifact's own runtime.
    """

    @property
    def kv_bytes(self) -> int: ...

    @property
    def native(self) -> Scorer | None: ...

    def prefill(self, ids: NDArray[np.int32]) -> float:
        """Seconds of wall clock to take in `ids` into an empty cache, up to the logits of the last."""
        ...

    def decode(self, n: int) -> float:
        """Seconds of wall clock for n tokens, one at a time, behind what the cache holds."""
        ...

    def peak_memory(self) -> tuple[int, str] | None:
        """Bytes that the engine says it held at most, and the function that says it; None where what the process had
        resident tells.
        """
        ...

    def placement(self) -> Placement | None:
        """Which compute units the engine means to use; None where it has no choice of its own."""
        ...

    def prompt(self, messages: Messages) -> Prompt | None:
        """The prompt that asks for a reply to `messages`, by the artifact's own chat template and tokenizer; None where
        it has no template.
        """
        ...

    def reply(self, ids: Sequence[int], limit: int) -> Reply:
        """The reply to a prompt of `ids`: at most `limit` tokens, fewer where the artifact's own stop token comes."""
        ...

    def close(self) -> None: ...
