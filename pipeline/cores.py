"""The CPU that work runs on, and how many threads it is given."""

from __future__ import annotations

import os
import platform
from functools import cache
from typing import Any


@cache
def cpu_info() -> dict[str, Any]:
    """What py-cpuinfo finds out, which takes it a second."""
    import cpuinfo

    return dict(cpuinfo.get_cpu_info())


def cpu_name() -> str:
    """As its maker calls it; 'unknown' where nothing says."""
    return str(cpu_info().get("brand_raw", platform.processor() or "unknown"))


def usable_cores() -> int:
    """Logical cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def physical_cores() -> int:
    """What `threads: 0` means: hyper-threads do not help matrix products."""
    import psutil

    return min(psutil.cpu_count(logical=False) or usable_cores(), usable_cores())
