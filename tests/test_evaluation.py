"""An artifact is scored against the reference of its own checkpoint and windows, or not at all."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, write_checkpoint

from pipeline import artifact
from pipeline.errors import ArtifactError, MeasurementError
from pipeline.evaluation import evaluate
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_forward import Reference, load_reference, reference_meta, write_reference
from pipeline.types import Windows

SETTINGS = {"threads": 2, "flash_attention": False, "kv_type": "f16"}
KEYS = ("text_sha256", "tokenizer_sha256", "ids_sha256", "context", "windows")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("evaluation") / "source", Shape("qwen3"))


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    artifact.convert(source, "gguf", "q8_0", source.parent / "q8_0")
    return source.parent / "q8_0"


@pytest.fixture(scope="module")
def windows() -> Windows:
    ids = np.random.default_rng(0).integers(0, 272, (3, 40)).astype(np.int32)
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(3, 30))


@pytest.fixture(scope="module")
def reference(source: Path, windows: Windows) -> Reference:
    with Checkpoint(source) as checkpoint:
        write_reference(checkpoint, checkpoint.identity(), windows, source.parent / "reference")
        return load_reference(source.parent / "reference", checkpoint)


def changed(reference: Reference, **meta: Any) -> Reference:
    return dataclasses.replace(reference, meta=reference.meta | meta)


def test_figures_say_what_they_are_of(made: Path, windows: Windows, reference: Reference) -> None:
    found, scores = evaluate(made, artifact.load(made), windows, reference, SETTINGS)
    loaded = artifact.load(made)
    assert found["artifact"] == loaded.files
    assert found["parity"] is None  # llama.cpp scored
    assert found["identity"] == reference_meta(loaded.source, windows)
    assert found["identity"] == {k: v for k, v in reference.meta.items() if k not in {"engine", "model"}}
    assert reference.meta["model"]["active_weights"] == loaded.weights
    assert (found["engine"]["name"], found["engine"]["threads"]) == ("llama.cpp", 2)
    assert scores.kld.shape == (3, 19)
    assert found["kld"]["max"] == scores.kld.max()


def test_the_source_is_that_of_the_artifact(made: Path, windows: Windows, reference: Reference) -> None:
    """Of the same files under another name: the figures hold, and say the artifact's own."""
    other = changed(reference, source=reference.meta["source"] | {"name": "copy"})
    found, _ = evaluate(made, artifact.load(made), windows, other, SETTINGS)
    assert found["identity"]["source"]["name"] == "source"


def test_an_artifact_of_other_files_than_the_references_is_refused(
    made: Path, windows: Windows, reference: Reference
) -> None:
    files = reference.meta["source"]["files"] | {"model.safetensors": "00" * 32}
    other = changed(reference, source={"name": "other", "revision": None, "files": files})
    with pytest.raises(ArtifactError) as caught:
        evaluate(made, artifact.load(made), windows, other, SETTINGS)
    assert str(caught.value) == (
        f"{made} was made from source with other files than the reference's checkpoint other has. "
        "Convert it again, or give the checkpoint it was made from."
    )


@pytest.mark.parametrize("key", KEYS)
def test_a_reference_of_other_windows_is_refused_by_key(
    key: str, made: Path, windows: Windows, reference: Reference
) -> None:
    expected = reference.meta[key]
    with pytest.raises(MeasurementError) as caught:
        evaluate(made, artifact.load(made), windows, changed(reference, **{key: "other"}), SETTINGS)
    assert str(caught.value) == (
        f"the reference is of other windows: {key} is other, the corpus has {expected}. Run the reference again."
    )


def test_each_key_of_other_windows_is_named(made: Path, windows: Windows, reference: Reference) -> None:
    """In one message, the same in every run."""
    fewer = dataclasses.replace(windows, ids=windows.ids[:2], span_bytes=windows.span_bytes[:2])
    with pytest.raises(MeasurementError) as caught:
        evaluate(made, artifact.load(made), fewer, reference, SETTINGS)
    for key in ("ids_sha256", "windows"):
        assert f"{key} is {reference.meta[key]}" in str(caught.value)
