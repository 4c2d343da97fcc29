"""Permissions mean nothing to root, whom tests may run as: this takes that privilege away for a while."""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

VERSION = 0x20080522  # _LINUX_CAPABILITY_VERSION_3 (capget(2))
OVERRIDE = 1 << 1 | 1 << 2  # CAP_DAC_OVERRIDE and CAP_DAC_READ_SEARCH
WITHOUT = ("setpriv", "--bounding-set=-dac_override,-dac_read_search", "--")
"""A command before another, which then runs without them."""


class _Header(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint32), ("pid", ctypes.c_int)]


class _Sets(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint32) for name in ("effective", "permitted", "inheritable")]


@contextmanager
def without_privilege() -> Iterator[None]:
    """This thread, and those it starts, are bound by permissions as every user is."""
    if os.geteuid() or sys.platform != "linux":
        yield
        return
    libc = ctypes.CDLL(None, use_errno=True)
    header, sets = _Header(VERSION, 0), (_Sets * 2)()
    assert libc.capget(ctypes.byref(header), sets) == 0
    old = sets[0].effective
    sets[0].effective &= ~OVERRIDE
    assert libc.capset(ctypes.byref(header), sets) == 0
    try:
        yield
    finally:
        sets[0].effective = old
        assert libc.capset(ctypes.byref(header), sets) == 0


@contextmanager
def mode(path: Path, bits: int) -> Iterator[None]:
    """`path` with other permission bits for a while."""
    old = path.stat().st_mode
    path.chmod(bits)
    try:
        yield
    finally:
        path.chmod(old)
