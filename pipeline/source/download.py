"""Weight files of a Hub commit into the blobs of the Hub's cache, each continued where an earlier run stopped.

huggingface_hub continues a download that breaks, but not one whose process ended: it would begin anew.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from pipeline.errors import CheckpointError, OutputError
from pipeline.files import sha256
from pipeline.progress import Advance, progress

SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class _Blob:
    """A file of the Hub, and where it goes: blobs/ETAG, which is the sha256 of a large file."""

    file: str
    url: str
    size: int
    path: Path
    lock: Path

    @property
    def partial(self) -> Path:
        return self.path.with_name(f"{self.path.name}.quantgate.incomplete")

    @property
    def left(self) -> int:
        """Bytes still to come."""
        if self.path.exists():
            return 0
        held = self.partial.stat().st_size if self.partial.exists() else 0
        return self.size - held if held <= self.size else self.size


def download(name: str, commit: str, sizes: Mapping[str, int], storage: Path) -> None:
    """Fetch the files of `sizes`, bytes by name, into `storage`/blobs.

    Raises:
        CheckpointError: a file that does not arrive as the Hub says it is.
        OutputError: the disk has no room for them.
    """
    blobs = [_blob(name, commit, file, size, storage) for file, size in sizes.items()]
    left = sum(blob.left for blob in blobs)
    storage.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(storage).free
    if free < left:
        raise OutputError(
            f"{storage}: {name} needs {left / 1e6:.0f} MB more, {free / 1e6:.0f} MB are free. "
            "Make room, or set HF_HOME to a folder elsewhere."
        )
    with progress(f"fetch {name}", sum(blob.size for blob in blobs)) as advance:
        for blob in blobs:
            advance(blob.size - blob.left)
            _fetch(name, blob, advance)


def _blob(name: str, commit: str, file: str, size: int, storage: Path) -> _Blob:
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url

    if size > constants.MAX_HTTP_DOWNLOAD_SIZE:
        raise CheckpointError(
            f"{name}: {file} is {size / 1e9:.0f} GB, too large for a download that can be continued. Fetch it by "
            f"`hf download {name} --revision {commit}` into the same cache, then run this again."
        )
    url = hf_hub_url(name, file, revision=commit)
    etag = get_hf_file_metadata(url).etag
    if not etag:
        raise CheckpointError(f"{name}: the Hub names no hash of {file}. Set HF_ENDPOINT to a Hub that does.")
    lock = storage.parent / ".locks" / storage.name / f"{etag}.lock"  # the one that huggingface_hub takes
    return _Blob(file, url, size, storage / "blobs" / etag, lock)


def _fetch(name: str, blob: _Blob, advance: Advance) -> None:
    from huggingface_hub.file_download import http_get
    from huggingface_hub.utils import WeakFileLock, build_hf_headers

    def bar(**_: Any) -> AbstractContextManager[Any]:
        return nullcontext(SimpleNamespace(update=advance))  # what http_get wants of tqdm

    blob.lock.parent.mkdir(parents=True, exist_ok=True)
    blob.path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(blob.lock):
        if blob.path.exists():  # by another run, meanwhile
            return
        with blob.partial.open("ab") as file:
            if file.tell() > blob.size:
                file.seek(0)
                file.truncate()
            headers = build_hf_headers() | {"Accept-Encoding": "identity"}  # a range is one of the file's own bytes
            http_get(
                blob.url,
                file,
                resume_size=file.tell(),
                headers=headers,
                expected_size=blob.size,
                displayed_filename=blob.file,
                tqdm_class=bar,
            )
        expected = blob.path.name
        if SHA256.fullmatch(expected) and (found := sha256(blob.partial)) != expected:
            blob.partial.unlink()
            raise CheckpointError(
                f"{name}: {blob.file} arrived damaged: expected sha256 {expected}, found {found}. Run this again."
            )
        os.replace(blob.partial, blob.path)
