"""Paths with spaces, other letters, and bytes that are no UTF-8, from the first command to the last stage."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import succeeded
from support import Shape, write_checkpoint

TEXT = "In the beginning the heath there then held the thin inn. " * 40
NAMES = ["Qwén 白 model", " 'quoted' \"$x\" [red]", os.fsdecode(b"Qw\xe9n latin-1")]


@pytest.mark.parametrize("name", NAMES, ids=["letters", "signs", "bytes"])
def test_every_command(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if sys.platform == "darwin" and "\udce9" in name:
        pytest.skip("macOS has no file names that are no UTF-8")
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    source, out = write_checkpoint(folder / name, Shape("qwen3")), folder / "où ça" / name
    text, file = folder / f"{name}.txt", folder / f"{name}.json"
    text.write_text(TEXT)
    succeeded("inspect", source, "--scheme", "q8_0", "--json", file)
    assert json.loads(file.read_text())["checkpoint"] == os.fsencode(name).decode(errors="replace")
    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", out)
    for artifact in (out, out / "model.gguf"):
        evaluated = (
            "evaluate",
            artifact,
            "--checkpoint",
            source,
            "--corpus",
            text,
            "--context",
            "16",
            "--windows",
            "2",
        )
        succeeded(*evaluated, "--json", file)
        assert json.loads(file.read_text())["windows"] == 2
    timed = ("benchmark", out, "--prompt-length", "4", "--decode", "1", "--rounds", "1")
    succeeded(*timed, "--json", file)
    (measured,) = json.loads(file.read_text())["variants"].values()
    assert len(measured["prefill"]["4"]["seconds"]) == 1
    assert not list(folder.rglob("*partial*"))


def test_every_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import benchmark, convert, corpus, evaluate, fetch, gate, machine, reference, report

    project = tmp_path / "mein Projekt 白"
    source = write_checkpoint(project / "Qwén 'x' model", Shape("qwen3"))
    (project / "ein Text.txt").write_text(TEXT)
    (project / "params.yaml").write_text(
        f'checkpoint: "{source.name}"\nrevision: null\n'
        "corpus: {name: file, path: ein Text.txt, windows: 3, context: 16}\n"
        "variants: {q8: {format: gguf, scheme: q8_0}, given: {format: gguf, path: das Modell.gguf}}\nevaluate: {}\n"
        "benchmark: {prompt_lengths: [4], decode: 1, rounds: 1}\ngate: {limits: {default: {max_kld_mean: 0.5}}}\n"
    )
    monkeypatch.chdir(project)
    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", tmp_path / "made")
    os.rename(tmp_path / "made" / "model.gguf", project / "das Modell.gguf")
    each = [(stage, [name]) for name in ("q8", "given") for stage in (convert, evaluate)]
    for stage, arguments in [
        *((stage, list[str]()) for stage in (fetch, corpus, reference, machine)),
        *each,
        *((stage, list[str]()) for stage in (benchmark, report, gate)),
    ]:
        result = CliRunner().invoke(stage.main, arguments, catch_exceptions=False)
        assert result.exit_code == 0, result.output
    assert json.loads(Path("artifacts/source.json").read_text())["name"] == source.name
    assert source.name in Path("reports/pareto.md").read_text()
    assert json.loads(Path("reports/gate.json").read_text())["verdict"] == "pass"
