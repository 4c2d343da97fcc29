"""Importance matrices through the stages: fetch, imatrix, matrices, convert, evaluate."""

from __future__ import annotations

import hashlib
import json
import shutil
from contextlib import chdir
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner, Result
from support import Shape, write_checkpoint

from pipeline.formats.gguf import imatrix
from pipeline.types import Sums

SCORED = "In the beginning the heath there then held the thin inn. " * 20
OWN = "A quiet river ran past seven old mills, and none of them had ever seen a king or a clock. " * 8
PLAIN = {"format": "gguf", "scheme": "q4_0"}
OFF = {"own": None}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stage(project: Path, name: str, *arguments: str) -> Result:
    """A stage run in the project, without what it left before, as DVC does."""
    left = {name: name for name in ("corpus", "imatrix", "reference")} | {"convert": f"variants/{''.join(arguments)}"}
    if name in left:
        shutil.rmtree(project / "artifacts" / left[name], ignore_errors=True)
    with chdir(project):
        return CliRunner().invoke(import_module(f"stages.{name}").main, arguments)


def ran(project: Path, *names: str) -> None:
    for name in names:
        result = stage(project, *name.split())
        assert result.exit_code == 0, result.output or repr(result.exception)


def refused(project: Path, name: str) -> str:
    result = stage(project, *name.split())
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2
    return " ".join(result.stderr.split())


