"""Manifest.json against the one that coremltools writes, the metadata of a package, and what is not measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipeline.errors import PipelineError
from pipeline.formats.coreml import given, manifest
from pipeline.formats.coreml.engine import tools
from pipeline.formats.coreml.plan import Sizes


def test_a_manifest_is_the_one_that_coremltools_writes(tmp_path: Path) -> None:
    tools()
    from coremltools.libmodelpackage import ModelPackage

    (tmp_path / "m").write_bytes(b"model")
    (tmp_path / "w").mkdir()
    theirs = ModelPackage(str(tmp_path / "theirs.mlpackage"))
    root = theirs.setRootModel(str(tmp_path / "m"), "model.mlmodel", "com.apple.CoreML", "CoreML Model Specification")
    weights = theirs.addItem(str(tmp_path / "w"), "weights", "com.apple.CoreML", "CoreML Model Weights")
    del theirs  # which writes it
    ours = manifest.text("model.mlmodel", "a" * 64, "weights", ["b" * 64, "c" * 64])
    found = json.loads(ours)
    own_root = found["rootModelIdentifier"]
    (own_weights,) = found["itemInfoEntries"].keys() - {own_root}
    expected = (tmp_path / "theirs.mlpackage" / "Manifest.json").read_text()
    assert json.loads(ours.replace(own_root, root).replace(own_weights, weights)) == json.loads(expected)
    assert sorted(ours.replace(own_root, root).replace(own_weights, weights).splitlines()) == sorted(
        expected.splitlines()
    )


def test_identifiers_follow_contents() -> None:
    texts = {
        manifest.text("model.mlmodel", model * 64, "weights", [digest * 64 for digest in weights])
        for model in "ab"
        for weights in ("c", "d", "cd")
    }
    assert len(texts) == 6
    assert manifest.text("m", "a", "w", ["b"]) == manifest.text("m", "a", "w", ["b"])


def test_metadata() -> None:
    assert manifest.metadata("int8+chunk=64", Sizes(64, 200, 100), "Qwen/x") == {
        "quantgate.scheme": "int8+chunk=64",
        "quantgate.source": "Qwen/x",
        "quantgate.chunk": "64",
        "quantgate.max_context": "200",
        "quantgate.score_window": "100",
    }


def test_packages_of_others_are_refused() -> None:
    for ask in (given.hashes, lambda path: given.describe(path, None)):
        with pytest.raises(PipelineError, match=r"^a/b\.mlpackage: Core ML packages that others made .*fp16, int16"):
            ask(Path("a/b.mlpackage"))
