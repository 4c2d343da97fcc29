"""JSON values with one part gone or wrong, and what a function makes of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from pipeline.errors import PipelineError

GONE = object()
WRONG = (GONE, "x", "", None, -1, 0, 1.5, 2**40, 10**30, [], [1], {}, True, False, float("nan"), float("inf"), "\ud800")


FEW = (GONE, "x", None, -1, [], {}, True)


def paths(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where something lies in a JSON value; of what is long, the first few."""
    if isinstance(value, dict | list):
        for key in (
            list(value)[: 4 if len(value) > 50 else 50] if isinstance(value, dict) else range(min(2, len(value)))
        ):
            yield (*at, key)
            yield from paths(value[key], (*at, key))


def changed(value: Any, wrong: tuple[object, ...] = WRONG) -> Iterator[tuple[str, Any]]:
    """The value with one part of it gone or wrong, for every part."""
    for at in paths(value):
        for bad in wrong:
            broken = copy.deepcopy(value)
            part = broken
            for key in at[:-1]:
                part = part[key]
            if bad is GONE:
                del part[at[-1]]
            else:
                part[at[-1]] = bad
            yield f"{at}: {'gone' if bad is GONE else repr(bad)}", broken


def outcome(label: str, work: Callable[[], object], kind: type[PipelineError] = PipelineError) -> str:
    """'refused' or 'works'."""
    try:
        work()
    except kind as error:
        return "refused" if len(str(error)) > 20 else pytest.fail(f"{label}: {error}")
    except Exception as error:
        pytest.fail(f"{label}: {error!r}")
    return "works"
