"""Importance matrices as files: what llama.cpp's reader and gguf-py read of ours, and what is refused of others'."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFReader, GGUFWriter

from pipeline.errors import ArtifactError
from pipeline.formats.gguf import imatrix as imatrices
from pipeline.formats.gguf.imatrix import Imatrix
from pipeline.types import Calibration, Sums

ATTENTION, EXPERTS = "blk.0.attn_q.weight", "blk.0.ffn_gate_exps.weight"
IDS = np.arange(96, dtype=np.int32).reshape(3, 32)


def sums(matrices: int, columns: int, tokens: Sequence[int]) -> Sums:
    found = np.random.default_rng(columns).random((matrices, columns)).astype(np.float32) * 50
    return Sums(np.where(np.array(tokens)[:, None] > 0, found, np.float32(0)), np.array(tokens, np.int64))


@pytest.fixture
def matrix() -> Imatrix:
    """A matrix, and four experts of which one was never activated."""
    tensors = {EXPERTS: sums(4, 32, [60, 0, 96, 36]), ATTENTION: sums(1, 64, [96])}
    return Imatrix(tensors, ("text.txt",), 3, 32, Calibration("text.txt", "ab" * 32, "cd" * 32, IDS))


def theirs(path: Path, tensors: dict[str, np.ndarray], keys: dict[str, Any] | None = None) -> Path:
    """A file as llama-imatrix writes it, by gguf-py."""
    writer = GGUFWriter(path, "")
    writer.add_type("imatrix")
    known = {"imatrix.datasets": ["a.txt", "b.txt"], "imatrix.chunk_count": 3, "imatrix.chunk_size": 32}
    for key, value in (known if keys is None else keys).items():
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_uint32(key, value)
    for name, array in tensors.items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def plain(**change: np.ndarray) -> dict[str, np.ndarray]:
    """Sums and counts of one matrix, with some changed."""
    return {
        f"{ATTENTION}.in_sum2": change.get("sums", np.ones((1, 64), np.float32)),
        f"{ATTENTION}.counts": change.get("counts", np.full((1, 1), 96, np.float32)),
    }


def test_what_is_written_is_read(matrix: Imatrix, tmp_path: Path) -> None:
    imatrices.write(tmp_path / "imatrix.gguf", matrix)
    found = imatrices.read(tmp_path / "imatrix.gguf")
    assert list(found.tensors) == [ATTENTION, EXPERTS]
    for name, expected in matrix.tensors.items():
        assert found.tensors[name].sums.dtype == np.float32
        assert np.array_equal(found.tensors[name].sums, expected.sums)
        assert np.array_equal(found.tensors[name].tokens, expected.tokens)
    assert (found.datasets, found.chunks, found.chunk_size) == (("text.txt",), 3, 32)
    calibration = found.calibration
    assert calibration is not None
    assert (calibration.name, calibration.text_sha256, calibration.tokenizer_sha256) == (
        "text.txt",
        "ab" * 32,
        "cd" * 32,
    )
    assert np.array_equal(calibration.ids, IDS)


def test_gguf_py_reads_what_llama_imatrix_would_have_written(matrix: Imatrix, tmp_path: Path) -> None:
    imatrices.write(tmp_path / "imatrix.gguf", matrix)
    reader = GGUFReader(tmp_path / "imatrix.gguf")
    assert [(tensor.name, tensor.shape.tolist(), tensor.tensor_type.name) for tensor in reader.tensors] == [
        (f"{ATTENTION}.in_sum2", [64, 1], "F32"),
        (f"{ATTENTION}.counts", [1, 1], "F32"),
        (f"{EXPERTS}.in_sum2", [32, 4], "F32"),
        (f"{EXPERTS}.counts", [1, 4], "F32"),
    ]
    assert np.array_equal(reader.tensors[2].data, matrix.tensors[EXPERTS].sums)
    assert reader.tensors[3].data.ravel().tolist() == [60, 0, 96, 36]
    keys = {
        key: field.contents() for key, field in reader.fields.items() if not key.startswith(("GGUF.", "quantgate."))
    }
    assert keys == {
        **{"general.type": "imatrix", "imatrix.datasets": ["text.txt"]},
        **{"imatrix.chunk_count": 3, "imatrix.chunk_size": 32},
    }


def test_importance_is_the_mean_square_and_1_where_no_token_was_routed(matrix: Imatrix) -> None:
    found, given = matrix.tensors[EXPERTS].importance, matrix.tensors[EXPERTS].sums
    assert found.dtype == np.float32
    assert np.array_equal(found[[0, 2, 3]], given[[0, 2, 3]] / np.array([60, 96, 36], np.float32)[:, None])
    assert np.array_equal(found[1], np.ones(32, np.float32))


def test_a_file_of_others_is_read(tmp_path: Path) -> None:
    counts = np.array([[95.5], [0], [7]], np.float32)  # the reader of llama.cpp rounds them
    tensors = {f"{EXPERTS}.in_sum2": np.full((3, 16), 4, np.float32), f"{EXPERTS}.counts": counts}
    found = imatrices.read(theirs(tmp_path / "theirs.gguf", plain() | tensors | {"other": np.ones(3, np.float32)}))
    assert list(found.tensors) == [ATTENTION, EXPERTS]
    assert found.tensors[EXPERTS].tokens.tolist() == [96, 0, 7]
    assert (found.datasets, found.chunks, found.chunk_size) == (("a.txt", "b.txt"), 3, 32)
    assert found.calibration is None


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b"\2\0\0\0\3\0\0\0abc"), r"llama-imatrix --in-file old.dat -o old.gguf"),
        (lambda p: p.mkdir(), "old.dat is not a file. Give the path of an importance matrix"),
        (lambda p: None, "old.dat is not a file. Give the path of an importance matrix"),
        (lambda p: p.write_bytes(b"GGUF" + bytes(20)), "is no GGUF file that ggml can read"),
        (lambda p: theirs(p, plain(), {}), "of type imatrix without imatrix.chunk_count, .*chunk_size, .*datasets"),
        (
            lambda p: theirs(p, plain(), {"imatrix.datasets": ["a"], "imatrix.chunk_count": "3"}),
            "without imatrix.chunk_count, imatrix.chunk_size: no importance matrix",
        ),
        (lambda p: theirs(p, {"token_embd.weight": np.ones((2, 2), np.float32)}), "that holds no sums: no importance"),
    ],
)
def test_what_is_no_importance_matrix_is_refused(write: Callable[[Path], Any], message: str, tmp_path: Path) -> None:
    write(tmp_path / "old.dat")
    with pytest.raises(ArtifactError, match=message):
        imatrices.read(tmp_path / "old.dat")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sums": np.array([[1, -1, np.nan, np.inf]], np.float32)}, "3 of 4 sums are negative or not finite"),
        ({"counts": np.array([[-1]], np.float32)}, "1 of 1 counts are negative or not finite"),
        ({"counts": np.ones((3, 1), np.float32)}, "64 sums do not divide into 3 matrices"),
        ({"sums": np.ones((1, 64), np.float16)}, "expected F32, found F16 and F32"),
    ],
)
def test_sums_that_cannot_be_are_refused(change: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    path = theirs(tmp_path / "theirs.gguf", plain(**change))
    with pytest.raises(ArtifactError, match=f"{ATTENTION}: {message}"):
        imatrices.read(path)


def test_all_that_is_wrong_is_listed(tmp_path: Path) -> None:
    tensors = plain(counts=np.full((1, 1), np.nan, np.float32))
    tensors |= {f"blk.{i}.attn_k.weight.in_sum2": np.ones((1, 4), np.float32) for i in range(8)}
    with pytest.raises(ArtifactError) as raised:
        imatrices.read(theirs(tmp_path / "theirs.gguf", tensors))
    absent = [f"  - blk.{i}.attn_k.weight: blk.{i}.attn_k.weight.counts is absent" for i in range(4)]
    first, second, *rest = str(raised.value).splitlines()[1:7]
    assert second == f"  - {ATTENTION}: 1 of 1 counts are negative or not finite"
    assert [first, *rest] == [*absent, "  - … and 4 more like these"]


def test_an_importance_matrix_of_another_model_is_refused(matrix: Imatrix) -> None:
    fitting = {ATTENTION: (10, 64), EXPERTS: (4, 7, 32), "blk.0.attn_k.weight": (5, 64)}
    imatrices.check(Path("i.gguf"), matrix, fitting)
    with pytest.raises(ArtifactError) as raised:
        imatrices.check(Path("i.gguf"), matrix, {ATTENTION: (10, 32), EXPERTS: (6, 7, 32)})
    assert str(raised.value).splitlines()[:3] == [
        "i.gguf is of another model:",
        f"  - {EXPERTS}: expected 32 inputs of 6 matrices, found 32 inputs of 4 matrices",
        f"  - {ATTENTION}: expected 32 inputs of 1 matrix, found 64 inputs of 1 matrix",
    ]
    halves = {EXPERTS: sums(2, 64, [60, 36])}  # as many sums, but of two matrices
    with pytest.raises(ArtifactError, match="expected 32 inputs of 4 matrices, found 64 inputs of 2 matrices"):
        imatrices.check(Path("i.gguf"), replace(matrix, tensors=halves), fitting)
    whole = {EXPERTS: sums(1, 128, [96])}  # one count for all experts, as older files have it
    imatrices.check(Path("i.gguf"), replace(matrix, tensors=whole), fitting)
    with pytest.raises(ArtifactError, match=r"i.gguf has none of the model's matrices: it has blk.0.ffn_gate_exps"):
        imatrices.check(Path("i.gguf"), matrix, {"blk.9.attn_q.weight": (10, 64)})


def test_an_embedding_of_another_size_goes_without(matrix: Imatrix) -> None:
    """As llama-quantize has it."""
    tensors = {**matrix.tensors, "token_embd.weight": sums(1, 16, [96])}
    imatrices.check(
        Path("i.gguf"), replace(matrix, tensors=tensors), {ATTENTION: (10, 64), "token_embd.weight": (9, 64)}
    )


def test_reading_needs_no_torch() -> None:
    code = "import sys, pipeline.formats.gguf.imatrix; print({'torch', 'gguf', 'llama_cpp'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