def write_params(project: Path, calibration: dict[str, Any], variants: dict[str, Any]) -> None:
    params = {
        "checkpoint": "source",
        "revision": None,
        "corpus": {"name": "file", "path": "scored.txt", "windows": 4, "context": 64},
        "calibration": calibration,
        "variants": variants,
        "evaluate": {},
        "benchmark": {},
        "gate": {},
    }
    (project / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def read(project: Path, name: str) -> Any:
    return json.loads((project / "artifacts" / name).read_text())


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    project = tmp_path_factory.mktemp("project")
    write_checkpoint(project / "source", Shape("qwen3"))
    (project / "scored.txt").write_text(SCORED)
    (project / "own.txt").write_text(OWN)
    return project


def test_off_it_is_a_few_bytes_always_the_same(project: Path) -> None:
    contents = []
    for variants in ({"a": PLAIN}, {"b": PLAIN, "c": {**PLAIN, "imatrix": False}}):
        write_params(project, {"path": "own.txt"}, variants)
        ran(project, "fetch", "imatrix", "matrices")
        assert read(project, "imatrix.json") == dict.fromkeys(variants)
        assert [path.name for path in (project / "artifacts" / "imatrix").iterdir()] == ["meta.json"]
        contents.append((project / "artifacts" / "imatrix" / "meta.json").read_bytes())
        assert read(project, "calibration.json") == OFF
    assert contents[0] == contents[1]
    assert json.loads(contents[0]) == OFF


def test_a_variant_is_made_by_the_pipeline_s_own(project: Path) -> None:
    write_params(
        project, {"path": "own.txt", "windows": 2, "context": 64}, {"imat": {**PLAIN, "imatrix": True}, "a": PLAIN}
    )
    ran(project, "fetch", "imatrix", "matrices", "convert imat", "convert a")
    own = {"name": "own.txt", "sha256": sha256(project / "own.txt"), "windows": 2, "context": 64}
    assert read(project, "calibration.json") == {"own": own}
    file = project / "artifacts" / "imatrix" / "imatrix.gguf"
    assert read(project, "imatrix/meta.json") == {"own": {"sha256": sha256(file), "matrices": 14, "experts": []}}
    assert read(project, "imatrix.json") == {"imat": sha256(file), "a": None}
    builds = read(project, "builds.json")
    assert builds["imat"] == builds["a"] | {"imatrix": True}
    made = read(project, "variants/imat/artifact.json")
    assert made["scheme"] == "q4_0+imatrix"
    assert made["imatrix"]["sha256"] == sha256(file)
    assert made["imatrix"]["text_sha256"] == own["sha256"]
    plain = read(project, "variants/a/artifact.json")
    assert plain["imatrix"] is None
    assert plain["tensors_sha256"] != made["tensors_sha256"]


def test_fetch_sees_another_calibration_text(project: Path) -> None:
    write_params(project, {"path": "changed.txt", "windows": 2, "context": 64}, {"imat": {**PLAIN, "imatrix": True}})
    seen = []
    for content in (OWN, OWN + "."):
        (project / "changed.txt").write_text(content)
        ran(project, "fetch")
        seen.append(read(project, "calibration.json")["own"]["sha256"])
    assert seen == [hashlib.sha256(content.encode()).hexdigest() for content in (OWN, OWN + ".")]


def test_a_file_of_others_is_taken_and_its_overlap_is_not_known(project: Path) -> None:
    write_params(project, {"path": "own.txt", "windows": 2, "context": 64}, {"imat": {**PLAIN, "imatrix": True}})
    ran(project, "fetch", "imatrix")
    own = imatrix.read(project / "artifacts" / "imatrix" / "imatrix.gguf")
    theirs = imatrix.Imatrix(
        {name: Sums(found.sums, found.tokens) for name, found in own.tensors.items()}, ("x",), 2, 64
    )
    imatrix.write(project / "theirs.gguf", theirs)
    write_params(project, {}, {"imat": {**PLAIN, "imatrix": "theirs.gguf"}})
    ran(project, "fetch", "corpus", "imatrix", "matrices", "convert imat", "reference", "evaluate imat")
    digest = sha256(project / "theirs.gguf")
    assert read(project, "builds.json")["imat"]["imatrix"] == digest
    assert read(project, "calibration.json") == read(project, "imatrix/meta.json") == OFF
    assert read(project, "imatrix.json") == {"imat": digest}
    assert read(project, "variants/imat/artifact.json")["imatrix"]["text_sha256"] is None
    assert read(project, "quality/imat.json")["calibration_overlap"] == "not known"


def test_an_overlap_with_the_corpus_is_refused_when_it_is_evaluated(project: Path) -> None:
    """Whose windows may change without another matrix."""
    write_params(project, {"path": "own.txt", "windows": 2, "context": 64}, {"imat": {**PLAIN, "imatrix": True}})
    (project / "scored.txt").write_text(SCORED[:100] + OWN)
    try:
        ran(project, "fetch", "corpus", "imatrix", "convert imat", "reference")
        said = refused(project, "evaluate imat")
    finally:
        (project / "scored.txt").write_text(SCORED)
    assert "own.txt of artifacts/variants/imat overlaps the scored text: 32 tokens in a row are in both" in said


def test_fetch_refuses_the_scored_text_itself(project: Path) -> None:
    write_params(project, {"path": "scored.txt"}, {"imat": {**PLAIN, "imatrix": True}})
    assert "params.yaml: calibration.path scored.txt is the very text that is scored" in refused(project, "fetch")


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"format": "mlx", "scheme": "int4", "imatrix": True}, "imatrix: mlx artifacts are made without one"),
        ({"format": "coreml", "scheme": "int8", "imatrix": True}, "imatrix: coreml artifacts are made without one"),
        ({"format": "gguf", "scheme": "f16", "imatrix": True}, "imatrix: f16 quantizes nothing"),
        ({**PLAIN, "imatrix": "absent.gguf"}, "absent.gguf is not a file. Give the path of an importance matrix"),
        ({**PLAIN, "imatrix": "own.txt"}, "own.txt is no GGUF file. If it is an importance matrix of the older kind"),
    ],
)
def test_fetch_refuses_what_convert_would(variant: dict[str, Any], message: str, project: Path) -> None:
    write_params(project, {"path": "own.txt"}, {"imat": variant})
    assert message in refused(project, "fetch")


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose rows hold a block of 256, with importance data for one matrix, and of another model."""
    project = tmp_path_factory.mktemp("wide")
    write_checkpoint(project / "source", Shape("qwen3", hidden=256, ff=256))
    for text in ("scored.txt", "own.txt"):
        (project / text).write_text({"own.txt": OWN}.get(text, SCORED))
    for name, columns in (("one.gguf", 256), ("other.gguf", 96)):
        sums = Sums(np.ones((1, columns), np.float32), np.ones(1, np.int64))
        imatrix.write(project / name, imatrix.Imatrix({"blk.0.attn_q.weight": sums}, ("x",), 1, 8))
    return project


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        (
            {**PLAIN, "types": {"token_embd": "iq2_xs"}, "imatrix": True},
            "variants.imat: q4_0+token_embd=iq2_xs needs more than the importance matrix holds for 1 tensors: "
            "- token_embd.weight: IQ2_XS",
        ),
        (
            {**PLAIN, "types": {"attn_q": "iq2_xs"}, "imatrix": "one.gguf"},
            "q4_0+attn_q=iq2_xs needs more than the importance matrix holds for 1 tensors: - attn_q.weight: IQ2_XS",
        ),
        ({**PLAIN, "imatrix": "other.gguf"}, "blk.0.attn_q.weight: expected 256 inputs of 1 matrix, found 96 inputs"),
    ],
)
def test_fetch_refuses_what_an_importance_matrix_does_not_hold(
    variant: dict[str, Any], message: str, wide: Path
) -> None:
    """Before a matrix is computed, which may take hours."""
    write_params(wide, {"path": "own.txt"}, {"imat": variant})
    assert message in refused(wide, "fetch")


def test_fetch_takes_what_an_importance_matrix_holds(wide: Path) -> None:
    write_params(
        wide,
        {"path": "own.txt"},
        {
            "own": {**PLAIN, "types": {"attn_q": "iq2_xs"}, "imatrix": True},
            "theirs": {**PLAIN, "types": {r"blk\.0\.attn_q": "iq2_xs"}, "imatrix": "one.gguf"},
        },
    )
    ran(wide, "fetch")


def test_fetch_refuses_an_absent_calibration_text(project: Path) -> None:
    write_params(project, {"path": "absent.txt"}, {"imat": {**PLAIN, "imatrix": True}})
    assert "absent.txt is not a file. Give the path of a UTF-8 text." in refused(project, "fetch")
