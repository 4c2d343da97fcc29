"""Whether an artifact's own runtime computes what was scored, where another engine scored it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cores import usable_cores
from pipeline.errors import MeasurementError
from pipeline.logits import logprob_of, shifted_logits
from pipeline.progress import Advance, silent
from pipeline.runtimes import Scorer
from pipeline.types import Windows

WINDOWS = 2  # the first: a runtime that is a poor fit for this machine takes a minute for each
LIMIT = 1e-3  # nats of a target's log-probability; float32 sums in another order differ by about 1e-5


def check(
    native: Scorer, windows: Windows, logprob: NDArray[np.float32], scored_by: str, advance: Advance = silent
) -> dict[str, Any]:
    """`parity` of quality.json: how far the targets' log-probabilities by `native` are from `logprob`
    [windows, scored], in nats, over the first windows. `advance` is told of each.

    Raises:
        MeasurementError: they are farther apart than LIMIT.
    """
    first = windows.ids[:WINDOWS]
    with ThreadPoolExecutor(min(len(first), usable_cores())) as threads:  # a window has a core of its own
        apart = []
        for window, found in enumerate(threads.map(lambda ids: _target_logprob(native, ids, windows), first)):
            apart.append(np.abs(found.astype(np.float64) - logprob[window]))
            advance(1)
    most = float(np.max(apart))
    if not most <= LIMIT:  # NaN is not
        worst, at = divmod(int(np.argmax(apart)), windows.scored)
        raise MeasurementError(
            f"{native.engine.name} does not compute what was scored by {scored_by}: the log-probability of a target "
            f"differs by {most:.3g} nats in window {worst}, position {windows.start + at}; at most {LIMIT:g} is "
            "expected. They probably read config.json differently (mlx-lm takes rope_theta from its top level, "
            "transformers from rope_parameters as well): convert it again, or write both keys."
        )
    return {
        "windows": len(first),
        "tokens": int(np.size(apart)),
        "max_difference": most,
        "limit": LIMIT,
        "engine": asdict(native.engine),
    }


def _target_logprob(native: Scorer, ids: NDArray[np.int32], windows: Windows) -> NDArray[np.float32]:
    """Log-probabilities float32 [scored] of one window's targets."""
    found = np.empty(windows.scored, np.float32)
    row = 0
    for chunk in native.score(ids, windows.start):
        kept = chunk[: windows.scored - row]  # the last position predicts what lies beyond the window
        targets = ids[windows.start + 1 + row :][: len(kept)]
        found[row : row + len(kept)] = logprob_of(*shifted_logits(kept), targets)
        row += len(kept)
    return found
