"""How many threads work is given."""

from __future__ import annotations

import os


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_cores() -> int:
    """What `threads: 0` means: hyper-threads do not help matrix products."""
    import psutil

    return min(psutil.cpu_count(logical=False) or usable_cores(), usable_cores())
