"""Quality of a variant against the reference, token by token on the same windows."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import MeasurementError
from pipeline.logits import logprob_of, shifted_logits
from pipeline.metrics.stats import bounds, clipped, interval_json, mean_interval, quantile_intervals
from pipeline.progress import Advance, silent
from pipeline.runtimes import Scorer
from pipeline.torch_forward import Reference
from pipeline.types import Engine, Interval, Scores, Windows

BLOCK_LOGITS = 1 << 18  # of one piece of work: 1 MB of float32 stay in a core's cache
UNIFORM = 0.05  # nats: a mean this close to ln V is that of a model that predicts nothing

Logits = NDArray[np.float32]
Compared = tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.bool_]]
MeanInterval = Callable[[NDArray[np.floating]], Interval]
QuantileIntervals = Callable[[NDArray[np.floating], list[float], int], list[Interval]]


class Expected(Protocol):
    """What figures need of a reference: the targets' log-probabilities float32 [windows, scored]."""

    @property
    def logprob(self) -> NDArray[np.float32]: ...


def score(runtime: Scorer, windows: Windows, reference: Reference, advance: Advance = silent) -> Scores:
    """Score every window; `advance` is told of each.

    Raises:
        MeasurementError: the windows are not the reference's, a count differs, or logits cannot be true.
    """
    if reference.logprob.shape != (len(windows.ids), windows.scored):
        raise MeasurementError(
            f"the reference holds {reference.logprob.shape[0]} windows of {reference.logprob.shape[1]} scored tokens, "
            f"the corpus {len(windows.ids)} of {windows.scored}. Run the reference again."
        )
    shape = (len(windows.ids), windows.scored)
    scores = Scores(np.empty(shape, np.float32), np.empty(shape, np.float32), np.empty(shape, np.bool_))
    for window, found in enumerate(score_each(runtime, windows, reference.logits, range(len(windows.ids)))):
        scores.logprob[window], scores.kld[window], scores.same_top[window] = found
        advance(1)
    detect(scores, reference, reference.head.weight.shape[0])
    return scores


def score_each(
    runtime: Scorer, windows: Windows, expected: Callable[[int], Logits], numbers: Iterable[int]
) -> Generator[Compared]:
    """What `compare` finds in each of the windows `numbers`, in their order; `expected` gives the reference's logits
    [scored, vocab] of one.

    Raises:
        MeasurementError: a count differs, or logits are not finite.
    """
    with ThreadPoolExecutor() as threads:
        for window in numbers:
            yield _score_window(runtime, windows, expected(window), window, threads)


def _score_window(
    runtime: Scorer, windows: Windows, expected: Logits, window: int, threads: ThreadPoolExecutor
) -> Compared:
    ids, scored = windows.ids[window], windows.scored
    targets = ids[windows.start + 1 :].astype(np.int64)
    logprob, kld, same_top = np.empty(scored, np.float32), np.empty(scored, np.float32), np.empty(scored, np.bool_)
    row = received = 0
    for chunk in runtime.score(ids, windows.start):
        received += len(chunk)
        kept = chunk[: scored - row]  # the last position predicts what lies beyond the window
        _check(kept, expected.shape[1])
        for part, compared in _compare_pieces(threads, kept, expected[row:], targets[row:]):
            at = slice(row + part.start, row + part.stop)
            logprob[at], kld[at], same_top[at] = compared
        row += len(kept)
    if received != windows.context - windows.start:
        raise MeasurementError(
            f"window {window}: the runtime gave logits of {received} positions, expected "
            f"{windows.context - windows.start}. Its figures would not be comparable. "
            "This is a defect: please report it."
        )
    return logprob, kld, same_top


