"""What parts the record of a run from one that was accepted, as data and in lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.checks.identity import IDENTITY, shown
from pipeline.checks.record import ENGINE, Record, engine_key
from pipeline.errors import some
from pipeline.metrics.stats import paired_interval
from pipeline.types import Interval

MADE = ("format", "scheme")
"""What params.yaml asks of a variant; files that others made are told by their tensors, wherever they lie."""
SHOWN = 5  # tensors
WORDS = {
    **{"source": "checkpoint", "text_sha256": "text", "tokenizer_sha256": "tokenizer", "context": "window length"},
    **{"ids_sha256": "sequence of token ids", "windows": "number of windows"},
}
"""Keys of the identity that are not plain English."""


@dataclass(frozen=True)
class Difference:
    """`now` against `then`, two records of a variant by one engine.

    `apart` says what makes their scores incomparable, a line each. `files` are names of files whose hashes differ or
    that only one has, `tensors` lines of such tensors. `windows` is in how many of them the loss differs, if only in
    its last digit; `before` and `after` are means over all. `growth` is the mean of now - then by window, nats per
    token: None where nothing can be paired.
    """

    apart: tuple[str, ...]
    files: tuple[str, ...]
    tensors: tuple[str, ...]
    windows: int
    before: float
    after: float
    growth: Interval | None

    @property
    def is_change(self) -> bool:
        """Other tensors or scores of what should have the same."""
        return not self.apart and bool(self.tensors or self.windows)


def compare(now: Record, then: Record) -> Difference:
    """See Difference."""
    apart = incomparable(now, then)
    losses, accepted = (np.array(record.window_nll) for record in (now, then))
    pairs = losses.shape == accepted.shape
    return Difference(
        apart=apart,
        files=_differing(now.files, then.files),
        tensors=tuple(
            f"{name}: {_typed(then.tensors.get(name))} -> {_typed(now.tensors.get(name))}"
            for name in _differing(now.tensors, then.tensors)
        ),
        windows=int((losses != accepted).sum()) if pairs else max(len(losses), len(accepted)),
        before=float(accepted.mean()),
        after=float(losses.mean()),
        growth=paired_interval(losses, accepted) if pairs and not apart else None,
    )


def incomparable(now: Record, then: Record) -> tuple[str, ...]:
    """What of the source, text, tokenizer and windows, or of what is asked, is another one: expected and found."""
    lines = []
    for key in MADE:
        if getattr(now, key) != getattr(then, key):
            lines.append(f"{key}: expected {getattr(then, key)}, found {getattr(now, key)}")
    for key in IDENTITY:
        found, expected = now.identity[key], then.identity[key]
        if key == "source":  # a folder's name is none of its content
            if files := _differing(found["files"], expected["files"]):
                lines.append(f"source: {', '.join(files)} of {found['name']}: another checkpoint")
        elif found != expected:
            lines.append(f"{key}: expected {shown(expected)}, found {shown(found)}")
    return tuple(lines)


def another(apart: Iterable[str]) -> str:
    """'another checkpoint, tokenizer' of the lines of `incomparable`."""
    keys = (line.partition(":")[0] for line in apart)
    return f"another {', '.join(WORDS.get(key, key) for key in keys)}"


def _differing(now: Mapping[str, str], then: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(name for name in {**then, **now} if now.get(name) != then.get(name))


def _typed(tensor: str | None) -> str:
    """'Q8_0 0c5b6a91…': enough of a hash to tell two apart."""
    if tensor is None:
        return "none"
    kind, _, digest = tensor.rpartition(" ")
    return f"{kind} {digest[:8]}"


def lines(found: Difference) -> list[str]:
    """What differs, in at most 8 lines."""
    if found.apart:
        return some(found.apart, "differences", 7)
    tensors = some(found.tensors, "tensors", SHOWN)
    return [loss(found), *([beside(found)] if found.files else []), *tensors]


def loss(found: Difference) -> str:
    """'loss 4.38536 -> 4.38612 nats/token: +0.00076 [+0.00012, +0.00140], other in 40 of 40 windows'."""
    means = f"loss {found.before:.5f} -> {found.after:.5f} nats/token"
    if found.growth is None:
        return means
    if not found.windows:
        return f"loss {found.after:.5f} nats/token, the same in every window to the last digit"
    return f"{means}: {growth(found.growth)}, other in {found.windows} of {found.growth.n} windows"


def growth(interval: Interval) -> str:
    """'+0.00076 [+0.00012, +0.00140]', with digits enough to show one: '-3.1e-08'; '0' where none differs."""
    if interval.value == interval.low == interval.high == 0:
        return "0"
    numbers = [interval.value, *([] if interval.n < 2 else [interval.low, interval.high])]
    kind = "+.5f" if any(abs(number) >= 5e-6 for number in numbers) else "+.1e"
    value, *ends = (format(number, kind) for number in numbers)
    return f"{value} [{ends[0]}, {ends[1]}]" if ends else value


def beside(found: Difference) -> str:
    """Which files differ, and whether tensors do."""
    names = ", ".join(some(found.files, "files", 3))
    if found.tensors:
        return f"files that differ: {names}"
    return f"every tensor is the same: what differs in {names} is its header, or no weights"


def engines(now: Record, records: Sequence[Record]) -> list[str]:
    """Of each record by another engine, what of it is another than now's."""
    found = []
    for record in records:
        own = zip(ENGINE, engine_key(record.engine), engine_key(now.engine), strict=True)
        found.append("; ".join(f"{key}: accepted {then}, now {is_now}" for key, then, is_now in own if then != is_now))
    return found
