"""Files that others made score as ours do, and say what they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from gguf import GGMLQuantizationType, GGUFValueType
from rewriting import replaced, rewrite, split, tensors_of, zeros
from support import Shape, write_checkpoint

from pipeline import artifact as artifacts
from pipeline.errors import ArtifactError
from pipeline.evaluation import evaluate
from pipeline.files import sha256
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_forward import Reference, load_reference, write_reference
from pipeline.types import Artifact, EffectiveType, Scores, Windows

SETTINGS = {"threads": 1, "flash_attention": False, "kv_type": "f16"}
SHAPE = Shape("qwen3", hidden=256, ff=256)
KIND = GGMLQuantizationType


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("given") / "source", SHAPE)


@pytest.fixture(scope="module")
def ours(source: Path) -> Callable[[str], Path]:
    """The folder of our artifact of a scheme, made once."""

    def convert(scheme: str) -> Path:
        out = source.parent / scheme
        if not out.exists():
            artifacts.convert(source, "gguf", scheme, out)
        return out

    return convert


@pytest.fixture(scope="module")
def theirs(source: Path, ours: Callable[[str], Path]) -> Callable[[str], Path]:
    """What llama-quantize makes of the bf16 file."""

    def quantize(scheme: str) -> Path:
        target = source.parent / f"theirs-{scheme}.gguf"
        if not target.exists():
            oracle.quantize(ours("bf16") / "model.gguf", SCHEMES[scheme].ftype, target)
        return target

    return quantize


@pytest.fixture(scope="module")
def score(source: Path) -> Callable[[Path], tuple[dict[str, Any], Scores]]:
    """Scores of a folder or file on the same three windows."""
    ids = np.random.default_rng(0).integers(0, 263, (3, 40)).astype(np.int32)
    windows = Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(3, 30))
    with Checkpoint(source) as checkpoint:
        write_reference(checkpoint, checkpoint.identity(), windows, source.parent / "reference")
        reference: Reference = load_reference(source.parent / "reference", checkpoint)

    @cache
    def scored(place: Path) -> tuple[dict[str, Any], Scores]:
        with Checkpoint(source) as checkpoint:
            return evaluate(place, artifacts.load(place, checkpoint), windows, reference, SETTINGS)

    return scored


def described(path: Path, source: Path) -> Artifact:
    with Checkpoint(source) as checkpoint:
        return artifacts.describe(path, "gguf", checkpoint)


def assert_same_scores(found: tuple[dict[str, Any], Scores], expected: tuple[dict[str, Any], Scores]) -> None:
    for key, values in asdict(expected[1]).items():
        np.testing.assert_array_equal(getattr(found[1], key), values)
    assert {**found[0], "artifact": None} == {**expected[0], "artifact": None}


# what others made scores as what it is


@pytest.mark.parametrize("scheme", ["q4_k_m", "iq4_xs"])
def test_llama_cpps_own_file_is_ours_in_tensors_and_scores(
    scheme: str, source: Path, ours: Callable[[str], Path], theirs: Callable[[str], Path], score: Callable[..., Any]
) -> None:
    file, folder = theirs(scheme), ours(scheme)
    given, made = described(file, source), artifacts.load(folder)
    assert file.read_bytes() != (folder / "model.gguf").read_bytes()  # the headers differ
    assert given.tensors_sha256 == made.tensors_sha256
    same = ("format", "scheme", "weights", "bits_per_weight", "effective_types", "source")
    assert {key: getattr(given, key) for key in same} == {key: getattr(made, key) for key in same}
    assert (given.files, given.size_bytes) == ({file.name: sha256(file)}, file.stat().st_size)
    assert (given.path, given.platform, given.tools) == (str(file), "made elsewhere", {})
    figures = score(file)
    assert_same_scores(figures, score(folder))
    assert figures[0]["artifact"] == given.files
    assert figures[0]["kld"]["mean"] > 0


def test_a_split_set_scores_as_the_whole_file(
    source: Path, ours: Callable[[str], Path], score: Callable[..., Any], tmp_path: Path
) -> None:
    """Given by its middle part, of which alone llama.cpp would load nothing."""
    whole = ours("q4_k_m") / "model.gguf"
    parts = split(whole, tmp_path)
    assert_same_scores(score(parts[1]), score(whole))
    given, made = described(parts[1], source), described(whole, source)
    assert given.files == {part.name: sha256(part) for part in parts}
    assert given.size_bytes == sum(part.stat().st_size for part in parts)
    assert (given.tensors_sha256, given.scheme) == (made.tensors_sha256, "q4_k_m")
    assert (given.weights, given.bits_per_weight) == (made.weights, made.bits_per_weight)


def test_a_file_without_extension_is_one_as_any(
    source: Path, theirs: Callable[[str], Path], score: Callable[..., Any], tmp_path: Path
) -> None:
    """Ollama names its files by their hash."""
    blob = tmp_path / "blobs" / f"sha256-{'ab' * 32}"
    blob.parent.mkdir()
    blob.write_bytes(theirs("q8_0").read_bytes())
    assert_same_scores(score(blob), score(theirs("q8_0")))


def test_two_schemes_that_fall_back_to_the_same_types_have_the_same_tensors(tmp_path: Path) -> None:
    """On rows of 64 weights Q2_K and Q3_K are both Q4_0: two names of one artifact."""
    narrow = write_checkpoint(tmp_path / "narrow", Shape("qwen3"))
    made = {name: artifacts.convert(narrow, "gguf", name, tmp_path / name) for name in ("q2_k", "q3_k_s", "q4_k_s")}
    assert made["q2_k"].files != made["q3_k_s"].files
    assert made["q2_k"].tensors_sha256 == made["q3_k_s"].tensors_sha256 != made["q4_k_s"].tensors_sha256


# what it says of itself


@pytest.mark.parametrize(
    ("file_type", "name"),
    [(15, "q4_k_m"), (0, "f32"), (36, "tq1_0"), (31, "iq1_m"), (38, "mxfp4_moe"), (999, "unknown"), (None, "unknown")],
)
def test_the_scheme_is_the_files_own_file_type(
    file_type: int | None, name: str, source: Path, ours: Callable[[str], Path], tmp_path: Path
) -> None:
    value = None if file_type is None else (file_type, GGUFValueType.UINT32)
    path = rewrite(ours("q8_0") / "model.gguf", tmp_path / "a.gguf", {"general.file_type": None})
    if value:
        path = rewrite(path, tmp_path / "b.gguf", {"general.file_type": value})
    assert described(path, source).scheme == name


@pytest.mark.parametrize(
    ("kind", "bits"),
    [(KIND.TQ1_0, 54 * 8 / 256), (KIND.MXFP4, 4.25), (KIND.IQ3_S, 110 * 8 / 256)],
)
def test_types_that_no_scheme_has_are_counted_and_scored(
    kind: KIND, bits: float, source: Path, ours: Callable[[str], Path], score: Callable[..., Any], tmp_path: Path
) -> None:
    other = zeros("blk.1.ffn_up.weight", (256, 256), kind)
    path = rewrite(ours("f32") / "model.gguf", tmp_path / "a.gguf", change=replaced(other))
    given = described(path, source)
    whole = given.weights
    assert given.effective_types == {"F32": EffectiveType(23, whole - 65_536), kind.name: EffectiveType(1, 65_536)}
    assert given.bits_per_weight == pytest.approx((32 * (whole - 65_536) + bits * 65_536) / whole, rel=1e-12)
    assert score(path)[0]["kld"]["mean"] > 0


def test_a_tied_checkpoints_file_may_hold_the_head_as_well(
    source: Path, ours: Callable[[str], Path], score: Callable[..., Any], tmp_path: Path
) -> None:
    file = ours("f32") / "model.gguf"
    head = replace(next(t for t in tensors_of(file) if t.name == "token_embd.weight"), name="output.weight")
    path = rewrite(file, tmp_path / "a.gguf", change=lambda tensors: [*tensors, head])
    assert described(path, source).weights == described(file, source).weights + 272 * 256
    assert_same_scores(score(path), score(file))


def test_a_file_compared_with_no_checkpoint_has_no_source(ours: Callable[[str], Path]) -> None:
    found = artifacts.load(ours("q8_0") / "model.gguf")
    assert (found.source, found.scheme) == (None, "q8_0")


# described in a folder


def test_a_description_reads_back_and_names_the_file(
    source: Path, theirs: Callable[[str], Path], tmp_path: Path
) -> None:
    with Checkpoint(source) as checkpoint:
        taken = artifacts.take(theirs("q8_0"), "gguf", checkpoint, tmp_path / "out")
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["artifact.json"]  # no copy
    assert artifacts.load(tmp_path / "out") == taken == described(theirs("q8_0"), source)
    assert artifacts.location(tmp_path / "out", taken) == theirs("q8_0").parent
    assert json.loads((tmp_path / "out" / "artifact.json").read_text())["path"] == str(theirs("q8_0"))


def test_a_file_that_changed_after_it_was_described_is_refused(
    source: Path, theirs: Callable[[str], Path], tmp_path: Path
) -> None:
    file = tmp_path / "a.gguf"
    file.write_bytes(theirs("q8_0").read_bytes())
    with Checkpoint(source) as checkpoint:
        taken = artifacts.take(file, "gguf", checkpoint, tmp_path / "out")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(ArtifactError) as caught:
        artifacts.load(tmp_path / "out")
    assert str(caught.value) == (
        f"{file} is not what artifact.json says: expected sha256 {taken.files['a.gguf']}, found {sha256(file)}. "
        "Fetch it again, then run dvc repro."
    )
    file.unlink()
    with pytest.raises(ArtifactError, match=r"a\.gguf is absent\. Fetch it again"):
        artifacts.load(tmp_path / "out")


def test_nothing_is_left_where_a_file_is_refused(source: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"no")
    with Checkpoint(source) as checkpoint, pytest.raises(ArtifactError):
        artifacts.take(tmp_path / "a.gguf", "gguf", checkpoint, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


def test_an_artifact_json_of_an_earlier_version_is_refused(ours: Callable[[str], Path], tmp_path: Path) -> None:
    raw = json.loads((ours("q8_0") / "artifact.json").read_text())
    del raw["tensors_sha256"]
    (tmp_path / "artifact.json").write_text(json.dumps(raw))
    with pytest.raises(ArtifactError, match=r"is not as this version writes it \(.*tensors_sha256.*\)"):
        artifacts.load(tmp_path)
