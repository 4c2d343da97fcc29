"""A run that stops when its question is settled: `quantgate evaluate --until-decided`.

Windows come in the shuffled order of metrics/sequential.py. After each, every limit asked is held against the
confidence sequence of its figure, which is valid however often one looks at it.

- **pass**: every sequence is wholly within its limit, at 95 %. Nothing is corrected for the number of limits: a pass
  is wrong only if some true figure is beyond its limit, and then the sequence of that very figure must have missed it,
  which it does with a chance of at most 5 %, whatever the others do (an intersection-union test: Berger, Technometrics
  24, 1982).
- **fail**: some sequence is wholly beyond its limit, at 1 - 5 % / limits. Any of the limits can make a fail wrong, and
  their chances add up: so each has its share (Bonferroni).
- **inconclusive**: neither, and no windows are left.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import evaluation
from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.evaluation import Question, Request, Scored
from pipeline.metrics import quality
from pipeline.metrics.quality import Compared
from pipeline.metrics.sequential import PRIOR_VARIANCE, anytime_interval, order
from pipeline.metrics.stats import CONFIDENCE, bounds, clipped
from pipeline.progress import saying
from pipeline.runtimes import Runtime
from pipeline.torch_forward import FreshReference, Reference, reference_meta
from pipeline.types import Interval, Limits, Scores

FIGURES: dict[str, Callable[[NDArray[np.float32], Compared], float]] = {
    "max_ln_ppl_ratio": lambda expected, found: float((expected - found[0]).mean(dtype=np.float64)),
    "max_kld_mean": lambda expected, found: float(found[1].mean(dtype=np.float64)),
    "min_same_top": lambda expected, found: float(found[2].mean()),
}
"""The figure of each limit in one window, from the reference's log-probabilities and what `compare` found."""

RANGES = {"max_ln_ppl_ratio": (-math.inf, math.inf), "max_kld_mean": (0.0, math.inf), "min_same_top": (0.0, 1.0)}
"""What the figure of each limit can be."""

PRIOR = f"normal with mean 0 and variance {PRIOR_VARIANCE:g}, of the figure's distance from a limit in deviations"
ESTIMAND = "mean over all windows of the corpus"


@dataclass(frozen=True)
class Check:
    """A limit and the figure that it is of, after some windows. `confidence` is that of low and high: what a figure
    within its limit needs for a pass, or one beyond it for a fail.
    """

    limit: float
    value: float
    low: float | None
    high: float | None
    confidence: float
    verdict: str


def evaluate_until_decided(request: Request, limits: Limits) -> dict[str, Any]:
    """quality.json of as many windows as settle the `limits`, of which one at least is set, with `sequential`.

    Its intervals are valid at the stop, at 95 % each. The whole reference of these windows is taken from the user's
    cache folder where it is there; else each window's is computed when it is needed, and not kept. Layer by layer they
    are all computed first, and kept: each window would need every layer to be read again.

    Raises:
        PipelineError: as `evaluation.evaluate_place`.
    """
    asked = {name: limit for name, limit in asdict(limits).items() if name in FIGURES and limit is not None}
    with evaluation.asked(request) as question:
        reference = _reference(question)

        def score(runtime: Runtime) -> Scored:
            return _score(runtime, question, reference, asked)

        artifact, settings = question.artifact, request.settings
        return evaluation.measure(request.place, artifact, request.context, reference.chat, settings, score)[0]


def _reference(question: Question) -> Reference | FreshReference:
    if not (question.by_layers or question.cached.exists()):
        return FreshReference(question.checkpoint, question.windows)
    stored = evaluation.stored_reference(question)
    evaluation.check_identity(question.place, question.artifact, question.windows, stored)
    return stored


def _score(
    runtime: Runtime, question: Question, reference: Reference | FreshReference, limits: Mapping[str, float]
) -> Scored:
    """Windows in their order, reference and artifact in turns, until the limits are settled."""
    windows, expected, found = question.windows, list[NDArray[np.float32]](), list[Compared]()
    every = order(len(windows.ids), reference_meta(question.source, windows)["ids_sha256"])

    def logits(window: int) -> NDArray[np.float32]:
        rows, logprob = reference.window(window)
        expected.append(logprob)
        return rows

    means: dict[str, list[float]] = {name: [] for name in limits}
    with (
        saying(f"scoring {question.place.name}") as say,
        closing(quality.score_each(runtime, windows, logits, every)) as scored,
    ):
        for compared in scored:
            found.append(compared)
            for name, values in means.items():
                values.append(FIGURES[name](expected[-1], compared))
            checks = {name: judge(name, limit, np.array(means[name]), len(limits)) for name, limit in limits.items()}
            if (verdict := overall([check.verdict for check in checks.values()])) != INCONCLUSIVE:
                break
            say(_progress(len(found), len(every), checks))
    used = every[: len(found)]
    taken = replace(windows, ids=windows.ids[used], span_bytes=windows.span_bytes[used])
    scores, known = Scores(*map(np.stack, zip(*found, strict=True))), _Known(np.stack(expected))
    quality.detect(scores, known, runtime.vocab_size)
    figures = quality.summarize(scores, known, taken, runtime.engine, anytime_interval, _without_intervals)
    sequential = {
        "verdict": verdict,
        "windows_used": len(used),
        "windows_of_corpus": len(every),
        "checks": {name: asdict(check) for name, check in checks.items()},
        "confidence": CONFIDENCE,
        "prior": PRIOR,
        "estimand": ESTIMAND,
        "order": used,
    }
    return Scored(taken, scores, figures | {"sequential": sequential})


@dataclass(frozen=True)
class _Known:
    """What was computed of a reference."""

    logprob: NDArray[np.float32]


def judge(name: str, limit: float, means: NDArray[np.float64], asked: int) -> Check:
    """A limit after windows with these `means` [windows] of its figure, where `asked` limits are in question."""
    sign = 1 if name.startswith("max_") else -1
    beyond = sign * (float(means.mean()) - limit) > 0
    confidence = 1 - (1 - CONFIDENCE) / asked if beyond else CONFIDENCE
    interval = clipped(anytime_interval(means, confidence), *RANGES[name])
    verdict = INCONCLUSIVE
    if beyond and sign * ((interval.low if sign > 0 else interval.high) - limit) > 0:
        verdict = FAIL
    elif not beyond and sign * ((interval.high if sign > 0 else interval.low) - limit) <= 0:
        verdict = PASS
    ends = bounds(interval)
    return Check(limit, interval.value, ends["low"], ends["high"], confidence, verdict)


def overall(verdicts: Sequence[str]) -> str:
    """Fail where one check does, pass where all do."""
    if FAIL in verdicts:
        return FAIL
    return PASS if set(verdicts) == {PASS} else INCONCLUSIVE


def _progress(used: int, windows: int, checks: Mapping[str, Check]) -> str:
    """'12 of at most 592 windows; max_kld_mean 0.01: 0.0089 [0.0061, 0.0117]', and the other limits that are open."""
    open_checks = [
        f"{name} {check.limit:g}: {check.value:.4f}"
        + ("" if check.low is None or check.high is None else f" [{check.low:.4f}, {check.high:.4f}]")
        for name, check in checks.items()
        if check.verdict == INCONCLUSIVE
    ]
    return "; ".join([f"{used} of at most {windows} windows", *open_checks])


def _without_intervals(values: NDArray[np.floating], levels: list[float], seed: int) -> list[Interval]:
    """Quantiles, of which no interval is known that is valid at a stop."""
    return [Interval(float(found), -math.inf, math.inf, len(values)) for found in np.quantile(values, levels)]
