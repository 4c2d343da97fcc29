"""What a run is compared with a baseline by: the same of both."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import paths
from pipeline.checks.identity import IDENTITY, mapping
from pipeline.errors import MeasurementError
from pipeline.files import read_object
from pipeline.metrics import stored

ENGINE = ("name", "version", "instruction_set", "device", "kv_type", "flash_attention")
"""What of an engine decides the digits of a score; threads and batches do not (measured)."""
SAME = 1e-9
"""Relative: the order of a sum changes fewer digits."""


@dataclass(frozen=True)
class Record:
    """One variant as one engine scored it.

    `files` and `tensors` are those of the artifact: sha256 by file name, type and hash by tensor name. `engine` is what
    decides the digits of a score (see `engine_key`), `identity` the source, corpus, tokenizer and windows. `window_nll`
    is the mean loss of each window, nats per token, in float64 over the float32 losses of its tokens.
    """

    format: str
    scheme: str
    path: str | None
    files: Mapping[str, str]
    tensors: Mapping[str, str]
    engine: Mapping[str, Any]
    identity: Mapping[str, Any]
    window_nll: tuple[float, ...]

    def is_of(self, figures: Mapping[str, Any]) -> bool:
        """Whether a variant of measurements.json has the perplexity of these windows, by this engine."""
        ppl, engine = mapping(figures, "ppl").get("value"), mapping(figures, "engine")
        mean = math.fsum(self.window_nll) / len(self.window_nll)
        same = isinstance(ppl, float) and math.isclose(ppl, math.exp(mean), rel_tol=SAME)
        return same and all(engine.get(key) == self.engine[key] for key in ENGINE)


def engine_key(engine: Mapping[str, Any]) -> tuple[str, ...]:
    """The values of ENGINE: records with the same one are of the same digits where nothing else differs.

    Of a version the releases count, not the commit in brackets: git abbreviates it as it likes, and calls an unpacked
    release dirty or unknown.
    """
    return tuple(re.sub(r" \([^)]*\)", "", str(engine[key])) for key in ENGINE)


def window_nll(logprob: NDArray[np.floating]) -> tuple[float, ...]:
    """Mean loss of each window of log-probabilities [windows, scored], as metrics.quality.summarize has it."""
    return tuple((-logprob.mean(axis=1, dtype=np.float64)).tolist())


def gather(names: Iterable[str], root: Path = Path()) -> dict[str, Record]:
    """The records of this run, from what the stages left below `root`; without those that have a `problem`.

    Raises:
        PipelineError: a file that cannot be read.
        MeasurementError: one that is not as this version writes it.
    """
    return {name: read(name, root) for name in names if problem(name, root) is None}


def problem(name: str, root: Path = Path()) -> str | None:
    """Why there is no record of a variant: a stage that left nothing, or figures of another artifact.

    Raises:
        PipelineError: artifact.json, or what the scores left, is broken.
    """
    places = (paths.variant(name) / "artifact.json", paths.quality(name), paths.scores(name))
    if absent := [str(place) for place in places if not (root / place).is_file()]:
        return f"{', '.join(absent)} is absent: run dvc repro"
    files, scored = (read_object(root / places[0]).get("files"), read_object(root / places[1]).get("artifact"))
    return None if files == scored else "its scores are of another artifact than artifact.json names: run dvc repro"


def read(name: str, root: Path = Path()) -> Record:
    """The record of one variant without a `problem`.

    Raises: as `gather`.
    """
    artifact = read_object(root / paths.variant(name) / "artifact.json")
    quality = read_object(root / paths.quality(name))
    try:
        return Record(
            format=artifact["format"],
            scheme=artifact["scheme"],
            path=artifact["path"],
            files=artifact["files"],
            tensors=artifact["tensors"],
            engine={key: quality["engine"][key] for key in ENGINE},
            identity={key: quality["identity"][key] for key in IDENTITY},
            window_nll=window_nll(stored.load(root / paths.scores(name), quality).logprob),
        )
    except (KeyError, TypeError) as error:
        raise MeasurementError(
            f"artifact.json or quality of {name} is not as this version writes it ({type(error).__name__}: {error}). "
            f"{stored.AGAIN}"
        ) from error
