"""Files and folders that appear whole or not at all."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

from pipeline.errors import CheckpointError, OutputError, PipelineError
from pipeline.files import cached_sha256, new_file, new_folder, read_json, sha256, write_json, write_text


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def fill(path: Path, error: BaseException) -> None:
    """A run that fails after its first file."""
    with new_folder(path) as partial:
        (partial / "half").write_text("x")
        raise error


@contextmanager
def another_process(code: str, *arguments: Path) -> Iterator[subprocess.Popen[str]]:
    """Python code in a process of its own, which has printed a line and waits."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin
    assert process.stdout
    try:
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


WRITING = """
import pathlib, sys
sys.path.insert(0, ".")
from pipeline.files import new_folder
with new_folder(pathlib.Path(sys.argv[1])) as partial:
    (partial / "half").write_text("x")
    print("ready", flush=True)
    sys.stdin.read()
"""


# new_folder


def test_a_folder_appears_at_the_end(tmp_path: Path) -> None:
    out = tmp_path / "deep" / "out"
    with new_folder(out) as partial:
        assert partial.parent == out.parent  # a sibling, so that a rename is enough
        (partial / "a").write_text("whole")
        assert not out.exists()
    assert names(out.parent) == {"out"}
    assert (out / "a").read_text() == "whole"


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_an_existing_output_is_refused_and_left_as_it_is(kind: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    kept = out if kind == "file" else out / "a"
    kept.parent.mkdir(exist_ok=True)
    kept.write_text("old")
    with pytest.raises(OutputError, match=r"out exists\. Remove it or name another"), new_folder(out):
        pytest.fail("entered")
    assert kept.read_text() == "old"
    assert names(tmp_path) == {"out"}


@pytest.mark.parametrize(
    "error",
    [ValueError("no"), KeyboardInterrupt(), SystemExit(1), OSError(errno.ENOSPC, "No space left on device")],
)
def test_a_failure_leaves_nothing(error: BaseException, tmp_path: Path) -> None:
    with pytest.raises((type(error), OutputError)):  # OutputError may stand for a full disk
        fill(tmp_path / "out", error)
    assert names(tmp_path) == set()
    with new_folder(tmp_path / "out") as partial:  # and a rerun works
        assert names(partial) == set()


def test_what_a_dead_run_left_is_removed(tmp_path: Path) -> None:
    leftover = tmp_path / ".out.partial"
    (leftover / "sub").mkdir(parents=True)
    (leftover / "sub" / "half").write_text("x")
    with new_folder(tmp_path / "out") as partial:
        assert names(partial) == set()
        (partial / "a").write_text("new")
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"a"}


def test_what_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    with another_process(WRITING, tmp_path / "out") as process:
        process.kill()
        process.wait()
    assert names(tmp_path) == {".out.partial"}
    assert names(tmp_path / ".out.partial") == {"half"}
    with new_folder(tmp_path / "out") as partial:
        (partial / "a").write_text("new")
    assert names(tmp_path) == {"out"}
    assert names(tmp_path / "out") == {"a"}


def test_what_a_living_process_writes_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with another_process(WRITING, out) as process:
        with pytest.raises(OutputError, match=r"\.out\.partial is being written by another run"), new_folder(out):
            pytest.fail("entered")
        assert names(tmp_path / ".out.partial") == {"half"}
        process.communicate("", timeout=10)  # end of input: it finishes
        assert process.returncode == 0
    assert names(tmp_path) == {"out"}
    assert names(out) == {"half"}


