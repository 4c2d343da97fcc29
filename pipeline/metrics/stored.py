"""Scores per token as the stage `evaluate` left them, checked against the figures that were made of them."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from pipeline.errors import MeasurementError
from pipeline.files import reading
from pipeline.types import Scores

AGAIN = "Run dvc repro; where it finds nothing to do, remove the files of artifacts/ first."
BROKEN = (BadZipFile, EOFError, KeyError, MemoryError, NotImplementedError, RuntimeError, TypeError, ValueError)
"""What NumPy and zipfile raise for a file that is no archive of arrays, or is cut short or changed."""
SAME, LEAST = 1e-6, 1e-12  # relative and absolute: the order of a sum changes fewer digits, another run more


def load(path: Path, quality: Mapping[str, Any]) -> Scores:
    """The scores [windows, scored] of a .npz, which `quality` (of quality.json) is a summary of.

    Raises:
        MeasurementError: the file is absent or broken, of another shape or of another run than `quality`.
        KeyError, TypeError: `quality` lacks a figure, or holds something else.
    """
    try:
        with reading(path, MeasurementError), path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            scores = Scores(arrays["logprob"], arrays["kld"], arrays["same_top"])
    except MeasurementError as error:
        raise MeasurementError(f"{error} {AGAIN}") from error
    except (*BROKEN, zlib.error) as error:
        raise MeasurementError(f"{path} holds no scores per token, or is broken ({error}). {AGAIN}") from error
    windows, tokens = quality["windows"], quality["scored_tokens"]
    expected = (windows, tokens // windows)
    for key, array in vars(scores).items():
        if array.shape != expected:
            raise MeasurementError(
                f"{path}: {key} has the shape {list(array.shape)}, expected {list(expected)}: {tokens} scored tokens "
                f"in {windows} windows. {AGAIN}"
            )
    figures = {"kld": quality["kld"]["mean"], "logprob": -math.log(quality["ppl"])}
    for key, value in figures.items():
        found = float(vars(scores)[key].mean(dtype=np.float64))
        if not math.isclose(found, value, rel_tol=SAME, abs_tol=LEAST):
            raise MeasurementError(
                f"{path} is of another run than the quality file beside it: its mean {key} is {found:.9g}, expected "
                f"{value:.9g}. {AGAIN}"
            )
    return scores
