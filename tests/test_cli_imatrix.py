"""`quantgate imatrix`, `convert --imatrix`, and `evaluate` of what was calibrated on the scored text."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import chdir
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from commands import refused, run, squeezed, succeeded
from family import tiny
from support import Shape, write_checkpoint

from pipeline import artifact, evaluation
from pipeline.errors import ArtifactError, CorpusError
from pipeline.formats.gguf import imatrix
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference
from pipeline.types import Windows

OWN = "A quiet river ran past seven old mills, and none of them had ever seen a king or a clock. " * 8
CONTEXT = ("--windows", 2, "--context", 64)


@pytest.fixture(scope="module")
def calibration(source: Path) -> Path:
    path = source.parent / "own.txt"
    path.write_text(OWN)
    return path


@pytest.fixture(scope="module")
def computed(source: Path, calibration: Path, text: Path) -> Path:
    out = source.parent / "own.gguf"
    result = succeeded("imatrix", source, "--corpus", calibration, *CONTEXT, "--scored", text, "--out", out)
    said = result.stdout.splitlines()
    assert said == [f"{out}: 14 matrices, over 2 windows of 64 tokens of own.txt", f"no overlap with {text}"]
    return out


@pytest.fixture(scope="module")
def calibrated(source: Path, computed: Path) -> Path:
    out = source.parent / "q4_0-imat"
    arguments = ("convert", source, "--format", "gguf", "--scheme", "q4_0", "--imatrix", computed, "--out", out)
    said = " ".join(succeeded(*arguments).stdout.split())
    assert f"{out}: gguf q4_0+imatrix, " in said
    assert "importance matrix of own.txt, 2 chunks of 64 tokens, for 14 matrices; 1 went without: token_embd" in said
    assert "not known" not in said
    return out


def test_the_file_says_what_it_was_computed_from(source: Path, calibration: Path, computed: Path) -> None:
    found = imatrix.read(computed)
    assert (found.datasets, found.chunks, found.chunk_size) == (("own.txt",), 2, 64)
    assert found.calibration is not None
    assert found.calibration.text_sha256 == hashlib.sha256(calibration.read_bytes()).hexdigest()
    ids = Tokenizer(source).encode(OWN)[: 2 * 64]
    assert np.array_equal(found.calibration.ids, ids.reshape(2, 64))
    assert {tuple(sums.tokens) for sums in found.tensors.values()} == {(128,)}


def test_it_is_the_same_again(source: Path, calibration: Path, computed: Path, tmp_path: Path) -> None:
    succeeded("imatrix", source, "--corpus", calibration, *CONTEXT, "--out", tmp_path / "again.gguf")
    assert (tmp_path / "again.gguf").read_bytes() == computed.read_bytes()


def test_artifact_json_holds_its_identity(source: Path, calibration: Path, computed: Path, calibrated: Path) -> None:
    found = json.loads((calibrated / "artifact.json").read_text())
    assert found["scheme"] == "q4_0+imatrix"
    assert found["imatrix"] == {
        "sha256": hashlib.sha256(computed.read_bytes()).hexdigest(),
        "datasets": ["own.txt"],
        "chunks": 2,
        "chunk_size": 64,
        "text_sha256": hashlib.sha256(calibration.read_bytes()).hexdigest(),
        "tokenizer_sha256": Tokenizer(source).sha256,
        "matrices": 14,
        "without": ["token_embd.weight"],
        "experts": [],
        "file": None,
    }


def test_the_ids_of_its_text_lie_beside_the_weights(source: Path, calibrated: Path) -> None:
    found = json.loads((calibrated / "artifact.json").read_text())
    file = calibrated / "calibration.npy"
    assert [*found["files"]] == ["model.gguf", "calibration.npy"]  # the first is what is run
    assert found["files"]["calibration.npy"] == hashlib.sha256(file.read_bytes()).hexdigest()
    assert found["folder_bytes"] == (calibrated / "model.gguf").stat().st_size  # what is shipped
    ids = np.load(file)
    assert ids.dtype == np.int32
    assert np.array_equal(ids, Tokenizer(source).encode(OWN)[: 2 * 64].reshape(2, 64))


def test_without_one_artifact_json_says_null(made: Path) -> None:
    assert json.loads((made / "artifact.json").read_text())["imatrix"] is None


def test_experts_that_no_token_reached_are_told(calibration: Path, tmp_path: Path) -> None:
    checkpoint = tiny("qwen3_moe", tmp_path / "tiny", experts=40, num_hidden_layers=2)
    out = tmp_path / "imatrix.gguf"
    arguments = ("imatrix", checkpoint, "--corpus", calibration, "--windows", 1, "--context", 8, "--out", out)
    with chdir(tmp_path):  # where no params.yaml names a scored text
        said = " ".join(succeeded(*arguments).stdout.split())
    idle = [use.experts - use.activated for use in imatrix.experts(imatrix.read(out))]
    assert all(24 <= count < 40 for count in idle)  # 8 tokens reach at most 16 of them
    assert f"experts without any token, whose inputs count alike: layer 0: {idle[0]} of 40, layer 1: {idle[1]}" in said
    assert "compared with no scored text: name it by --scored" in said
    succeeded("convert", checkpoint, "--format", "gguf", "--scheme", "q4_0", "--imatrix", out, "--out", tmp_path / "o")


def test_a_text_that_overlaps_the_scored_one_is_refused(source: Path, calibration: Path, tmp_path: Path) -> None:
    scored = tmp_path / "scored.txt"
    for content, reason in (
        (OWN, "it is the same text"),
        (f"More. {OWN[200:400]} More." * 2, "32 tokens in a row are"),
    ):
        scored.write_text(content)
        arguments = ("imatrix", source, "--corpus", calibration, *CONTEXT, "--scored", scored)
        said = refused(*arguments, "--out", tmp_path / "new" / "out.gguf")
        assert squeezed(f"the calibration text own.txt overlaps the scored text: {reason}") in squeezed(said)
    assert list(tmp_path.iterdir()) == [scored]


def test_the_scored_text_of_params_yaml_may_not_overlap(source: Path, calibration: Path, tmp_path: Path) -> None:
    corpus = {"name": "file", "path": str(calibration), "windows": 1, "context": 64}
    params = {
        "checkpoint": "x",
        "revision": None,
        "corpus": corpus,
        "variants": {"a": {"format": "gguf", "scheme": "f32"}},
    }
    params |= {"evaluate": {}, "benchmark": {}, "gate": {}}
    (tmp_path / "params.yaml").write_text(json.dumps(params))
    with chdir(tmp_path):
        said = refused("imatrix", source, "--corpus", calibration, *CONTEXT, "--out", "out.gguf")
    assert squeezed("overlaps the scored text: it is the same text") in squeezed(said)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--windows", 500, "--context", 64), "500 windows need 32000 tokens"),
        (("--context", 5000), "a context of 5000 tokens cannot be scored"),
    ],
)
def test_a_text_that_is_too_short_is_refused(
    arguments: tuple[object, ...], message: str, source: Path, calibration: Path, tmp_path: Path
) -> None:
    said = refused("imatrix", source, "--corpus", calibration, *arguments, "--out", tmp_path / "new" / "out.gguf")
    assert squeezed(message) in squeezed(said)
    assert list(tmp_path.iterdir()) == []


def test_a_checkpoint_that_is_not_whole_leaves_no_folder(source: Path, calibration: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(source, broken)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"intermediate_size": config["intermediate_size"] * 2}))
    said = refused("imatrix", broken, "--corpus", calibration, *CONTEXT, "--out", tmp_path / "new" / "out.gguf")
    assert squeezed("mlp.down_proj.weight") in squeezed(said)
    assert list(tmp_path.iterdir()) == [broken]


def test_an_output_that_is_not_called_a_gguf_file_is_refused(source: Path, calibration: Path, tmp_path: Path) -> None:
    said = refused("imatrix", source, "--corpus", calibration, *CONTEXT, "--out", tmp_path / "new" / "out.dat")
    assert squeezed(f"{tmp_path}/new/out.dat is a GGUF file to be: name it out.gguf.") in squeezed(said)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_exists_is_refused(source: Path, calibration: Path, computed: Path) -> None:
    before = computed.read_bytes()
    said = refused("imatrix", source, "--corpus", calibration, *CONTEXT, "--out", computed)
    assert squeezed(f"{computed} exists. Remove it or name another output file.") in squeezed(said)
    assert computed.read_bytes() == before


@pytest.mark.parametrize(
    ("format_name", "scheme", "message"),
    [
        ("mlx", "int4", "imatrix: mlx artifacts are made without one. Only gguf schemes use it."),
        ("coreml", "int8", "imatrix: coreml artifacts are made without one. Only gguf schemes use it."),
        ("gguf", "bf16", "imatrix: bf16 quantizes nothing, so no input weighs more. Take it away."),
    ],
)
def test_what_has_no_use_for_it_is_refused(
    format_name: str, scheme: str, message: str, source: Path, computed: Path, tmp_path: Path
) -> None:
    arguments = ("convert", source, "--format", format_name, "--scheme", scheme, "--imatrix", computed)
    assert squeezed(message) in squeezed(refused(*arguments, "--out", tmp_path / "out"))
    assert list(tmp_path.iterdir()) == []


def test_one_of_another_model_is_refused(computed: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", Shape("qwen3", hidden=96))
    arguments = ("convert", other, "--format", "gguf", "--scheme", "q4_0", "--imatrix", computed)
    said = refused(*arguments, "--out", tmp_path / "out")
    assert squeezed("blk.0.attn_q.weight: expected 96 inputs of 1 matrix, found 64 inputs of 1 matrix") in squeezed(
        said
    )
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("content", "reason"),
    [(OWN, "it is the same text"), (f"More. {OWN[200:400]} More." * 2, "32 tokens in a row are in both, from its")],
)
def test_scoring_on_the_calibration_text_is_refused(
    content: str, reason: str, source: Path, calibrated: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the reference is computed, which may take hours."""
    monkeypatch.setattr(evaluation, "write_reference", None)
    scored = tmp_path / "scored.txt"
    scored.write_text(content)
    arguments = ("evaluate", calibrated, "--checkpoint", source, "--corpus", scored, "--context", 64)
    expected = f"the calibration text own.txt of {calibrated} overlaps the scored text: {reason}"
    assert squeezed(expected) in squeezed(refused(*arguments))
    arguments = (*arguments, "--until-decided", "--max-kld-mean", "1")
    assert squeezed(expected) in squeezed(refused(*arguments))


