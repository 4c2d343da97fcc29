"""The calibration text is never the scored one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from pipeline import overlap as overlaps
from pipeline.errors import CorpusError
from pipeline.overlap import RUN, Overlap, common_run, is_known, overlap, refuse_overlap
from pipeline.types import Calibration, Windows

RNG = np.random.default_rng(0)
MINE = RNG.integers(0, 50, (4, 64), dtype=np.int32)
THEIRS = RNG.integers(0, 50, (5, 48), dtype=np.int32)
CALIBRATION = Calibration("own.txt", "aa", "tokens", MINE)
SCORED = Windows("sample", "bb", "tokens", THEIRS, np.zeros(5, np.int64))


def copied(length: int, start: int, to: int) -> np.ndarray:
    """THEIRS with a run of MINE in it."""
    ids = THEIRS.copy()
    ids.reshape(-1)[to : to + length] = MINE.reshape(-1)[start : start + length]
    return ids


def test_texts_that_have_nothing_in_common() -> None:
    assert overlap(CALIBRATION, SCORED) == Overlap(None)
    assert refuse_overlap(CALIBRATION, SCORED, "own.txt") == Overlap(None, known=True)


def test_the_same_text_overlaps_whatever_its_windows_are() -> None:
    found = overlap(CALIBRATION, replace(SCORED, text_sha256="aa", tokenizer_sha256="other"))
    assert found == Overlap("it is the same text")


@pytest.mark.parametrize(
    ("start", "to"),
    [(0, 0), (4 * 64 - RUN, 5 * 48 - RUN), (70, 100), (50, 40)],  # ends, within windows, over their ends
)
def test_a_run_of_32_tokens_overlaps_and_31_do_not(start: int, to: int) -> None:
    assert RUN == 32
    assert common_run(MINE, copied(RUN, start, to)) == (start, to)
    shorter = copied(RUN - 1, start, to)
    assert common_run(MINE, shorter) is None
    assert overlap(CALIBRATION, replace(SCORED, ids=copied(RUN, start, to))) == Overlap(
        f"32 tokens in a row are in both, from its token {start} and from the scored {to} on"
    )


def test_the_first_run_in_the_text_is_told() -> None:
    ids = copied(40, 100, 150)
    ids.reshape(-1)[:RUN] = MINE.reshape(-1)[200 : 200 + RUN]
    assert common_run(MINE, ids) == (100, 150)


def test_equal_hashes_of_other_tokens_are_no_overlap(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "FACTOR", 0)  # the hash is the last token alone
    assert common_run(MINE, THEIRS) is None


@pytest.mark.parametrize("short", [np.zeros((1, RUN - 1), np.int32), np.zeros((0, 64), np.int32)])
def test_texts_shorter_than_a_run_have_none_in_common(short: np.ndarray) -> None:
    assert common_run(short, short) is None
    assert common_run(MINE, short) is None


def test_it_is_not_known_of_others_files_and_of_other_tokenizers() -> None:
    assert overlap(None, SCORED) == Overlap(None, known=False)
    other = replace(SCORED, tokenizer_sha256="other", ids=copied(RUN, 0, 0))
    assert overlap(CALIBRATION, other) == Overlap(None, known=False)
    assert [is_known(*of) for of in ((CALIBRATION, SCORED), (None, SCORED), (CALIBRATION, other))] == [
        True,
        False,
        False,
    ]


def test_an_overlap_is_refused_and_named() -> None:
    with pytest.raises(CorpusError) as raised:
        refuse_overlap(CALIBRATION, replace(SCORED, text_sha256="aa"), "the calibration text own.txt")
    said = str(raised.value)
    assert said.startswith("the calibration text own.txt overlaps the scored corpus sample: it is the same text. ")
    assert said.endswith("take another calibration text, or score another one.")
