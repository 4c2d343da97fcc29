"""What a calibration text and a scored one have in common, which should be nothing: weights that were rounded to suit a
text look better on it than they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import CorpusError
from pipeline.types import Calibration, Windows

RUN = 32
"""Tokens in a row that two texts do not have in common by chance."""

NO_OVERLAP, UNKNOWN = "none", "not known"
"""What is said of an artifact made with an importance matrix whose windows were not refused."""

FACTOR = 0x9E3779B97F4A7C15  # odd, so that no token's place is lost modulo 2^64


@dataclass(frozen=True)
class Overlap:
    """What a calibration text and a scored one have in common: `reason` says what; None where nothing is, or it is not
    known (`known`).
    """

    reason: str | None
    known: bool = True


def overlap(calibration: Calibration | None, windows: Windows) -> Overlap:
    """Whether the windows of a calibration text hold any of the scored ones: both are of the same text, or RUN tokens
    in a row of one are in the other.

    It is not known of importance matrices that others made, which do not say what they were computed from, nor of other
    texts of another tokenizer's ids.
    """
    if calibration is None:
        return Overlap(None, known=False)
    if calibration.text_sha256 == windows.text_sha256:
        return Overlap("it is the same text")
    if not is_known(calibration, windows):
        return Overlap(None, known=False)
    found = common_run(calibration.ids, windows.ids)
    if found is None:
        return Overlap(None)
    return Overlap(f"{RUN} tokens in a row are in both, from its token {found[0]} and from the scored {found[1]} on")


def is_known(calibration: Calibration | None, windows: Windows) -> bool:
    """Whether what both have in common can be told: of ids of one tokenizer."""
    return calibration is not None and calibration.tokenizer_sha256 == windows.tokenizer_sha256


def common_run(a: NDArray[np.int32], b: NDArray[np.int32]) -> tuple[int, int] | None:
    """Where RUN tokens in a row of `a` are also in `b`, by their places in both: None where no such run is.

    Both are [windows, context], and consecutive windows of a text: a run may go over their ends.
    """
    texts = a.ravel(), b.ravel()
    (mine, at), (theirs, their_at) = (np.unique(_hashes(ids), return_index=True) for ids in texts)
    _, i, j = np.intersect1d(mine, theirs, assume_unique=True, return_indices=True)
    for x, y in sorted(zip(at[i].tolist(), their_at[j].tolist(), strict=True)):
        if np.array_equal(texts[0][x : x + RUN], texts[1][y : y + RUN]):  # not hashes that are equal by chance
            return x, y
    return None


def refuse_overlap(calibration: Calibration | None, windows: Windows, what: str) -> Overlap:
    """`what` is what the calibration text is called.

    Raises:
        CorpusError: the scored text is in it.
    """
    found = overlap(calibration, windows)
    if found.reason:
        scored = "scored text" if windows.name == "file" else f"scored corpus {windows.name}"
        raise CorpusError(
            f"{what} overlaps the {scored}: {found.reason}. Weights rounded to suit the text that "
            "they are scored on would look better than they are: take another calibration text, or score another one."
        )
    return found


def _hashes(ids: NDArray[np.int32]) -> NDArray[np.uint64]:
    """Of every RUN ids in a row: a polynomial of them, modulo 2^64."""
    found = np.zeros(max(0, len(ids) - RUN + 1), np.uint64)
    for place in range(RUN):
        found = found * np.uint64(FACTOR) + ids[place : place + len(found)].astype(np.uint64)
    return found
