"""Scores per token that a stage left: read whole, or refused."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mutations import outcome

from pipeline.errors import MeasurementError
from pipeline.metrics.stored import AGAIN, load

RNG = np.random.default_rng(5)
ARRAYS = {
    "logprob": -RNG.gamma(2.0, 1.0, (3, 4)).astype(np.float32),
    "kld": RNG.gamma(2.0, 0.1, (3, 4)).astype(np.float32),
    "same_top": RNG.random((3, 4)) < 0.9,
}
QUALITY = {
    "windows": 3,
    "scored_tokens": 12,
    "ppl": math.exp(-float(ARRAYS["logprob"].mean(dtype=np.float64))),
    "kld": {"mean": float(ARRAYS["kld"].mean(dtype=np.float64))},
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    np.savez(tmp_path / "a.npz", **ARRAYS)
    return tmp_path / "a.npz"


def test_scores_are_read_as_they_are(file: Path) -> None:
    found = vars(load(file, QUALITY))
    assert found.keys() == ARRAYS.keys()
    for key, array in ARRAYS.items():
        assert (found[key].dtype, found[key].tobytes()) == (array.dtype, array.tobytes())


def test_an_absent_file_is_named(tmp_path: Path) -> None:
    said = re.escape(f"{tmp_path}/no.npz cannot be read: No such file or directory.")
    with pytest.raises(MeasurementError, match=f"{said}.*{re.escape(AGAIN)}"):
        load(tmp_path / "no.npz", QUALITY)


def test_a_file_cut_short_or_changed_anywhere_is_refused_or_the_same(file: Path) -> None:
    def same() -> None:
        found = vars(load(file, QUALITY))
        assert all(np.array_equal(found[key], array) for key, array in ARRAYS.items())

    whole, refusals = file.read_bytes(), 0
    for at in range(0, len(whole), 7):
        for broken in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x41]) + whole[at + 1 :]):
            file.write_bytes(broken)
            if outcome(f"byte {at}", same, MeasurementError) == "refused":
                refusals += 1
    assert refusals > len(whole) // 7


@pytest.mark.parametrize("content", [b"", b"x" * 100, b"PK\x03\x04"])
def test_what_is_no_archive_is_refused(content: bytes, file: Path) -> None:
    file.write_bytes(content)
    with pytest.raises(MeasurementError, match=r"a\.npz holds no scores per token, or is broken .+ Run dvc repro"):
        load(file, QUALITY)


def test_an_array_alone_or_pickled_is_refused(file: Path) -> None:
    for arrays in ({"logprob": ARRAYS["logprob"]}, ARRAYS | {"kld": np.array([{}, {}], dtype=object)}):
        np.savez(file, **arrays)
        with pytest.raises(MeasurementError, match="holds no scores per token, or is broken"):
            load(file, QUALITY)
    with file.open("wb") as alone:
        np.save(alone, ARRAYS["kld"])
    with pytest.raises(MeasurementError, match="holds no scores per token, or is broken"):
        load(file, QUALITY)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"windows": 4}, r"logprob has the shape \[3, 4\], expected \[4, 3\]: 12 scored tokens in 4 windows"),
        ({"scored_tokens": 15}, r"logprob has the shape \[3, 4\], expected \[3, 5\]: 15 scored tokens in 3 windows"),
        (
            {"kld": {"mean": 0.5}},
            r"is of another run than the quality file beside it: its mean kld is 0\.\d+, expected",
        ),
        ({"ppl": 2.0}, r"its mean logprob is -\d.\d+, expected -0.693147181"),
    ],
)
def test_scores_of_other_figures_are_refused(changes: dict[str, Any], said: str, file: Path) -> None:
    with pytest.raises(MeasurementError, match=f"a.npz.+{said}.+Run dvc repro"):
        load(file, QUALITY | changes)


@pytest.mark.parametrize("key", ARRAYS)
def test_an_array_of_another_shape_is_refused(key: str, file: Path) -> None:
    np.savez(file, **ARRAYS | {key: ARRAYS[key][:, :3]})
    with pytest.raises(MeasurementError, match=rf"{key} has the shape \[3, 3\], expected \[3, 4\]"):
        load(file, QUALITY)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_figures_that_are_not_finite_are_refused(bad: float, file: Path) -> None:
    kld = ARRAYS["kld"].copy()
    kld[1, 1] = bad
    np.savez(file, **ARRAYS | {"kld": kld})
    with pytest.raises(MeasurementError, match=f"its mean kld is {bad}"):
        load(file, QUALITY)