def test_a_lock_is_let_go_at_the_end(tmp_path: Path) -> None:
    with new_folder(tmp_path / "out"):
        pass
    descriptor = os.open(tmp_path / "out", os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("made_again", [True, False])
def test_a_folder_that_another_run_took_before_the_lock_is_refused(
    made_again: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock is then that of a folder which is no longer there."""
    locked = fcntl.flock

    def late(descriptor: int, operation: int) -> None:
        (partial,) = tmp_path.iterdir()
        partial.rmdir()
        if made_again:
            partial.mkdir()
        locked(descriptor, operation)

    monkeypatch.setattr("pipeline.files.fcntl.flock", late)
    with pytest.raises(OutputError, match="was taken by another run at the same moment"), new_folder(tmp_path / "a"):
        raise AssertionError("the folder was given")
    assert not (tmp_path / "a").exists()


def test_a_folder_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with (
        pytest.raises(OutputError, match=r"file cannot be written: .* Choose a folder"),
        new_folder(tmp_path / "file" / "out"),
    ):
        pytest.fail("entered")


# new_file


def test_a_file_is_replaced_and_not_written_into(tmp_path: Path) -> None:
    path, link = tmp_path / "a.json", tmp_path / "cache"
    path.write_text("old")
    os.link(path, link)  # as DVC's cache may be
    write_text(path, "new é")
    assert path.read_text(encoding="utf-8") == "new é"
    assert link.read_text() == "old"
    assert path.stat().st_ino != link.stat().st_ino
    assert names(tmp_path) == {"a.json", "cache"}


def test_a_symbolic_link_is_replaced_and_its_target_kept(tmp_path: Path) -> None:
    path, target = tmp_path / "a.json", tmp_path / "target"
    target.write_text("old")
    path.symlink_to(target)
    write_text(path, "new")
    assert (path.read_text(), target.read_text()) == ("new", "old")


def test_the_old_file_is_there_while_the_new_one_is_written(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with new_file(path) as partial:
        partial.write_text("new")
        assert path.read_text() == "old"
    assert path.read_text() == "new"


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_failure_keeps_the_old_file(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")

    def fail() -> None:
        with new_file(path) as partial:
            partial.write_text("half")
            raise error

    with pytest.raises(error):
        fail()
    assert path.read_text() == "old"
    assert names(tmp_path) == {"a"}


def test_a_folder_is_made_for_a_file(tmp_path: Path) -> None:
    write_text(tmp_path / "x" / "y" / "a", "1")
    assert (tmp_path / "x" / "y" / "a").read_text() == "1"


def test_a_file_in_place_of_a_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    with pytest.raises(OutputError, match="a cannot be written: Is a directory"):
        write_text(tmp_path / "a", "1")
    assert names(tmp_path) == {"a"}


def test_a_file_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match=r"a\.json cannot be written"):
        write_text(tmp_path / "file" / "a.json", "1")


# JSON


@dataclass(frozen=True)
class Pair:
    zeta: float
    alpha: str


def test_json_keeps_keys_in_order_and_letters_as_they_are(tmp_path: Path) -> None:
    write_json(tmp_path / "a.json", Pair(0.1, "é"))
    assert (tmp_path / "a.json").read_text(encoding="utf-8") == '{\n  "zeta": 0.1,\n  "alpha": "é"\n}\n'
    assert read_json(tmp_path / "a.json") == {"zeta": 0.1, "alpha": "é"}


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_json_holds_no_nan_and_no_infinity(value: float, tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("{}")
    for whole in (value, {"a": [1.0, {"b": value}]}, Pair(value, "x")):
        with pytest.raises(ValueError, match="not JSON compliant"):
            write_json(path, whole)
    assert path.read_text() == "{}"
    assert names(tmp_path) == {"a.json"}


def test_json_that_cannot_be_read_is_the_error_asked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"a\.json cannot be read: No such file"):
        read_json(tmp_path / "a.json", CheckpointError)
    for content in (b"{", b'"\xff"', b""):
        (tmp_path / "a.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"a\.json is not valid JSON"):
            read_json(tmp_path / "a.json", CheckpointError)


@pytest.mark.parametrize("folder", ["artifacts", "reports"])
def test_what_a_stage_has_not_left_yet_is_said(folder: str) -> None:
    with pytest.raises(CheckpointError, match=rf"{folder}/none\.json cannot be read: No such .* Run dvc repro first\."):
        read_json(Path(folder) / "none.json", CheckpointError)


# Hashes


@pytest.mark.parametrize("content", ["{", "[]"])
def test_a_broken_memory_of_hashes_says_that_it_may_go(
    content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "quantgate").mkdir()
    (tmp_path / "quantgate" / "sha256.json").write_text(content)
    with pytest.raises(PipelineError, match=r"sha256\.json.*\nIt only saves time: delete it, or"):
        cached_sha256([tmp_path / "a"])


def test_sha256_of_known_bytes(tmp_path: Path) -> None:
    (tmp_path / "abc").write_bytes(b"abc")  # FIPS 180-2, B.1
    assert sha256(tmp_path / "abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


def test_hashes_are_kept_by_size_and_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_bytes(b"one")
    b.write_bytes(b"two")
    read: list[str] = []

    def counted(path: Path) -> str:
        read.append(path.name)
        return sha256(path)

    monkeypatch.setattr("pipeline.files.sha256", counted)
    expected = {a: hashlib.sha256(b"one").hexdigest(), b: hashlib.sha256(b"two").hexdigest()}
    assert cached_sha256([a, b]) == expected
    assert cached_sha256([a, b]) == expected
    assert read == ["a", "b"]
    b.write_bytes(b"three")
    assert cached_sha256([a, b]) == expected | {b: hashlib.sha256(b"three").hexdigest()}
    assert read == ["a", "b", "b"]
    os.utime(a, ns=(0, 1))
    cached_sha256([a])
    assert read == ["a", "b", "b", "a"]


def test_the_memory_of_hashes_stays_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    memory = tmp_path / "quantgate" / "sha256.json"
    write_json(memory, {f"/old/{i}|1|1|1": "0" * 64 for i in range(1000)})
    (tmp_path / "a").write_bytes(b"abc")
    cached_sha256([tmp_path / "a"])
    kept = json.loads(memory.read_text())
    assert len(kept) == 1000
    assert "/old/0|1|1|1" not in kept  # the oldest goes
    assert kept[list(kept)[-1]] == hashlib.sha256(b"abc").hexdigest()
