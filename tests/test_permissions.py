"""Files and folders that may not be read, written or entered: exit code 2, the path, the next step, nothing left."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from commands import refused
from conftest import ROOT, TEXT
from rights import WITHOUT, mode, without_privilege

READ_ONLY, NOT_TO_ENTER, NOTHING = 0o555, 0o666, 0o000
SHORT = ("--windows", "1", "--context", "16")


@pytest.fixture(autouse=True)
def bound() -> Iterator[None]:
    with without_privilege():
        yield


def said_of(*arguments: object) -> str:
    return " ".join(refused(*arguments).split())


def convert(source: Path, out: Path) -> str:
    return said_of("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", out)


def test_permissions_bind_this_process(tmp_path: Path) -> None:
    """Else nothing below could fail."""
    (tmp_path / "a").write_text("x")
    with mode(tmp_path / "a", NOTHING), pytest.raises(PermissionError):
        (tmp_path / "a").read_text()


# Outputs


def test_a_read_only_parent_of_the_output(source: Path, tmp_path: Path) -> None:
    with mode(tmp_path, READ_ONLY):
        said = convert(source, tmp_path / "out")
        assert f"{tmp_path} cannot be written: Permission denied. Choose a folder that can, or give" in said
    assert list(tmp_path.iterdir()) == []


def test_an_output_in_a_folder_that_may_not_be_entered(source: Path, tmp_path: Path) -> None:
    with mode(tmp_path, NOT_TO_ENTER):
        assert f"{tmp_path} cannot be written: Permission denied" in convert(source, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_an_existing_output_that_is_read_only(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    with mode(out, READ_ONLY):
        assert f"{out} exists. Remove it or name another" in convert(source, out)
    assert list(tmp_path.iterdir()) == [out]


def test_what_a_killed_run_of_another_user_left(source: Path, tmp_path: Path) -> None:
    left = tmp_path / ".out.partial"
    left.mkdir()
    (left / "half").write_text("x")
    with mode(left, NOTHING):
        assert f"{tmp_path} cannot be written: Permission denied" in convert(source, tmp_path / "out")


@pytest.mark.parametrize("name", ["a.json", "new/a.json"])
def test_json_that_could_not_be_written_is_refused_before_the_work(
    name: str, made: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.evaluation.evaluate_place", lambda *arguments: pytest.fail("worked"))
    monkeypatch.setattr("pipeline.benchmarking.benchmark_folders", lambda *arguments: pytest.fail("worked"))
    with mode(tmp_path, READ_ONLY):
        for command in (
            ["inspect", source],
            ["schemes"],
            ["evaluate", made, "--checkpoint", source],
            ["benchmark", made],
        ):
            said = said_of(*command, "--json", tmp_path / name)
            assert f"{tmp_path / name} cannot be written: no right to write in {tmp_path}. Choose a folder" in said
    assert list(tmp_path.iterdir()) == []


def test_json_below_a_file_is_refused_before_the_work(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    said = said_of("inspect", source, "--json", tmp_path / "file" / "a.json")
    assert f"cannot be written: {tmp_path / 'file'} is not a folder" in said


# The cache, which holds references and hashes


@pytest.mark.parametrize("bits", [READ_ONLY, NOT_TO_ENTER, NOTHING])
def test_a_cache_that_cannot_be_used_says_which_variable_names_another(
    bits: int, made: Path, source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    with mode(cache, bits):
        evaluate = said_of("evaluate", made, "--checkpoint", source, "--corpus", text, *SHORT)
        for said in (evaluate, convert(source, tmp_path / "out")):
            assert str(cache) in said
            assert "XDG_CACHE_HOME" in said
    assert list(cache.iterdir()) == []
    assert list(tmp_path.iterdir()) == [cache]


def test_a_reference_that_cannot_be_kept(
    made: Path, source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    references = tmp_path / "quantgate" / "references"
    references.mkdir(parents=True)
    with mode(references, READ_ONLY):
        said = said_of("evaluate", made, "--checkpoint", source, "--corpus", text, *SHORT)
    assert f"{references} cannot be written: Permission denied" in said
    assert "set XDG_CACHE_HOME" in said
    assert list(references.iterdir()) == []


# Inputs


@pytest.mark.parametrize(
    "name", ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
)
def test_a_file_of_the_checkpoint_that_may_not_be_read(name: str, source: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    if not (copy / name).exists():
        (copy / name).write_text("{}")
    with mode(copy / name, NOTHING):
        said = convert(copy, tmp_path / "out")
        assert f"{copy / name} cannot be read: Permission denied. Give yourself the right to read it" in said
        assert not (tmp_path / "out").exists()
    assert list(tmp_path.iterdir()) == [copy]


@pytest.mark.parametrize("bits", [NOT_TO_ENTER, NOTHING])
@pytest.mark.parametrize("inner", ["", "inner"])
def test_a_checkpoint_folder_that_may_not_be_entered(bits: int, inner: str, source: Path, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    shutil.copytree(source, folder / inner, dirs_exist_ok=True)
    with mode(folder, bits):
        for said in (said_of("inspect", folder / inner), convert(folder / inner, tmp_path / "out")):
            assert str(folder / inner) in said
            assert "cannot be read: Permission denied. Give yourself the right to read it" in said
    assert list(tmp_path.iterdir()) == [folder]


def test_a_corpus_that_may_not_be_read(made: Path, source: Path, tmp_path: Path) -> None:
    inner = tmp_path / "inner"
    inner.mkdir()
    text = inner / "text.txt"
    text.write_text(TEXT)
    for path, bits in ((text, NOTHING), (inner, NOTHING)):
        with mode(path, bits):
            said = said_of("evaluate", made, "--checkpoint", source, "--corpus", text, *SHORT)
        assert f"{text} cannot be read: Permission denied. Give yourself the right to read it" in said


@pytest.mark.parametrize("name", ["", "artifact.json", "model.gguf"])
def test_an_artifact_that_may_not_be_read(name: str, made: Path, source: Path, text: Path, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(made, tmp_path / "copy"))
    with mode(copy / name, NOTHING):
        evaluate = said_of("evaluate", copy, "--checkpoint", source, "--corpus", text, *SHORT)
        for said in (evaluate, said_of("benchmark", copy)):
            assert str(copy / name) in said
            assert "Permission denied. Give yourself the right to read it" in said


def test_a_weight_file_that_may_not_be_read(made: Path, source: Path, text: Path, tmp_path: Path) -> None:
    file = Path(shutil.copy(made / "model.gguf", tmp_path))
    with mode(file, NOTHING):
        evaluate = said_of("evaluate", file, "--checkpoint", source, "--corpus", text, *SHORT)
        for said in (evaluate, said_of("benchmark", file)):
            assert str(file) in said
            assert "Permission denied" in said


# Another process, without the privilege from its start


def test_a_command_in_a_process_of_its_own(source: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", "from pipeline.cli import main; main()", "convert", source, "--format", "gguf"]
    before = WITHOUT if os.geteuid() == 0 and shutil.which(WITHOUT[0]) else ()
    with mode(tmp_path, READ_ONLY):
        arguments = [*before, *map(str, command), "--scheme", "q8_0", "--out", str(tmp_path / "out")]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    assert f"Error: {tmp_path} cannot be written: Permission denied." in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


# Stages


@pytest.fixture
def project(source: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(
        f"checkpoint: {source}\nrevision: null\ncorpus: {{name: file, path: {text}, windows: 1, context: 16}}\n"
        "variants: {q8: {format: gguf, scheme: q8_0}}\nevaluate: {}\nbenchmark: {}\ngate: {}\n"
    )
    return tmp_path


def stage(name: str, *arguments: str) -> str:
    """What a stage that fails with exit code 2 says."""
    from importlib import import_module

    result = CliRunner().invoke(import_module(f"stages.{name}").main, arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == 2
    return " ".join(result.stderr.split())


@pytest.mark.parametrize("name", ["fetch", "corpus", "convert", "machine", "report", "gate"])
def test_params_that_may_not_be_read(name: str, project: Path) -> None:
    with mode(project / "params.yaml", NOTHING):
        if name != "machine":  # it reads none
            said = stage(name, *(["q8"] if name == "convert" else []))
            assert "params.yaml cannot be read: Permission denied. Give yourself the right" in said
    assert [path.name for path in project.iterdir()] == ["params.yaml"]


@pytest.mark.parametrize("name", ["fetch", "corpus", "convert", "machine"])
def test_a_read_only_folder_of_artifacts(name: str, project: Path) -> None:
    from stages import fetch

    artifacts = project / "artifacts"
    artifacts.mkdir()
    if name in {"corpus", "convert"}:  # they open what `fetch` saw
        assert CliRunner().invoke(fetch.main, []).exit_code == 0
    before = sorted(artifacts.iterdir())
    with mode(artifacts, READ_ONLY):
        said = stage(name, *(["q8"] if name == "convert" else []))
        assert "cannot be written: Permission denied. Choose a folder that can" in said
        assert "artifacts" in said
    assert sorted(artifacts.iterdir()) == before


def test_a_read_only_folder_of_reports(project: Path) -> None:
    reports = project / "reports"
    reports.mkdir()
    (reports / "measurements.json").write_text("{}")
    with mode(reports, READ_ONLY):
        assert "reports/gate.json cannot be written: Permission denied" in stage("gate")
        assert "reports/gate.json cannot be written: Permission denied" in said_of("gate")
    assert [path.name for path in reports.iterdir()] == ["measurements.json"]
    with mode(reports / "measurements.json", NOTHING):
        assert "reports/measurements.json cannot be read: Permission denied. Give yourself" in stage("gate")
