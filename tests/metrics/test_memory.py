"""Peak memory of a process, and the page cache."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from pipeline.metrics.memory import cached_share, drop_from_page_cache, peak_rss_bytes
from pipeline.processes import in_own_process

MB = 1_000_000
linux = pytest.mark.skipif(sys.platform != "linux", reason="the page cache is Linux's")


def peaks(size: int) -> tuple[int, int, int]:
    """Peak before, with, and after `size` bytes of memory that are written and given back."""
    before = peak_rss_bytes()
    held = np.ones(size, np.uint8)
    during = peak_rss_bytes()
    del held
    return before, during, peak_rss_bytes()


def test_a_peak_is_in_bytes_and_stays() -> None:
    before, during, after = in_own_process("x", peaks, 200 * MB)
    assert 5 * MB < before < 150 * MB
    assert 199 * MB < during - before < 210 * MB
    assert after > during - MB  # the kernel counts pages in batches


def test_a_peak_is_not_that_of_the_caller() -> None:
    """ru_maxrss of Linux would begin with it."""
    held = np.ones(300 * MB, np.uint8)
    assert peak_rss_bytes() > held.nbytes
    assert in_own_process("x", peak_rss_bytes) < 150 * MB


@linux
def test_a_file_is_dropped_from_the_page_cache(tmp_path: Path) -> None:
    files = [tmp_path / "a", tmp_path / "b"]
    for file in files:
        file.write_bytes(bytes(8 * MB))  # not yet on the disk
    assert [cached_share(file) for file in files] == [1.0, 1.0]
    if not drop_from_page_cache(files):
        pytest.skip("the file system of the temporary folder keeps its pages")
    assert max(cached_share(file) for file in files) < 0.01
    files[0].read_bytes()
    assert cached_share(files[0]) == 1.0


@linux
def test_pages_that_stay_are_not_said_to_be_dropped(tmp_path: Path) -> None:
    """A file that is mapped keeps its pages."""
    np.save(tmp_path / "a.npy", np.ones(8 * MB, np.uint8))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    assert mapped.sum() == 8 * MB
    assert not drop_from_page_cache([tmp_path / "a.npy"])


def test_other_systems_drop_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert not drop_from_page_cache([tmp_path / "absent"])
