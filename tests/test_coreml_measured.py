"""A Core ML package from conversion to figures, on the command line: here, and as on a Mac."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from commands import refused, succeeded
from coreml_fakes import CPU, GPU, NE, pretend_mac
from support import Shape, write_checkpoint

from pipeline import benchmarking
from pipeline.formats.coreml.package import PACKAGE, Package
from pipeline.formats.coreml.run import Executed

SHAPE = Shape("qwen2", 2, tied=False)
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
TIMES = ("--prompt-length", 8, "--prompt-length", 100, "--prompt-length", 198, "--decode", 3, "--rounds", 2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    source = write_checkpoint(tmp_path_factory.mktemp("coreml") / "source", SHAPE)
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    return source


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    sizes = ("--chunk", 64, "--max-context", 200, "--score-window", 80)
    succeeded("convert", source, "--format", "coreml", "--scheme", "int8", *sizes, "--out", source.parent / "int8")
    return source.parent / "int8"


Evaluated = Callable[..., dict[str, Any]]


@pytest.fixture
def evaluated(made: Path, source: Path, tmp_path: Path) -> Evaluated:
    def evaluate() -> dict[str, Any]:
        asked = ("--checkpoint", source, "--windows", 3, "--context", 70, "--json", tmp_path / "quality.json")
        succeeded("evaluate", made, *asked)
        found: dict[str, Any] = json.loads((tmp_path / "quality.json").read_text())
        return found

    return evaluate


@pytest.fixture
def mac(made: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it makes this machine a Mac, whose Core ML computes as the reference executor does."""

    def pretend() -> None:
        model = Executed(Package(made / PACKAGE), 1)
        pretend_mac(monkeypatch, model, {"prefill": [NE, NE, NE, CPU], "decode": [GPU, CPU]})
        monkeypatch.setattr(benchmarking, "in_own_process", lambda what, function, *args: function(*args))

    return pretend


def test_here_the_executor_scores_and_on_a_mac_core_ml(evaluated: Evaluated, mac: Callable[[], None]) -> None:
    here = evaluated()
    assert here["engine"]["name"] == "reference executor"
    assert (here["engine"]["kv_type"], here["parity"]) == ("f16", None)
    assert 0 < here["kld"]["mean"] < 0.01
    assert (here["windows"], here["scored_tokens"]) == (3, 3 * 34)
    assert here["reply"]["problem"] is None
    mac()
    there = evaluated()
    assert there["engine"]["name"] == "Core ML"
    assert there["engine"]["version"].endswith("macOS 15.5")
    for key in ("ppl", "kld", "same_top", "reply", "identity"):
        assert there[key] == here[key]


def test_windows_and_settings_that_a_package_does_not_take(
    made: Path, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.evaluation.write_reference", None)  # said before the long work
    asked = ("evaluate", made, "--checkpoint", source, "--windows", 2)
    said = refused(*asked, "--context", 81)
    assert "int8: a window of 81 tokens is longer than the 80 that the package scores at once" in said
    assert "--score-window 81" in said
    assert "kv_type q8_0 is a setting of GGUF" in refused(*asked, "--context", 60, "--kv-type", "q8_0")
    assert "flash_attention is a setting of GGUF" in refused(*asked, "--context", 60, "--flash-attention")


def test_a_chat_that_a_package_does_not_hold(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = ("--chunk", 64, "--max-context", 40, "--score-window", 80)
    succeeded("convert", source, "--format", "coreml", "--scheme", "fp16", *sizes, "--out", tmp_path / "fp16")
    monkeypatch.setattr("pipeline.metrics.quality.score", None)
    said = refused("evaluate", tmp_path / "fp16", "--checkpoint", source, "--windows", 3, "--context", 70)
    assert "tokens is longer than the 40 that the package holds. Convert with --max-context" in said


def test_off_a_mac_nothing_is_timed(made: Path, tmp_path: Path) -> None:
    done = succeeded("benchmark", made, *TIMES, "--json", tmp_path / "speed.json")
    assert "not measured (needs macOS)" in done.output
    found = json.loads((tmp_path / "speed.json").read_text())["variants"]["int8"]
    assert (found["engine"], found["placement"]) == (None, None)
    tasks = ("prefill 8", "prefill 100", "prefill 198", "decode 3")
    assert found["not_measured"] == dict.fromkeys(tasks, "needs macOS")
    assert "device 'gpus' does not exist; did you mean 'gpu'?" in refused("benchmark", made, "--device", "gpus")


def test_a_mac_times_a_package_made_elsewhere(
    made: Path, tmp_path: Path, mac: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It needs the artifact's folder and nothing else."""
    shutil.copytree(made, tmp_path / "copied")
    mac()
    for name in ("pipeline.source.hub.open_checkpoint", "pipeline.source.checkpoint.Checkpoint"):
        monkeypatch.setattr(name, None)
    done = succeeded("benchmark", tmp_path / "copied", *TIMES, "--device", "ne", "--json", tmp_path / "speed.json")
    assert "CPU 25 %, Neural Engine 75 %" in done.output
    speed = json.loads((tmp_path / "speed.json").read_text())
    assert speed["visits"] == ["copied", "copied"]
    found = speed["variants"]["copied"]
    assert (found["engine"]["name"], found["engine"]["device"]) == ("Core ML", "cpu+ne")
    assert [*found["prefill"]] == ["8", "100"]
    assert all(len(task["seconds"]) == 2 for task in (*found["prefill"].values(), found["decode"]["3"]))
    assert found["not_measured"] == {"prefill 198": "with 3 tokens to decode it is beyond its context of 200"}
    assert found["placement"]["prefill"] == {"cpu": 0.25, "gpu": 0.0, "neural_engine": 0.75}
    assert found["placement"]["decode"] == {"cpu": 0.5, "gpu": 0.5, "neural_engine": 0.0}
    assert len(found["cold_start"]["load_seconds"]["samples"]) == 3
    assert found["kv_bytes"] == 2 * 2 * 2 * 288 * 16 * 2  # 200 + 64 - 1 positions, in steps of 32
    assert found["memory_by"] == "resident set"
