"""Files that appear whole or not at all, JSON, and hashes that are computed once."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import MISSING, asdict, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Any, TypeVar, cast, get_args, get_origin, get_type_hints

from pipeline.errors import OutputError, PipelineError, unreadable

if TYPE_CHECKING:
    from numpy.typing import NDArray

BLOCK = 1 << 22  # bytes that are hashed at once
T = TypeVar("T")


@contextmanager
def new_folder(path: Path) -> Iterator[Path]:
    """A temporary sibling of `path` to fill, renamed to `path` at the end and removed on any failure.

    A sibling left by a killed run is removed at the next start; one that is being written by a living run is not.

    Raises:
        OutputError: `path` exists, its parent cannot be written, the disk is full, or another run is writing it.
    """
    partial = path.parent / f".{path.name}.partial"
    try:
        if os.path.lexists(path):
            raise OutputError(f"{path} exists. Remove it or name another output folder.")
        path.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            with _locked(partial):
                shutil.rmtree(partial)
        partial.mkdir()
    except OSError as error:
        raise _unwritable(path.parent, error) from error
    with _locked(partial):
        try:
            yield partial
            os.rename(partial, path)
        except BaseException as error:
            shutil.rmtree(partial, ignore_errors=True)
            if isinstance(error, OSError) and _within(error, partial):
                raise _unwritable(path, error) from error
            raise


def _within(error: OSError, folder: Path) -> bool:
    """Whether it came of writing there: `write` names no file, and what reads another names that."""
    name = error.filename
    return not isinstance(name, str | bytes) or Path(os.fsdecode(name)).is_relative_to(folder)


def _unwritable(path: Path, error: OSError) -> OutputError:
    """NumPy says how many bytes it wrote instead of why."""
    hint = "Choose a folder that can, or make room"
    if path.is_relative_to(cache_folder()):
        hint = "It is in quantgate's cache: make room, or set XDG_CACHE_HOME to a folder that can be written"
    elif isinstance(error, PermissionError):
        hint = "Choose a folder that can, or give yourself the right to write (chmod u+w)"
    return OutputError(f"{path} cannot be written: {error.strerror or error}. {hint}.")


def check_writable(path: Path) -> None:
    """Refuse, before hours of work, a file that could not be written at their end.

    Raises:
        OutputError: its folder, or the first of those above that exists, is none or cannot be written.
    """
    folder = next(parent for parent in path.absolute().parents if os.path.lexists(parent))
    effective = os.access in os.supports_effective_ids
    if not os.path.isdir(folder):
        raise OutputError(f"{path} cannot be written: {folder} is not a folder. Choose another place.")
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=effective):
        raise OutputError(f"{path} cannot be written: no right to write in {folder}. Choose a folder that can.")


@contextmanager
def reading(path: Path, error: type[PipelineError] = PipelineError) -> Iterator[None]:
    """What keeps `path` from being read, as an error of ours.

    Raises:
        error: the file is absent, not to be read by this user, or on a broken disk.
    """
    try:
        yield
    except OSError as problem:
        raise error(f"{path} cannot be read: {problem.strerror}. {unreadable(problem)}") from problem


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

    Raises:
        OutputError: its folder cannot be made or written, or the disk is full.
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
        if not _within(error, path.parent):
            raise
        raise _unwritable(path, error) from error
    finally:
        with suppress(OSError):  # where it cannot be removed, it could not be made
            partial.unlink()


def _alive(partial: Path) -> bool:
    """Whether the process that a partial file names is there."""
    import psutil

    pid = partial.name.rpartition("-")[2]
    return pid.isdigit() and psutil.pid_exists(int(pid))


def write_text(path: Path, text: str) -> None:
    """A file of UTF-8.

    Raises:
        OutputError: as new_file.
    """
    with new_file(path) as partial:
        partial.write_text(text, encoding="utf-8")


def json_text(value: Any) -> str:
    """A dataclass or plain value as JSON, keys in their order. A path that is no UTF-8 keeps its bytes as escapes.

    Raises:
        ValueError: NaN or infinity, on which no two readers agree.
    """
    plain = asdict(value) if is_dataclass(value) and not isinstance(value, type) else value
    text = json.dumps(plain, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    return text.encode(errors="backslashreplace").decode()


def write_json(path: Path, value: Any) -> None:
    """See json_text.

    Raises:
        ValueError: as json_text.
        OutputError: as new_file.
    """
    write_text(path, json_text(value))


def read_json(path: Path, error: type[PipelineError] = PipelineError) -> Any:
    """The value of a JSON file.

    Raises:
        error: the file is absent or holds no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except OSError as problem:
        left_by_a_stage = isinstance(problem, FileNotFoundError) and path.parts[0] in {"artifacts", "reports"}
        hint = "Run dvc repro first." if left_by_a_stage else unreadable(problem)
        raise error(f"{path} cannot be read: {problem.strerror}. {hint}") from problem
    except (ValueError, RecursionError) as problem:  # a UnicodeDecodeError is one
        raise error(f"{path} is not valid JSON: {problem}. Fetch or write it again.") from problem


