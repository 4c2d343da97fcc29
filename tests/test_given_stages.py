"""Files of others and a variant's own settings, through the stages and on the command line."""

from __future__ import annotations

import hashlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from commands import refused, squeezed, succeeded
from support import Shape, write_checkpoint

from pipeline import artifact as artifacts
from stages import corpus, evaluate, reference

ROOT = Path(__file__).parent.parent
TEXT = "In the beginning the heath there then held the thin inn. " * 10
VARIANTS: dict[str, Any] = {
    "plain": {"format": "gguf", "scheme": "q8_0"},
    "quantized-kv": {
        "format": "gguf",
        "scheme": "q8_0",
        "evaluate": {"kv_type": "q8_0", "flash_attention": True},
    },
    "mix": {"format": "gguf", "scheme": "q4_0", "types": {"attn_v": "q8_0"}},
    "theirs": {"format": "gguf", "path": "files/theirs.gguf"},
}


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def stage(name: str, *arguments: str, project: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"stages.{name}", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, check=False)


def ran(name: str, *arguments: str, project: Path) -> None:
    done = stage(name, *arguments, project=project)
    assert done.returncode == 0, done.stderr


def converted(name: str, project: Path) -> Path:
    """The folder of a variant, made anew as DVC does."""
    folder = project / "artifacts" / "variants" / name
    shutil.rmtree(folder, ignore_errors=True)
    ran("convert", name, project=project)
    return folder


def write_params(project: Path, **change: Any) -> None:
    params = {
        **yaml.safe_load((ROOT / "params.yaml").read_text()),
        "checkpoint": "checkpoint",
        "corpus": {"name": "file", "path": "text.txt", "windows": 2, "context": 32},
        "variants": VARIANTS,
        "evaluate": {"threads": 1, "flash_attention": False, "kv_type": "f16"},
    }
    (project / "params.yaml").write_text(yaml.safe_dump(params | change, sort_keys=False))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose fetch has run, with a file of others in it."""
    project = tmp_path_factory.mktemp("stages") / "project"
    write_checkpoint(project / "checkpoint", Shape("qwen3", head_dim=32))
    artifacts.convert(project / "checkpoint", "gguf", "q4_k_m", project / "files")
    (project / "files" / "artifact.json").unlink()
    (project / "files" / "model.gguf").rename(project / "files" / "theirs.gguf")
    (project / "text.txt").write_text(TEXT)
    (project / "pipeline").symlink_to(ROOT / "pipeline")
    (project / "stages").symlink_to(ROOT / "stages")
    write_params(project)
    ran("fetch", project=project)
    return project


@pytest.fixture
def project(made: Path) -> Iterator[Path]:
    """Its params.yaml and file are put back after each test."""
    kept = {path: path.read_bytes() for path in (made / "params.yaml", made / "files" / "theirs.gguf")}
    yield made
    for path, data in kept.items():
        path.write_bytes(data)


def test_fetch_says_what_decides_each_artifact(project: Path) -> None:
    builds = json.loads((project / "artifacts" / "builds.json").read_text())
    file = project / "files" / "theirs.gguf"
    assert builds == {
        "plain": {"format": "gguf", "scheme": "q8_0", "types": {}},
        "quantized-kv": {"format": "gguf", "scheme": "q8_0", "types": {}},  # how it is scored changes no artifact
        "mix": {"format": "gguf", "scheme": "q4_0", "types": {"attn_v": "q8_0"}},
        "theirs": {"format": "gguf", "path": "files/theirs.gguf", "files": {"theirs.gguf": sha256(file)}},
    }


def test_fetch_sees_another_file_at_the_path(project: Path) -> None:
    file = project / "files" / "theirs.gguf"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    ran("fetch", project=project)
    builds = json.loads((project / "artifacts" / "builds.json").read_text())
    assert builds["theirs"]["files"] == {"theirs.gguf": hashlib.sha256(data).hexdigest()}


def test_convert_describes_a_file_and_copies_nothing(project: Path) -> None:
    folder, file = converted("theirs", project), project / "files" / "theirs.gguf"
    assert [path.name for path in folder.iterdir()] == ["artifact.json"]
    found = json.loads((folder / "artifact.json").read_text())
    assert (found["path"], found["files"]) == ("files/theirs.gguf", {"theirs.gguf": sha256(file)})
    assert (found["scheme"], found["size_bytes"]) == ("q4_k_m", file.stat().st_size)
    source = json.loads((project / "artifacts" / "source.json").read_text())
    assert found["source"] == source


def test_convert_makes_a_mix(project: Path) -> None:
    found = json.loads((converted("mix", project) / "artifact.json").read_text())
    assert (found["scheme"], found["path"]) == ("q4_0+attn_v=q8_0", None)
    assert found["effective_types"]["Q8_0"]["tensors"] == 2 + 1  # the embedding too


def test_convert_refuses_a_file_of_another_checkpoint_and_leaves_nothing(project: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", Shape("qwen3", heads=2, head_dim=64))
    variants = {"foreign": {"format": "gguf", "path": str(tmp_path / "q8_0" / "model.gguf")}}
    artifacts.convert(other, "gguf", "q8_0", tmp_path / "q8_0")
    write_params(project, variants=variants)
    done = stage("convert", "foreign", project=project)
    assert done.returncode == 2
    assert "is not of the checkpoint checkpoint:\n  - attention.head_count: expected 4, found 2\n" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (project / "artifacts" / "variants" / "foreign").exists()


def test_a_variants_own_settings_are_those_it_is_scored_by(project: Path) -> None:
    """Of one scheme, on the same windows: another cache, other scores; what others made is scored by all's."""
    figures = {}
    with chdir(project):
        for main, *arguments in ((corpus.main,), (reference.main,)):
            result = CliRunner().invoke(main, arguments)
            assert result.exit_code == 0, result.output
        for name in ("plain", "quantized-kv", "theirs"):
            converted(name, project)
            result = CliRunner().invoke(evaluate.main, [name])
            assert result.exit_code == 0, result.output
            figures[name] = json.loads(Path("artifacts", "quality", f"{name}.json").read_text())
    engines = {
        name: (found["engine"]["kv_type"], found["engine"]["flash_attention"]) for name, found in figures.items()
    }
    assert engines == {"plain": ("f16", "off"), "quantized-kv": ("q8_0", "on"), "theirs": ("f16", "off")}
    plain, quantized, theirs = figures.values()
    assert quantized["artifact"] == plain["artifact"]  # the same bytes
    assert quantized["identity"] == plain["identity"] == theirs["identity"]
    assert quantized["kld"]["mean"] != plain["kld"]["mean"]
    assert quantized["engine"]["threads"] == 1  # what it does not set is all's
    assert theirs["artifact"] == {"theirs.gguf": sha256(project / "files" / "theirs.gguf")}
    assert theirs["kld"]["mean"] > plain["kld"]["mean"] > 0