def _compare_pieces(
    threads: ThreadPoolExecutor, logits: Logits, expected: Logits, targets: NDArray[np.int64]
) -> Iterator[tuple[slice, Compared]]:
    """`compare` over pieces of rows that stay in a core's cache, on all cores."""
    step = max(1, BLOCK_LOGITS // logits.shape[1])
    parts = [slice(at, min(at + step, len(logits))) for at in range(0, len(logits), step)]
    yield from zip(
        parts, threads.map(lambda part: compare(logits[part], expected[part], targets[part]), parts), strict=True
    )


def _check(logits: Logits, vocab: int) -> None:
    if logits.shape[1] != vocab:
        raise MeasurementError(
            f"the artifact has logits for {logits.shape[1]} tokens, the reference for {vocab}: it is another model's. "
            "Give the checkpoint that it was made from."
        )


def compare(logits: Logits, expected: Logits, targets: NDArray[np.int64]) -> Compared:
    """Target's log-probability (nats), KL(expected || logits) over the vocabulary (nats) and same top-1, each [rows].

    Logits are [rows, vocab] float32. Sums are taken in float64. Equal logits give a KL of exactly 0.

    Raises:
        MeasurementError: logits that are not finite.
    """
    q, log_sum_q = shifted_logits(logits)
    p, log_sum_p = shifted_logits(expected)
    with np.errstate(invalid="ignore"):
        weights = np.exp(p)  # the reference's probabilities, but for their sum
        kld = (weights * (p - q)).sum(axis=1, dtype=np.float64) / weights.sum(axis=1, dtype=np.float64)
        kld -= (log_sum_p - log_sum_q)[:, 0]
    if not np.isfinite(kld).all():
        raise MeasurementError(
            "logits are not finite (NaN or infinite): the artifact or its runtime is broken. Convert again; where that "
            "does not help, take a scheme or KV type with a wider range."
        )
    same_top = logits.argmax(axis=1) == expected.argmax(axis=1)
    return logprob_of(q, log_sum_q, targets), kld.astype(np.float32), same_top


def detect(scores: Scores, reference: Expected, vocab: int) -> None:
    """Figures that no working artifact has.

    Raises:
        MeasurementError: uniform logits, or a perplexity above the vocabulary size where the reference's is below.
    """
    nll, expected = _mean_nll(scores.logprob), _mean_nll(reference.logprob)
    if abs(nll - math.log(vocab)) < UNIFORM <= abs(expected - math.log(vocab)):
        raise MeasurementError(
            f"logits are uniform: {nll:.4f} nats per token against ln {vocab} = {math.log(vocab):.4f}; "
            f"the reference has {expected:.4f}. The artifact predicts nothing. "
            "Convert again, or take another scheme."
        )
    if nll > math.log(vocab) > expected:
        raise MeasurementError(
            f"perplexity is above the vocabulary size {vocab}: {nll:.4f} nats per token against ln {vocab} = "
            f"{math.log(vocab):.4f}; the reference has {expected:.4f}. The artifact is broken. "
            "Convert again, or take another scheme."
        )


def _mean_nll(logprob: NDArray[np.float32]) -> float:
    return -float(logprob.mean(dtype=np.float64))


def summarize(
    scores: Scores,
    reference: Expected,
    windows: Windows,
    engine: Engine,
    mean: MeanInterval = mean_interval,
    quantiles: QuantileIntervals = quantile_intervals,
) -> dict[str, Any]:
    """The figures of quality.json: keys in docs/json.md, nats and shares, 95 % intervals over windows.

    Definitions: perplexity exp(mean NLL); ln_ppl_ratio the mean paired difference of NLL, so that exp of it is the
    ratio of perplexities; KL(reference || variant); bits_per_byte NLL / ln 2 over the UTF-8 bytes of the scored text.
    `mean` and `quantiles` give the intervals: those of a number of windows that was fixed beforehand, or others.
    """
    nll = mean(-scores.logprob.mean(axis=1, dtype=np.float64))
    difference = (reference.logprob - scores.logprob).astype(np.float64)
    kld = clipped(mean(scores.kld.mean(axis=1, dtype=np.float64)), 0, math.inf)
    seed = int(windows.text_sha256[:8], 16) + len(windows.ids)
    median, p99, p99_9 = quantiles(scores.kld, [0.5, 0.99, 0.999], seed)
    probability = np.exp(scores.logprob.astype(np.float64)) - np.exp(reference.logprob.astype(np.float64))
    bits = -float(scores.logprob.sum(dtype=np.float64)) / math.log(2)
    return {
        "ppl": math.exp(nll.value),
        "ppl_interval": {"low": _exp(nll.low), "high": _exp(nll.high)},
        "reference_ppl": math.exp(_mean_nll(reference.logprob)),
        "ln_ppl_ratio": interval_json(mean(difference.mean(axis=1))),
        "kld": {
            "mean": kld.value,
            "median": median.value,
            "p99": p99.value,
            "p99_9": p99_9.value,
            "max": float(scores.kld.max()),
        },
        "kld_interval": {
            "mean": bounds(kld),
            "median": bounds(median),
            "p99": bounds(p99),
            "p99_9": bounds(p99_9),
        },
        "same_top": float(scores.same_top.mean()),
        "same_top_interval": bounds(clipped(mean(scores.same_top.mean(axis=1)), 0, 1)),
        "target_probability_rms": float(np.sqrt(np.mean(probability**2))),
        "bits_per_byte": bits / int(windows.span_bytes.sum()),
        "windows": len(windows.ids),
        "scored_tokens": int(scores.logprob.size),
        "engine": asdict(engine),
    }


def _exp(x: float) -> float | None:
    return math.exp(x) if math.isfinite(x) else None