def read_object(path: Path, error: type[PipelineError] = PipelineError) -> dict[str, Any]:
    """The JSON object of a file.

    Raises:
        error: the file is absent, or holds something else.
    """
    value = read_json(path, error)
    if not isinstance(value, dict):
        raise error(f"{path}: expected a JSON object, found {type(value).__name__}. Fetch or write it again.")
    return value


def read_as(path: Path, kind: type[T], error: type[PipelineError] = PipelineError) -> T:
    """The dataclass that `write_json` left.

    Raises:
        error: the file is absent, or has a key that is unknown, missing or of another type.
    """
    raw = read_object(path, error)
    try:
        made: T = _as(kind, raw, path.name)
    except ValueError as problem:
        raise error(f"{path} is not as this version writes it ({problem}). Make it again.") from problem
    return made


def _as(kind: Any, value: Any, where: str) -> Any:
    """`value` as a dataclass, a dict or tuple of one type, a type or None, or a plain type."""
    if is_dataclass(kind) and isinstance(value, dict):
        hints = get_type_hints(kind)
        needed = {field.name for field in fields(kind) if field.default is MISSING}
        if wrong := [*(needed - value.keys()), *(value.keys() - hints.keys())]:
            raise ValueError(f"{where}: {', '.join(sorted(wrong))} missing or unknown")
        return cast(Any, kind)(**{key: _as(hints[key], item, f"{where}: {key}") for key, item in value.items()})
    if isinstance(kind, UnionType):
        return None if value is None else _as(get_args(kind)[0], value, where)
    if get_origin(kind) is dict and isinstance(value, dict):
        return {key: _as(get_args(kind)[1], item, f"{where}: {key}") for key, item in value.items()}
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(_as(get_args(kind)[0], item, where) for item in value)
    if type(value) is kind or (kind is float and type(value) is int):
        return value
    raise ValueError(f"{where}: expected {getattr(kind, '__name__', kind)}, found {str(value)[:80]}")


def read_array(path: Path, error: type[PipelineError] = PipelineError, mapped: bool = False) -> NDArray[Any]:
    """The array of an .npy file, `mapped` from disk or read.

    Raises:
        error: the file is absent, cut short, or holds something else.
    """
    from numpy.lib import format as npy  # np.load would open a zip or a pickle too

    try:
        with reading(path, error), path.open("rb") as file:
            array: NDArray[Any] = npy.open_memmap(path, mode="r") if mapped else npy.read_array(file)
    except (ValueError, EOFError) as problem:
        raise error(
            f"{path} is no NumPy array, or cut short ({problem}). Remove its folder and run again."
        ) from problem
    return array


def sha256(path: Path) -> str:
    """Hex digest of a file, in blocks large enough that a thread seldom waits for the interpreter.

    Raises:
        PipelineError: the file is absent, or cannot be read.
    """
    digest = hashlib.sha256()
    with reading(path), path.open("rb", buffering=0) as file:
        while data := file.read(BLOCK):
            digest.update(data)
    return digest.hexdigest()


def sha256_of(path: Path, offset: int, size: int) -> str:
    """Hex digest of `size` bytes of a file from `offset` on.

    Raises:
        PipelineError: the file is absent, or cannot be read.
    """
    digest = hashlib.sha256()
    with reading(path), path.open("rb", buffering=0) as file:
        file.seek(offset)
        while size and (data := file.read(min(BLOCK, size))):
            digest.update(data)
            size -= len(data)
    return digest.hexdigest()


def cache_folder() -> Path:
    """The user's cache folder of quantgate: hashes by file, references by identity."""
    from platformdirs import user_cache_path

    return user_cache_path("quantgate", appauthor=False)


def cached_sha256(paths: list[Path]) -> dict[Path, str]:
    """Hex digests of files, recomputed only where path, size, mtime or inode differ from the last time.

    Raises:
        PipelineError: a file, or what the cache folder holds of the last time, cannot be read.
        OutputError: the cache folder cannot be written.
    """
    memory = cache_folder() / "sha256.json"
    try:
        with reading(memory):
            known: dict[str, Any] = read_object(memory) if memory.exists() else {}
    except PipelineError as error:
        raise PipelineError(
            f"{error}\nIt only saves time: delete it, or set XDG_CACHE_HOME to another folder."
        ) from error
    digests: dict[Path, str] = {}
    fresh: dict[str, str] = {}
    for path in paths:
        with reading(path):
            stat = path.stat()
        key = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{stat.st_ino}"
        digests[path] = fresh[key] = known.get(key) or sha256(path)
    if not fresh.keys() <= known.keys():
        kept = list({**known, **fresh}.items())[-1000:]  # the newest, so that the file stays small
        write_json(memory, dict(kept))
    return digests
