"""A Hub id at a revision -> its snapshot in the Hub's own cache, pinned to a commit, with the needed files only.

The cache is huggingface_hub's: blobs by hash, snapshots/COMMIT of links to them, refs/BRANCH holding a commit.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, PipelineError, listed
from pipeline.files import read_object, write_text
from pipeline.source.checkpoint import SIDE_FILES, refuse_quantized
from pipeline.source.download import download
from pipeline.source.hub_errors import told
from pipeline.source.shards import INDEX, SINGLE, weight_files

COMMIT = re.compile(r"[0-9a-f]{40}")
REQUIRED = ("config.json", "tokenizer.json")


def snapshot(name: str, revision: str | None) -> tuple[Path, str]:
    """The snapshot folder of a Hub id, and its commit. A commit that is cached whole asks nothing of the network.

    Raises:
        CheckpointError: no such repository or revision, no access, no network, or files that no conversion reads.
        OutputError: the cache cannot be written.
    """
    constants = _library(name)
    asked = revision or constants.DEFAULT_REVISION
    if constants.is_offline_mode():
        return _cached(name, asked)
    last = _ref(name, asked)
    with told(name, asked, last if last and (_storage(name) / "snapshots" / last).is_dir() else None):
        commit = _resolve(name, asked)
        folder = _fetch(name, commit)
    if last != commit:
        write_text(_storage(name) / "refs" / asked, commit)
    return folder, commit


def _library(name: str) -> Any:
    """huggingface_hub's constants, once it is there and takes the id."""
    try:
        from huggingface_hub import constants
        from huggingface_hub.errors import HFValidationError
        from huggingface_hub.utils import validate_repo_id
    except ImportError as error:
        raise PipelineError(f"a Hub id needs huggingface_hub ({error}). Run: pip install -e '.[hub]'") from error
    try:
        validate_repo_id(name)
    except HFValidationError as error:
        raise CheckpointError(f"{name} is not a folder, nor a Hub id: {error}") from error
    return constants


def _resolve(name: str, revision: str) -> str:
    """The commit of a revision."""
    from huggingface_hub import HfApi, constants

    if COMMIT.fullmatch(revision) and _listing(name, revision) is not None:
        return revision
    return str(HfApi().model_info(name, revision=revision, timeout=constants.HF_HUB_ETAG_TIMEOUT).sha)


def _fetch(name: str, commit: str) -> Path:
    """The snapshot folder with every needed file; only absent ones are asked for, the small ones first."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.utils import disable_progress_bars

    source = f"{name} at {commit}"
    with disable_progress_bars():
        folder = Path(snapshot_download(name, revision=commit, allow_patterns=[*SIDE_FILES, INDEX]))
        sizes = _listing(name, commit)
        if sizes is None:
            raise CheckpointError(f"{source}: the Hub's list of files could not be kept. Set HF_HUB_OFFLINE=1.")
        if "config.json" not in sizes:
            raise CheckpointError(f"{source} holds no config.json. Give the repository of the original checkpoint.")
        refuse_quantized(source, read_object(folder / "config.json", CheckpointError))
        weights = weight_files(folder, sizes, source)
        if unknown := [file for file in weights if file not in sizes]:
            raise CheckpointError(f"{source} is incomplete: {INDEX} names {', '.join(unknown)}, which is not there.")
        absent = {file: sizes[file] for file in weights if not (folder / file).exists()}
        if absent:
            download(name, commit, absent, _storage(name))
            snapshot_download(name, revision=commit, allow_patterns=[*absent])  # the links to what is now there
    return folder


def _cached(name: str, revision: str) -> tuple[Path, str]:
    """What the cache alone knows of a revision."""
    from huggingface_hub import constants

    commit = _ref(name, revision)
    snapshots = _storage(name) / "snapshots"
    if commit is None or not (snapshots / commit).is_dir():
        commits = sorted(path.name for path in snapshots.iterdir()) if snapshots.is_dir() else []
        known = f"; it holds {', '.join(commits)}" if commits else ""
        raise CheckpointError(
            f"{name} is not a folder, and as a Hub id it cannot be fetched: HF_HUB_OFFLINE is set, and "
            f"{constants.HF_HUB_CACHE} holds no revision {revision} of it{known}. Unset HF_HUB_OFFLINE to fetch it."
        )
    if absent := _absent(name, commit):
        raise CheckpointError(
            f"{name} at {commit} is incomplete in {constants.HF_HUB_CACHE}, and HF_HUB_OFFLINE is set:\n"
            f"{listed([f'{file} is absent' for file in absent])}\nUnset HF_HUB_OFFLINE to fetch the rest."
        )
    return snapshots / commit, commit


def _absent(name: str, commit: str) -> list[str]:
    """Needed files that a cached snapshot lacks. Which optional ones there are, only a listing knows."""
    folder = _storage(name) / "snapshots" / commit
    names: Collection[str] | None = _listing(name, commit)
    if names is None:
        found = {path.name for path in folder.iterdir()}
        names = {*found, *REQUIRED, *([] if INDEX in found else [SINGLE])}
    needed = [file for file in (*SIDE_FILES, INDEX) if file in names]
    if INDEX not in names or (folder / INDEX).exists():
        needed += weight_files(folder, names, f"{name} at {commit}")
    return [file for file in needed if not (folder / file).exists()]


def _listing(name: str, commit: str) -> dict[str, int] | None:
    """Sizes of the files of a commit as huggingface_hub keeps them, where it was fetched by a snapshot."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        return {file.path: file.size for file in get_cached_repo_tree(name, revision=commit)}
    except CachedRepoTreeNotFoundError:
        return None


def _ref(name: str, revision: str) -> str | None:
    """The commit that a branch or tag was last time, as the cache remembers; a commit is itself."""
    if COMMIT.fullmatch(revision):
        return revision
    ref = _storage(name) / "refs" / revision
    return ref.read_text().strip() if ref.is_file() else None


def _storage(name: str) -> Path:
    """The repository's folder in the cache."""
    from huggingface_hub import constants
    from huggingface_hub.file_download import repo_folder_name

    cache = Path(constants.HF_HUB_CACHE).expanduser().resolve()
    return cache / str(repo_folder_name(repo_id=name, repo_type="model"))
