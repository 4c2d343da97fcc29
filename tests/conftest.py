"""Fixtures. Material outside the repository is found by QUANTGATE_SHARED alone: without it such tests are skipped, with
it they may not be.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from commands import succeeded
from figures import hand_made, mlx_variant
from support import Shape, write_checkpoint

ROOT = Path(__file__).parent.parent
TEXT = "In the beginning the heath there then held the thin inn. " * 40


def pytest_configure(config: pytest.Config) -> None:
    """No test asks the Hub, or reads or fills the user's Hub cache: huggingface_hub looks here when it is imported."""
    folder = tempfile.TemporaryDirectory(prefix="quantgate-hub-")
    config.add_cleanup(folder.cleanup)
    os.environ |= {"HF_HOME": folder.name, "HF_HUB_OFFLINE": "1"}
    for name in ("HF_ENDPOINT", "HF_TOKEN", "HF_HUB_CACHE", "HF_DATASETS_CACHE", "HF_DATASETS_OFFLINE"):
        os.environ.pop(name, None)


@pytest.fixture(scope="session")
def shared() -> Path:
    if "QUANTGATE_SHARED" not in os.environ:
        pytest.skip("QUANTGATE_SHARED is not set")
    return Path(os.environ["QUANTGATE_SHARED"])


@pytest.fixture(scope="session")
def wikitext(shared: Path) -> Path:
    """WikiText-2's raw test split."""
    return shared / "data" / "wikitext-2-raw" / "wiki.test.raw"


@pytest.fixture(scope="session")
def smollm(shared: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """SmolLM2-135M as a Qwen2 checkpoint: the one real model at hand. Made once per session."""
    out = tmp_path_factory.mktemp("smollm") / "smollm2-qwen2"
    subprocess.run([sys.executable, shared / "tools" / "make_smollm2_qwen2.py", out], check=True, capture_output=True)
    return out


@pytest.fixture(scope="session")
def tiny() -> Path:
    """The embedded checkpoint."""
    return ROOT / "assets" / "qwen3-tiny"


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No test reads or fills the user's cache folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty Hub cache; offline, as all tests are."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert constants.HF_HUB_OFFLINE
    return tmp_path / "hub"


@pytest.fixture
def measurements() -> dict[str, Any]:
    """measurements.json of four variants, made by hand."""
    return hand_made()


@pytest.fixture
def two(measurements: dict[str, Any]) -> dict[str, Any]:
    """GGUF's four variants, and two of MLX where nobody would run it."""
    one = mlx_variant(5_000_000, 0.05, 0.03, scheme="int8", tensors_sha256=f"{8_000_000:064x}")
    measurements["variants"] |= {"mlx-a": one, "mlx-b": mlx_variant(3_000_000, 0.2, 0.1, parity=None)}
    return measurements


@pytest.fixture(scope="session", autouse=True)
def heard_signals() -> None:
    """Under nohup or behind & these are ignored, and so they would be in the processes that tests start and stop."""
    for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, usual)


# For the command line: a small checkpoint, its artifact and a text, one of each for a test file


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "source", Shape("qwen3"))


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    """A q8_0 artifact of `source`."""
    out = source.parent / "made-q8_0"
    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", out)
    return out


@pytest.fixture(scope="module")
def text(source: Path) -> Path:
    path = source.parent / "text.txt"
    path.write_text(TEXT)
    return path
