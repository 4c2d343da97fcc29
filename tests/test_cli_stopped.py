"""A conversion or a reference that is killed or interrupted half way."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner
from commands import refused, succeeded
from support import Shape, config_of, tokenizer_json, write_checkpoint

from pipeline.console import Command

ROOT = Path(__file__).parent.parent
TEXT = "In the beginning the heath there then held the thin inn. " * 40


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cli") / "source", Shape("qwen3"))


LARGE = Shape("qwen2", 20, hidden=1024, ff=4096, heads=16, kv_heads=16)
MAIN = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler); from pipeline.cli import main; main()"


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """1.3 GB of zeros, as a sparse file that takes no room; the tokenizer is a real one."""
    from pipeline.models import spec_of

    folder = tmp_path_factory.mktemp("large") / "large"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(LARGE)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(LARGE.vocab)))
    header, offset = {}, 0
    for tensor in spec_of(config_of(LARGE)).tensors:
        end = offset + 4 * tensor.weights
        header[tensor.name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, end]}
        offset = end
    assert offset > 1e9
    head = json.dumps(header).encode()
    head += b" " * (-len(head) % 8)
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + offset)
    return folder


@contextmanager
def converting(
    source: Path, out: Path, made: tuple[str, str] = ("gguf", "q4_k_m"), file: str = "model.gguf"
) -> Iterator[subprocess.Popen[str]]:
    """`quantgate convert` in another process, once 20 MB of the 200 are in the temporary sibling."""
    format_name, scheme = made
    arguments = ["convert", str(source), "--format", format_name, "--scheme", scheme, "--out", str(out)]
    process = subprocess.Popen(
        [sys.executable, "-c", MAIN, *arguments], cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )
    try:
        deadline = time.monotonic() + 60
        partial = out.parent / f".{out.name}.partial" / file
        while not partial.exists() or partial.stat().st_blocks * 512 < 2e7:
            assert process.poll() is None, process.communicate()[1]
            assert time.monotonic() < deadline
            time.sleep(0.005)
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_what_a_killed_conversion_left_is_removed_at_the_next_start(large: Path, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with converting(large, out) as process:
        process.send_signal(signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    assert {file.name for file in tmp_path.iterdir()} == {".out.partial"}
    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", out)
    assert {file.name for file in tmp_path.iterdir()} == {"out"}
    assert {file.name for file in out.iterdir()} == {"model.gguf", "artifact.json"}
    assert (out / "model.gguf").stat().st_size < 1e7  # nothing of the large one


@pytest.mark.slow
def test_what_a_killed_conversion_of_another_format_left_is_removed_too(
    large: Path, source: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with converting(large, out, ("mlx", "int4"), "model.safetensors") as process:
        process.kill()
        process.wait()
    assert {file.name for file in tmp_path.iterdir()} == {".out.partial"}
    arguments = ("convert", source, "--format", "mlx", "--scheme", "int4-g32", "--out", out)
    succeeded(*arguments)
    assert {file.name for file in tmp_path.iterdir()} == {"out"}
    texts = {"config.json", "model.safetensors.index.json", "tokenizer.json", "artifact.json"}
    assert {file.name for file in out.iterdir()} == {"model.safetensors", *texts}
    assert (out / "model.safetensors").stat().st_size < 1e7  # nothing of the large one
    before = {file: file.read_bytes() for file in out.iterdir()}
    assert "out exists. Remove it or name another output folder." in " ".join(refused(*arguments).split())
    assert {file: file.read_bytes() for file in out.iterdir()} == before


@pytest.mark.slow
def test_a_conversion_that_fails_removes_what_a_killed_one_left(large: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with converting(large, out) as process:
        process.kill()
        process.wait()
    bad = write_checkpoint(tmp_path / "bad")
    (bad / "model.safetensors").unlink()
    said = refused("convert", bad, "--format", "gguf", "--scheme", "q8_0", "--out", out)
    assert "holds neither model.safetensors" in said
    assert not out.exists()
    write_checkpoint(bad, config={"rope_theta": 5e5}, change=lambda tensors: tensors.update(extra=np.zeros(2)))
    assert "extra" in refused("convert", bad, "--format", "gguf", "--scheme", "q8_0", "--out", out)
    assert {file.name for file in tmp_path.iterdir()} == {"bad"}


@pytest.mark.slow
def test_ctrl_c_leaves_nothing(large: Path, tmp_path: Path) -> None:
    with converting(large, tmp_path / "out") as process:
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=20)
        assert process.returncode == 1
    assert said.strip() == "Aborted!"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_a_process_leaves_nothing(number: signal.Signals, large: Path, tmp_path: Path) -> None:
    """CI cancels by SIGTERM, a closed terminal by SIGHUP."""
    with converting(large, tmp_path / "out") as process:
        process.send_signal(number)
        _, said = process.communicate(timeout=20)
    assert process.returncode == 128 + number
    assert said == ""
    assert list(tmp_path.iterdir()) == []


def test_nohup_still_ignores_a_closed_terminal_and_handlers_are_put_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    seen: list[object] = []

    @click.command(cls=Command)
    def command() -> None:
        seen.extend(signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP))

    try:
        assert CliRunner().invoke(command).exit_code == 0
        assert seen[0] not in {signal.SIG_DFL, signal.SIG_IGN}
        assert seen[1] is signal.SIG_IGN
        assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGHUP)) == (before, signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)


HALF_A_REFERENCE = """
import sys
from contextlib import nullcontext
from pipeline import evaluation
from pipeline.cli import main

def wait(done):
    print("ready", flush=True)
    sys.stdin.read()

evaluation.progress = lambda title, total: nullcontext(wait)
main()
"""


@pytest.mark.slow
def test_what_a_killed_reference_left_is_removed_at_the_next_start(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    text, made, references = tmp_path / "text", tmp_path / "made", tmp_path / "quantgate" / "references"
    text.write_text(TEXT)
    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", made)
    evaluate = ["evaluate", made, "--checkpoint", source, "--corpus", text, "--context", "16", "--windows", "3"]
    command = [sys.executable, "-c", HALF_A_REFERENCE, *map(str, evaluate)]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"  # a window of three is scored
        process.kill()
    (partial,) = references.iterdir()
    assert partial.name.startswith(".")
    assert [file.name for file in partial.iterdir()] == ["hidden.npy"]
    succeeded(*evaluate)
    (whole,) = references.iterdir()
    assert partial.name == f".{whole.name}.partial"
    assert {file.name for file in whole.iterdir()} == {"hidden.npy", "logprobs.npy", "meta.json"}


@pytest.mark.slow
def test_two_conversions_into_one_folder_do_not_mix(large: Path, source: Path, tmp_path: Path) -> None:
    with converting(large, tmp_path / "out"):
        said = refused("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", tmp_path / "out")
    assert "is being written by another run" in said.replace("\n", " ")
