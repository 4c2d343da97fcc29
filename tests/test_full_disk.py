"""A disk that fills up while something is written: an error with the path, the old output kept, nothing partial left.

RLIMIT_FSIZE stands for the full disk: a write beyond it fails half way, in whatever thread it is made. Where this may
mount one, a real small disk is filled too.
"""

from __future__ import annotations

import json
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from commands import refused, succeeded
from figures import hand_made
from support import Shape, write_checkpoint

from pipeline.cli import main
from pipeline.errors import OutputError
from pipeline.files import new_file, new_folder, write_json
from pipeline.report.plots import draw

TEXT = "In the beginning the heath there then held the thin inn. " * 40
CONVERT = ("--format", "gguf", "--scheme", "q8_0", "--out")


@contextmanager
def full_after(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size` bytes; Python ignores SIGXFSZ, so that the write says EFBIG."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_checkpoint(tmp_path_factory.mktemp("disk") / "source", Shape("qwen3", layers=4, hidden=128, ff=512))
    (path.parent / "text.txt").write_text(TEXT)
    succeeded("inspect", path)
    return path


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    out = source.parent / "made"
    succeeded("convert", source, *CONVERT, out)
    return out


def said_of(*arguments: object) -> str:
    return " ".join(refused(*arguments).split())


# Conversion: the header, the file's length, and blocks that threads write


@pytest.mark.parametrize("size", [0, 1000, 20_000])
def test_a_conversion(size: int, source: Path, made: Path, tmp_path: Path) -> None:
    assert (made / "model.gguf").stat().st_size > 20_000
    with full_after(size):
        said = said_of("convert", source, *CONVERT, tmp_path / "out")
    assert f"{tmp_path / 'out'} cannot be written: File too large. Choose a folder that can, or make room." in said
    assert list(tmp_path.iterdir()) == []
    succeeded("convert", source, *CONVERT, tmp_path / "out")  # and a rerun works
    assert (tmp_path / "out" / "model.gguf").read_bytes() == (made / "model.gguf").read_bytes()


@pytest.mark.parametrize(
    ("format_name", "size", "weights"),
    [
        *(("mlx", size, "model.safetensors") for size in (0, 1000, 20_000)),
        ("coreml", 200_000, "model.mlpackage/Data/com.apple.CoreML/weights/weight.bin"),
    ],
)
def test_a_conversion_of_many_files(format_name: str, size: int, weights: str, source: Path, tmp_path: Path) -> None:
    """Carried files, texts, a program, then weights."""
    convert = ("convert", source, "--format", format_name, "--scheme", "int8", "--out", tmp_path / "out")
    with full_after(size):
        said = said_of(*convert)
    assert f"{tmp_path / 'out'} cannot be written: File too large. Choose a folder that can, or make room." in said
    assert list(tmp_path.iterdir()) == []
    succeeded(*convert)
    assert (tmp_path / "out" / "tokenizer.json").stat().st_size > 1000
    assert (tmp_path / "out" / weights).stat().st_size > 200_000


def test_a_conversion_whose_threads_find_no_room(
    source: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a disk that gives a sparse file its length, and then has no blocks for it."""
    monkeypatch.setattr("os.truncate", lambda path, length: None)
    with full_after(200_000):
        said = said_of("convert", source, *CONVERT, tmp_path / "out")
    assert f"{tmp_path / 'out'} cannot be written: File too large." in said
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = [shutil.which("mount") or "mount", "-t", "tmpfs", "-o", "size=256k", "none", str(place)]
    if sys.platform != "linux" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("this user may mount no file system; the other tests fill one by RLIMIT_FSIZE")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def test_a_small_disk_is_refused_before_a_byte_is_written(source: Path, small_disk: Path) -> None:
    said = said_of("convert", source, *CONVERT, small_disk / "out")
    assert "the artifact needs 1 MB, 0 MB are free. Make room." in said
    assert list(small_disk.iterdir()) == []


def test_a_small_disk_that_fills_up(source: Path, small_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.formats.gguf.write.check_disk", lambda folder, needed: None)
    said = said_of("convert", source, *CONVERT, small_disk / "out")
    assert f"{small_disk / 'out'} cannot be written: No space left on device. Choose a folder" in said
    assert list(small_disk.iterdir()) == []


def test_a_disk_that_is_mounted_read_only(source: Path, small_disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    for path in (small_disk / "out", small_disk / "deep" / "out"):
        assert f"{path.parent} cannot be written: Read-only file system." in said_of("convert", source, *CONVERT, path)
    with pytest.raises(OutputError, match=r"a\.json cannot be written: Read-only file system\. Choose a folder"):
        write_json(small_disk / "a.json", {})
    said = said_of("inspect", source, "--json", small_disk / "a.json")
    assert f"{small_disk / 'a.json'} cannot be written" in said


# Arrays, pictures, JSON


def test_a_reference(source: Path, made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = ("evaluate", made, "--checkpoint", source, "--corpus", source.parent / "text.txt", "--context", "16")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with full_after(4000):
        said = said_of(*evaluate)
    references = tmp_path / "quantgate" / "references"
    assert f"{references}" in said
    assert "cannot be written" in said
    assert "set XDG_CACHE_HOME to a folder that can be written" in said
    assert list(references.iterdir()) == []


def fill_with_an_array(folder: Path) -> None:
    with new_folder(folder) as partial:
        np.save(partial / "a.npy", np.zeros(10_000))


@pytest.mark.parametrize("size", [0, 100, 5000])
def test_an_array_of_a_folder(size: int, tmp_path: Path) -> None:
    """NumPy's own error has no errno."""
    with full_after(size), pytest.raises(OutputError, match=r"out cannot be written: .+\. Choose a folder"):
        fill_with_an_array(tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def write_scores(path: Path) -> None:
    with new_file(path) as partial, partial.open("wb") as file:
        np.savez(file, a=np.zeros(10_000), b=np.zeros(10))


def write_picture(path: Path) -> None:
    with new_file(path) as partial:
        draw(hand_made(), partial)


def write_figures(path: Path) -> None:
    write_json(path, {"a": list(range(10_000))})


@pytest.mark.parametrize("size", [0, 100, 5000])
@pytest.mark.parametrize("write", [write_scores, write_picture, write_figures])
def test_a_file_is_kept_as_it_was(write: object, size: int, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")
    with full_after(size), pytest.raises(OutputError, match=r"file cannot be written: .+\. Choose a folder"):
        write(path)  # type: ignore[operator]
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# Commands and stages


def test_json_of_a_command(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    file.write_text("old")
    with full_after(100):
        result = CliRunner().invoke(main, ["inspect", str(source), "--json", str(file)])
    assert result.exit_code == 2
    assert f"{file} cannot be written: File too large." in " ".join(result.stderr.split())
    assert "weights" in result.stdout  # the table is there at least
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_the_stages_of_a_project(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import convert, corpus, fetch, gate

    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(
        f"checkpoint: {source}\nrevision: null\n"
        f"corpus: {{name: file, path: {source.parent / 'text.txt'}, windows: 20, context: 16}}\n"
        "variants: {q8: {format: gguf, scheme: q8_0}}\nevaluate: {}\nbenchmark: {}\ngate: {}\n"
    )
    (tmp_path / "reports").mkdir()
    (tmp_path / "reports" / "measurements.json").write_text(json.dumps({"variants": {}}))
    assert CliRunner().invoke(fetch.main, []).exit_code == 0  # which leaves its hashes in the cache
    shutil.rmtree("artifacts")
    with full_after(100):
        result = CliRunner().invoke(fetch.main, [])
        assert result.exit_code == 2
        assert "artifacts/source.json cannot be written" in " ".join(result.stderr.split())
    assert CliRunner().invoke(fetch.main, []).exit_code == 0
    fetched = {f"artifacts/{name}.json" for name in ("source", "builds", "text", "calibration", "accepted")}
    with full_after(100):
        for stage, arguments, path in (
            (corpus, [], "artifacts/corpus"),
            (convert, ["q8"], "artifacts/variants/q8"),
            (gate, [], "reports/gate.json"),
        ):
            result = CliRunner().invoke(stage.main, arguments)
            assert result.exit_code == 2, path
            assert f"{path} cannot be written" in " ".join(result.stderr.split())
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left == {"params.yaml", "reports/measurements.json", *fetched}
    assert not [path for path in tmp_path.rglob("*.partial*")]