def test_a_stored_reference_of_an_overlapping_text_is_refused(source: Path, calibrated: Path) -> None:
    """As the stage evaluates, whose windows and reference lie there."""
    loaded = artifact.load(calibrated)
    ids = np.load(calibrated / "calibration.npy")[:, :40]
    scored = Windows("sample", "ab" * 32, Tokenizer(source).sha256, ids, np.full(2, 20))
    reference = Reference.__new__(Reference)
    with pytest.raises(CorpusError, match="overlaps the scored corpus sample: 32 tokens in a row are in both"):
        evaluation.check_identity(calibrated, loaded, scored, reference)


def test_ids_of_another_kind_are_refused(source: Path, calibrated: Path, tmp_path: Path) -> None:
    loaded = artifact.load(calibrated)
    np.save(tmp_path / "calibration.npy", np.zeros(3, np.float32))
    with pytest.raises(
        ArtifactError, match=r"calibration.npy: expected int32 \[windows, context\], found float32 \[3\]"
    ):
        artifact.calibration(tmp_path, loaded)


def test_another_text_may_be_scored(source: Path, calibrated: Path, text: Path, tmp_path: Path) -> None:
    file = tmp_path / "quality.json"
    arguments = ("evaluate", calibrated, "--checkpoint", source, "--corpus", text, "--context", 64, "--windows", 2)
    said = squeezed(succeeded(*arguments, "--json", file).stdout)
    found = json.loads(file.read_text())
    assert found["kld"]["mean"] > 0
    assert found["calibration_overlap"] == "none"
    said = squeezed(succeeded(*arguments).stdout)
    assert squeezed("overlap with the scored text: none") in said


@pytest.mark.parametrize("others", ["no text", "another tokenizer"])
def test_an_overlap_that_cannot_be_known_is_told(
    others: str, source: Path, computed: Path, text: Path, tmp_path: Path
) -> None:
    ours = imatrix.read(computed)
    assert ours.calibration is not None
    calibration = None if others == "no text" else replace(ours.calibration, tokenizer_sha256="00" * 32)
    imatrix.write(tmp_path / "theirs.gguf", replace(ours, calibration=calibration))
    out = tmp_path / "out"
    by = ("--imatrix", tmp_path / "theirs.gguf", "--out", out)
    said = squeezed(succeeded("convert", source, "--format", "gguf", "--scheme", "q4_0", *by).stdout)
    assert (squeezed("overlap with the scored text: not known") in said) == (calibration is None)
    arguments = ("evaluate", out, "--checkpoint", source, "--corpus", text, "--context", 64, "--windows", 2)
    until = ("--until-decided", "--max-kld-mean", "9")
    for more in ((), until):
        said = squeezed(run(*arguments, *more).stdout)
        assert squeezed("calibration overlap with the scored text: not known") in said
