"""What the operating system knows of memory: the peak of this process, and what of a file lies in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np

STATUS = Path("/proc/self/status")


def peak_rss_bytes() -> int:
    """Most memory that this process ever had resident, mapped files included.

    On Linux VmHWM: ru_maxrss begins there with what the parent held when it started this process. macOS counts
    ru_maxrss in bytes.
    """
    if sys.platform == "linux":
        (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM:")]
        return int(line.split()[1]) * 1024  # kB there are KiB
    import resource

    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def drop_from_page_cache(paths: Sequence[Path]) -> bool:
    """Have files read from disk next time; whether it was done.

    Only Linux offers it, and only for pages that no process maps; not every file system does as it is asked, so the
    pages are counted afterwards.
    """
    if sys.platform != "linux":
        return False
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)  # pages not yet written cannot be dropped
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)
    return all(cached_share(path) < 0.01 for path in paths)


def cached_share(path: Path) -> float:
    """Share of a file's pages that lie in Linux's page cache (mincore); an empty one has none."""
    if path.stat().st_size == 0:
        return 0.0
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        pages = -(-len(mapped) // mmap.PAGESIZE)
        resident = np.empty(pages, np.uint8)
        view = np.frombuffer(mapped, np.uint8)
        addresses = [ctypes.c_void_p(array.ctypes.data) for array in (view, resident)]
        failed = ctypes.CDLL(None).mincore(addresses[0], ctypes.c_size_t(len(mapped)), addresses[1])
        del view  # or the map does not close
    return 1.0 if failed else float(np.mean(resident & 1))
