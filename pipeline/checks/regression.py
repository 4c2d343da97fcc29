"""Whether a variant is what was accepted: the same bytes and scores, and no more loss.

On a CPU an engine gives the same digits whenever it computes the same (measured of all that are here, over separate
installs), so any other digit has a cause, which no interval tells from noise: one layer scaled by 1.01 changes
perplexity by less than that, or improves it.
"""

from __future__ import annotations

from pipeline.checks import differences
from pipeline.checks.baseline import Baseline, of_engine
from pipeline.checks.differences import Difference
from pipeline.checks.limits import of_interval
from pipeline.checks.record import Record
from pipeline.checks.verdicts import CHANGED, NO_BASELINE, NOT_COMPARABLE, PASS, Check, failed
from pipeline.types import Limits

NAME, LIMIT = "baseline", "max_regression"
ACCEPT = "run `quantgate baseline accept`"
NO_RECORD = (
    "this run left no artifact.json, figures and scores of it that belong together: run dvc repro, then "
    "`quantgate baseline diff`"
)


def checks(variant: str, limits: Limits, now: Record | None, baseline: Baseline | None) -> list[Check]:
    """`baseline` and `max_regression` of one variant; nothing where the baseline does not know the variant and no
    max_regression is set.
    """
    limit = limits.max_regression
    if baseline is None:
        reason = f"nothing was ever accepted: {ACCEPT}"
        return [] if limit is None else [_said(variant, LIMIT, limit, NO_BASELINE, reason)]
    if now is None:
        return [failed(variant, name, NO_RECORD) for name in ((NAME,) if limit is None else (NAME, LIMIT))]
    records = baseline.records.get(variant, ())
    then = of_engine(records, now)
    if then is None and limit is None and not records:
        return []
    if then is None:
        others = differences.engines(now, records)
        reason = "it was accepted by another engine only" if others else "it is new"
        reason = f"{reason}: look at its figures, then {ACCEPT}"
        found = [_said(variant, NAME, None, NO_BASELINE, reason, tuple(others))]
        return found if limit is None else [*found, _said(variant, LIMIT, limit, NO_BASELINE, reason)]
    difference = differences.compare(now, then)
    found = [_same(variant, difference, now)]
    if limit is None:
        return found
    if difference.growth is None:
        return [*found, _said(variant, LIMIT, limit, found[0].verdict, found[0].reason)]
    return [*found, of_interval(variant, LIMIT, limit, difference.growth)]


def _same(variant: str, found: Difference, now: Record) -> Check:
    details = tuple(differences.lines(found))
    if found.apart:
        what = differences.another(found.apart)
        reason = f"{what} than was accepted: restore it or, where it is meant, {ACCEPT}"
        return _said(variant, NAME, None, NOT_COMPARABLE, reason, details)
    if found.is_change:
        reason = f"{_what(found, now)}. Find out why; where it is meant, {ACCEPT}"
        return _said(variant, NAME, None, CHANGED, reason, details)
    reason = f"the same {len(now.tensors)} tensors, and the same loss in {len(now.window_nll)} windows, to the last bit"
    return _said(variant, NAME, None, PASS, reason, (differences.beside(found),) if found.files else ())


def _what(found: Difference, now: Record) -> str:
    """Where the change is, as far as it shows."""
    if found.tensors:
        scores = "" if found.windows else ", though every score is the same"
        count = f"{len(found.tensors)} of {len(now.tensors)} tensors"
        are = "is not the one that was" if len(found.tensors) == 1 else "are not those that were"
        return f"{count} {are} accepted{scores}"
    if found.files:
        return "the tensors are those that were accepted; a file's header, or one without weights, and the loss are not"
    return "the artifact is the one that was accepted, its scores are not: it was computed in another way"


def _said(
    variant: str, name: str, limit: float | None, verdict: str, reason: str, details: tuple[str, ...] = ()
) -> Check:
    """A verdict that no figure leads to."""
    return Check(variant, name, limit, None, None, None, verdict, reason, details=details)
