"""Files that others made with an importance matrix say so, and that nobody knows what text it was of."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from commands import succeeded
from gguf import GGUFValueType
from rewriting import rewrite
from support import Shape, write_checkpoint

from pipeline import artifact as artifacts
from pipeline.formats.gguf import reader
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import UsedImatrix

SAID: dict[str, str | int] = {
    "quantize.imatrix.file": "/mnt/disk/models/theirs.imatrix",
    "quantize.imatrix.dataset": "/mnt/disk/texts/calibration v3.txt",
    "quantize.imatrix.entries_count": 14,
    "quantize.imatrix.chunks_count": 125,
}
TEXT, INT, UINT, FLOAT = GGUFValueType.STRING, GGUFValueType.INT32, GGUFValueType.UINT32, GGUFValueType.FLOAT32


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("given") / "source", Shape("qwen3", hidden=256, ff=256))


@pytest.fixture(scope="module")
def plain(source: Path) -> Path:
    """Our own of bf16, made by no importance matrix."""
    artifacts.convert(source, "gguf", "bf16", source.parent / "bf16")
    return source.parent / "bf16" / "model.gguf"


@pytest.fixture(scope="module")
def theirs(plain: Path) -> Path:
    """What llama-quantize makes of it with an importance matrix."""
    random, matrices = np.random.default_rng(0), [tensor for tensor in reader.table(plain) if len(tensor.shape) > 1]
    importance = {tensor.name: random.uniform(0.1, 1, tensor.shape[1]).astype(np.float32) for tensor in matrices}
    target = plain.with_name("theirs.gguf")
    return oracle.quantize(plain, SCHEMES["q4_k_m"].ftype, target, importance=importance, keys=SAID)


def test_llama_quantizes_own_file_says_its_importance_matrix(theirs: Path) -> None:
    assert {key: oracle.field(theirs, key) for key in SAID} == SAID
    found = artifacts.describe(theirs, "gguf", None)
    assert found.imatrix == UsedImatrix(datasets=("calibration v3.txt",), chunks=125, file="theirs.imatrix")
    assert "/home/me" not in json.dumps(asdict(found))
    assert found.scheme == "q4_k_m"


def test_a_file_made_by_none_says_none(plain: Path) -> None:
    assert artifacts.describe(plain, "gguf", None).imatrix is None


def test_its_description_reads_back(theirs: Path, source: Path, tmp_path: Path) -> None:
    with Checkpoint(source) as checkpoint:
        taken = artifacts.take(theirs, "gguf", checkpoint, tmp_path / "out")
    assert taken.imatrix is not None
    assert artifacts.load(tmp_path / "out") == taken


def test_whether_its_text_is_the_scored_one_is_told_to_be_unknown(theirs: Path, source: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("In the beginning the heath there then held the thin inn. " * 10)
    arguments = ("--corpus", text, "--context", 32, "--windows", 2, "--threads", 1, "--json", tmp_path / "q.json")
    lines = succeeded("evaluate", theirs, "--checkpoint", source, *arguments).stdout.splitlines()
    assert json.loads((tmp_path / "q.json").read_text())["calibration_overlap"] == "not known"
    (line,) = [line.split() for line in lines if line.strip().startswith("calibration")]
    assert line == ["calibration", "overlap", "with", "the", "scored", "text:", "not", "known"]


UNKNOWN = UsedImatrix()


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"file": (r"C:\Users\me\theirs.dat", TEXT)}, UsedImatrix(file="theirs.dat")),
        ({"dataset": ("wiki.txt", TEXT)}, UsedImatrix(datasets=("wiki.txt",))),
        ({"chunks_count": (3, INT)}, UsedImatrix(chunks=3)),  # as earlier versions of llama-quantize wrote it
        ({"chunks_count": (-1, INT)}, UNKNOWN),
        ({"chunks_count": (0, UINT), "entries_count": (14, UINT)}, UNKNOWN),
        ({"chunks_count": (True, GGUFValueType.BOOL)}, UNKNOWN),
        ({"chunks_count": (2.0, FLOAT)}, UNKNOWN),
        ({"file": (7, UINT), "dataset": (1.0, FLOAT), "chunks_count": ("many", TEXT)}, UNKNOWN),
        ({"file": ("/mnt/disk/", TEXT), "dataset": ("", TEXT)}, UNKNOWN),  # no part of it but folders
        ({"dataset": ("/mnt/disk/a\x1b[31m\nb.txt", TEXT)}, UsedImatrix(datasets=("a[31mb.txt",))),
        ({"file": ("x" * 4000, TEXT)}, UsedImatrix(file="x" * 127)),
    ],
)
def test_what_is_absent_or_of_another_type_says_nothing(
    said: dict[str, Any], expected: UsedImatrix, plain: Path, tmp_path: Path
) -> None:
    file = rewrite(plain, tmp_path / "model.gguf", {f"quantize.imatrix.{key}": value for key, value in said.items()})
    assert artifacts.describe(file, "gguf", None).imatrix == expected
