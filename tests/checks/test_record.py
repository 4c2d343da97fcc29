"""The record of a run: what it is made of, and what is none."""

from __future__ import annotations

import math
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from figures import ENGINE, IDENTITY
from left import FILES, LOGPROB, edit, leave, write_scores

from pipeline import paths
from pipeline.checks import record
from pipeline.checks.record import engine_key
from pipeline.errors import MeasurementError
from pipeline.metrics import quality
from pipeline.torch_forward import Reference
from pipeline.types import Engine, Scores, Windows


def test_a_record_holds_what_the_stages_left(tmp_path: Path) -> None:
    leave(tmp_path, ["a", "b"])
    found = record.gather(["a", "b"], tmp_path)
    assert list(found) == ["a", "b"]
    assert (found["a"].format, found["a"].scheme, found["a"].path) == ("gguf", "q4_0", None)
    assert found["a"].files == FILES
    assert found["a"].tensors == {"output.weight": "Q4_0 0123456789abcdef"}
    assert found["a"].identity == IDENTITY
    assert found["a"].engine == {
        key: ENGINE[key] for key in ("name", "version", "instruction_set", "device", "kv_type", "flash_attention")
    }
    assert engine_key(found["a"].engine) == ("llama.cpp", "b1", "AVX2", "cpu", "f16", "off")


def test_window_losses_are_exact_means_in_float64(tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    losses = record.read("a", tmp_path).window_nll
    assert len(losses) == 40
    for i, loss in enumerate(losses):
        assert loss == pytest.approx(-math.fsum(map(float, LOGPROB[i])) / 255, rel=1e-15)


def test_their_mean_is_the_perplexity_of_quality_json(tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    logprob = LOGPROB[:, :19]
    windows = Windows("sample", "ab" * 32, "cd" * 32, np.zeros((40, 40), np.int32), np.full(40, 30))
    reference = Reference(np.zeros((40, 19, 1), np.float32), logprob, None, {"text_sha256": "ab" * 32})  # type: ignore[arg-type]
    scores = Scores(logprob, np.zeros_like(logprob), np.ones(logprob.shape, np.bool_))
    found = quality.summarize(scores, reference, windows, Engine(**ENGINE))
    assert math.exp(np.mean(record.window_nll(logprob))) == found["ppl"]


@pytest.mark.parametrize("absent", ["variants/a/artifact.json", "quality/a.json", "scores/a.npz"])
def test_a_variant_that_lacks_a_file_is_left_out(absent: str, tmp_path: Path) -> None:
    leave(tmp_path, ["a", "b"])
    (tmp_path / "artifacts" / absent).unlink()
    assert list(record.gather(["a", "b"], tmp_path)) == ["b"]
    assert record.problem("a", tmp_path) == f"artifacts/{absent} is absent: run dvc repro"


def test_scores_of_another_artifact_are_no_record(tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    edit(tmp_path / paths.quality("a"), lambda found: found.update(artifact={"model.gguf": "00" * 32}))
    assert record.gather(["a"], tmp_path) == {}
    assert record.problem("a", tmp_path) == (
        "its scores are of another artifact than artifact.json names: run dvc repro"
    )


@pytest.mark.parametrize(
    ("logprob", "said"),
    [
        (
            LOGPROB[:39],
            r"scores/a\.npz: logprob has the shape \[39, 255\], expected \[40, 255\]: 10200 scored tokens",
        ),
        (LOGPROB.reshape(-1), r"the shape \[10200\], expected"),
        (np.where(LOGPROB < -7.99, np.nan, LOGPROB), r"scores/a\.npz is of another run .*: its mean logprob is nan"),
    ],
)
def test_scores_that_cannot_be_true_are_refused(logprob: np.ndarray, said: str, tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    write_scores(tmp_path, "a", logprob)
    with pytest.raises(MeasurementError, match=said):
        record.gather(["a"], tmp_path)


def npy() -> bytes:
    file = BytesIO()
    np.save(file, LOGPROB)
    return file.getvalue()


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04 no zip", b"\x93NUMPY", npy()])
def test_a_broken_scores_file_is_refused(content: bytes, tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    (tmp_path / paths.scores("a")).write_bytes(content)
    with pytest.raises(MeasurementError, match=r"scores/a\.npz holds no scores per token, or is broken"):
        record.gather(["a"], tmp_path)


def test_files_of_an_earlier_version_are_refused(tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    edit(tmp_path / paths.variant("a") / "artifact.json", lambda found: found.pop("tensors"))
    with pytest.raises(MeasurementError, match=r"of a is not as this version writes it .KeyError: 'tensors'"):
        record.gather(["a"], tmp_path)