# the command line


def test_evaluate_takes_a_file(project: Path, tmp_path: Path) -> None:
    file = project / "files" / "theirs.gguf"
    arguments = ("--corpus", project / "text.txt", "--context", 32, "--windows", 2, "--threads", 1)
    result = succeeded(
        "evaluate", file, "--checkpoint", project / "checkpoint", *arguments, "--json", tmp_path / "q.json"
    )
    found = json.loads((tmp_path / "q.json").read_text())
    assert found["artifact"] == {"theirs.gguf": sha256(file)}
    assert found["identity"]["source"]["name"] == "checkpoint"
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


def test_what_is_refused_is_read_at_a_glance(project: Path, tmp_path: Path) -> None:
    """The reason and what to do, without a traceback or lines of ggml's own."""
    spoilt, other = tmp_path / "a.gguf", write_checkpoint(tmp_path / "other", Shape("qwen3", layers=1, head_dim=32))
    spoilt.write_bytes(b"PK\3\4 is a zip file's")
    arguments = ("--checkpoint", project / "checkpoint", "--corpus", project / "text.txt", "--context", 32)
    assert refused("evaluate", spoilt, *arguments) == (
        f"Error: {spoilt} is no GGUF file that ggml can read, or it is cut short.\n"
        "  ggml: gguf_init_from_reader: invalid magic characters: 'PK??', expected 'GGUF'\n"
        "Fetch it again.\n"
    )
    said = refused("evaluate", project / "files" / "theirs.gguf", "--checkpoint", other, *arguments[2:])
    first, *problems, last = said.splitlines()
    assert squeezed(first) == squeezed(f"Error: {project / 'files' / 'theirs.gguf'} is not of the checkpoint other:")
    assert problems[:2] == [
        "  - block_count: expected 1, found 2",
        "  - blk.1.attn_k.weight: not a tensor of qwen3",
    ]
    assert (len(problems), problems[-1]) == (7, "  - … and 6 more tensors")
    assert all(len(line) <= 80 for line in problems)
    assert last.startswith("Figures on its tokens would mean nothing")
    absent = refused("evaluate", tmp_path / "absent.gguf", *arguments)
    assert (
        "absent.gguf holds no artifact.json. Give the folder that `quantgate convert` made, the path of a GGUF file,"
        in absent
    )
