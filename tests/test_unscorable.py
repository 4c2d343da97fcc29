"""Artifacts that the machine has not the memory to score are refused before hours of work."""

from __future__ import annotations

import json
from contextlib import chdir
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner
from commands import refused, squeezed
from support import Shape, write_checkpoint

from pipeline import artifact
from pipeline.formats import memory_problem
from pipeline.formats.coreml import native
from pipeline.formats.mlx import engine
from stages import fetch

TEXT = "In the beginning the heath there then held the thin inn. " * 20
NEEDED = (
    "scored off Apple Silicon its weights take 0 GB in float32, this machine has 0 GB of memory. Evaluate it on a Mac"
)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = {"max_position_embeddings": 300, "torch_dtype": "bfloat16"}
    return write_checkpoint(tmp_path_factory.mktemp("unscorable") / "source", Shape("qwen2"), config=config)


def have(weights: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine, no Mac, whose memory holds just as many weights in float32."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(total=4 * weights))
    monkeypatch.setattr(engine, "has_gpu", lambda: False)
    monkeypatch.setattr(native, "missing", lambda: "there is no Core ML here")


def fetched(source: Path, folder: Path) -> Any:
    variants = {
        "a": {"format": "mlx", "scheme": "int4"},
        "b": {"format": "gguf", "scheme": "q4_0"},
        "c": {"format": "coreml", "scheme": "int8"},
    }
    given: dict[str, Any] = {
        "checkpoint": str(source),
        "revision": None,
        "variants": variants,
        "evaluate": {},
        "benchmark": {},
        "gate": {},
    }
    given["corpus"] = {"name": "file", "path": "scored.txt", "windows": 2, "context": 64}
    (folder / "params.yaml").write_text(yaml.safe_dump(given))
    (folder / "scored.txt").write_text(TEXT)
    with chdir(folder):
        return CliRunner().invoke(fetch.main)


def test_memory_is_counted_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    have(6_000_000_000, monkeypatch)
    assert memory_problem(6_000_000_000) is None
    assert memory_problem(27_000_000_000) == (
        "scored off Apple Silicon its weights take 108 GB in float32, this machine has 24 GB of memory. Evaluate it on "
        "a Mac, or on a larger machine."
    )


def test_fetch_names_every_variant_that_could_not_be_scored(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    have(100, monkeypatch)
    said = fetched(source, tmp_path)
    assert said.exit_code == 2
    assert squeezed(f"params.yaml: variants.a, variants.c: {NEEDED}") in squeezed(said.stderr)


def test_a_machine_that_holds_them_scores_them(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    have(1_000_000, monkeypatch)
    said = fetched(source, tmp_path)
    assert said.exit_code == 0, said.output or repr(said.exception)
    assert sorted(json.loads((tmp_path / "artifacts" / "builds.json").read_text())) == ["a", "b", "c"]


@pytest.mark.parametrize(("format_name", "scheme"), [("mlx", "int8"), ("coreml", "int8")])
def test_evaluate_refuses_them_before_the_reference_is_made(
    format_name: str, scheme: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    artifact.convert(source, format_name, scheme, tmp_path / "made")
    (tmp_path / "scored.txt").write_text(TEXT)
    have(100, monkeypatch)
    monkeypatch.setattr("pipeline.evaluation.stored_reference", lambda question: pytest.fail("the reference was made"))
    asked = ["--corpus", tmp_path / "scored.txt", "--context", 64, "--checkpoint", source]
    assert squeezed(f"made: {NEEDED}") in squeezed(refused("evaluate", tmp_path / "made", *asked))
