"""Files that appear whole or not at all, JSON, and hashes that are computed once."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import OutputError, PipelineError

WRITE_ERRORS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES}


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` to fill, renamed to `path` at the end and removed on any failure.

    A sibling left by a killed run is removed at the next start; one that is being written by a living run is not.

    Raises:
        OutputError: `path` exists, its parent cannot be written, or another run is writing it.
    """
    if path.exists():
        raise OutputError(f"{path} exists. Remove it or name another output folder.")
    partial = path.parent / f".{path.name}.partial"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            with _locked(partial):
                shutil.rmtree(partial)
        partial.mkdir()
    except OSError as error:
        raise OutputError(f"{path.parent} cannot be written: {error.strerror}. Choose a folder that can.") from error
    with _locked(partial):
        try:
            yield partial
            os.rename(partial, path)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and error.errno in WRITE_ERRORS:
                raise OutputError(
                    f"{path} cannot be written: {error.strerror}. Make room, or choose another."
                ) from error
            raise


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Holds an advisory lock on a folder; the kernel lets it go when the process dies, however it dies."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"{folder} is being written by another run. Wait for it to end.") from error
        if not folder.exists() or os.fstat(descriptor).st_ino != folder.stat().st_ino:
            raise OutputError(f"{folder} was taken by another run at the same moment. Wait for it to end.")
        yield
    finally:
        os.close(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` to write, which then takes the place of `path`; removed on any failure.

    The old file is replaced, never written into: it may be linked to DVC's cache.
    """
    partial = path.parent / f".{path.name}.partial-{os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for left in path.parent.glob(f".{path.name}.partial-*"):
            if not _alive(left):
                left.unlink(missing_ok=True)
        yield partial
        os.replace(partial, path)
    except OSError as error:
        raise OutputError(f"{path} cannot be written: {error.strerror}. Choose a place that can.") from error
    finally:
        if path.parent.is_dir():
            partial.unlink(missing_ok=True)


def _alive(partial: Path) -> bool:
    """Whether the process that a partial file names is there."""
    import psutil

    pid = partial.name.rpartition("-")[2]
    return pid.isdigit() and psutil.pid_exists(int(pid))


def write_text(path: Path, text: str) -> None:
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """A dataclass or plain value as JSON, keys in their order. NaN and infinity are refused: no reader agrees on
    them.
    """
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    write_text(path, json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def read_json(path: Path, error: type[PipelineError] = PipelineError) -> Any:
    """The value of a JSON file.

    Raises:
        error: the file is absent or holds no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        hint = " Run dvc repro first." if path.parts[0] in {"artifacts", "reports"} else ""
        raise error(f"{path} cannot be read: {problem.strerror}.{hint}") from problem
    except ValueError as problem:  # a UnicodeDecodeError is one
        raise error(f"{path} is not valid JSON: {problem}.") from problem


def read_object(path: Path, error: type[PipelineError] = PipelineError) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        error: the file is absent, or holds something else.
    """
    value = read_json(path, error)
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}. Fetch or write it again.")
    return value


def sha256(path: Path) -> str:
    """Hex digest of a file, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def cache_folder() -> Path:
    """The user's cache folder of quantgate: hashes by file, references by identity."""
    from platformdirs import user_cache_path

    return user_cache_path("quantgate", appauthor=False)


def cached_sha256(paths: list[Path]) -> dict[Path, str]:
    """Hex digests of files, recomputed only where path, size, mtime or inode differ from the last time."""
    memory = cache_folder() / "sha256.json"
    try:
        known: dict[str, Any] = read_object(memory) if memory.exists() else {}
    except PipelineError as error:
        raise PipelineError(f"{error}\nIt only saves time: delete it.") from error
    digests: dict[Path, str] = {}
    fresh: dict[str, str] = {}
    for path in paths:
        stat = path.stat()
        key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        digests[path] = fresh[key] = known.get(key) or sha256(path)
    if not fresh.keys() <= known.keys():
        kept = list({**known, **fresh}.items())[-1000:]  # the newest, so that the file stays small
        write_json(memory, dict(kept))
    return digests
