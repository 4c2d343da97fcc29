"""MLX folders beside GGUF files: scored with a check by MLX itself, and timed as far as that says anything."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, write_checkpoint

from pipeline import artifact, benchmarking
from pipeline.benchmarking import ROUNDS_OF_NO_USER, benchmark_folders
from pipeline.errors import MeasurementError
from pipeline.evaluation import evaluate
from pipeline.formats.mlx import engine
from pipeline.metrics.visits import Opening, cold_start
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_forward import Reference, load_reference, write_reference
from pipeline.types import Artifact, Windows

EVALUATE = {"threads": 2, "flash_attention": False, "kv_type": "f16"}
TIME = {"device": "auto", "threads": 1, "flash_attention": "auto", "kv_type": "f16"}
REASON = "MLX on a CPU is not what its users run"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("measured") / "source"
    config = {"max_position_embeddings": 300, "torch_dtype": "bfloat16"}
    return write_checkpoint(folder, Shape("qwen2", tied=False), config=config)


@pytest.fixture(scope="module")
def made(source: Path) -> Path:
    from mlx_lm import convert

    convert(str(source), str(source.parent / "int8"), quantize=True, q_bits=8)
    return source.parent / "int8"


@pytest.fixture(scope="module")
def windows() -> Windows:
    ids = np.random.default_rng(0).integers(0, 272, (3, 40)).astype(np.int32)
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(3, 30))


@pytest.fixture(scope="module")
def reference(source: Path, windows: Windows) -> Reference:
    with Checkpoint(source) as checkpoint:
        write_reference(checkpoint, checkpoint.identity(), windows, source.parent / "reference")
        return load_reference(source.parent / "reference", checkpoint)


@pytest.fixture(scope="module")
def described(made: Path, source: Path) -> Artifact:
    with Checkpoint(source) as checkpoint:
        return artifact.load(made, checkpoint)


# Scored


def test_an_mlx_folder_is_scored_and_checked(
    made: Path, described: Artifact, windows: Windows, reference: Reference
) -> None:
    found, scores = evaluate(made, described, windows, reference, EVALUATE)
    assert found["engine"]["name"] == "transformers on dequantized MLX weights"
    assert found["parity"]["engine"]["name"] == "mlx-lm in float32"
    assert (found["parity"]["windows"], found["parity"]["tokens"]) == (2, 2 * 19)
    assert 0 < found["parity"]["max_difference"] < 5e-5
    assert 0 < found["kld"]["mean"] < 0.01
    assert scores.logprob.shape == (3, 19)


@pytest.mark.usefixtures("described")  # which has read the same folder before
def test_on_apple_silicon_mlx_scores_alone(
    made: Path, described: Artifact, windows: Windows, reference: Reference, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    monkeypatch.setattr(engine, "has_gpu", lambda: True)
    monkeypatch.setattr(engine, "device", lambda name: mx.cpu)
    found, _ = evaluate(made, described, windows, reference, EVALUATE)
    assert found["parity"] is None
    assert (found["engine"]["name"], found["engine"]["kv_type"]) == ("mlx-lm", "bf16")
    assert 0 < found["kld"]["mean"] < 0.02


def test_a_folder_that_mlx_reads_otherwise_is_not_scored(
    made: Path,
    described: Artifact,
    windows: Windows,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its rope_theta lies where transformers looks, and mlx-lm does not: were it scored as transformers reads it."""
    monkeypatch.setattr("pipeline.formats.mlx.run.as_read", lambda config: config)
    other = tmp_path / "other"
    shutil.copytree(made, other)
    config = json.loads((other / "config.json").read_text())
    del config["rope_theta"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e3}
    (other / "config.json").write_text(json.dumps(config))
    there = dataclasses.replace(described, path=str(other))
    with pytest.raises(MeasurementError, match="mlx-lm in float32 does not compute what was scored by transformers"):
        evaluate(other, there, windows, reference, EVALUATE)


# Timed


@pytest.fixture(scope="module")
def speed(source: Path, made: Path) -> dict[str, Any]:
    artifact.convert(source, "gguf", "q8_0", source.parent / "q8_0")
    folders = {"gguf": source.parent / "q8_0", "mlx": made}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarking, "COLD_STARTS", 1)
        return benchmark_folders(folders, [16, 8, 512], 4, 4, TIME)


def test_a_speed_that_is_no_users_says_so_and_takes_little_time(speed: dict[str, Any]) -> None:
    found = speed["variants"]["mlx"]
    assert found["unrepresentative"] == REASON
    assert [*found["prefill"]] == ["8"]
    assert [*found["decode"]] == ["4"]
    assert len(found["prefill"]["8"]["seconds"]) == ROUNDS_OF_NO_USER == 3
    beyond = "with 4 tokens to decode it is beyond its context of 300"
    assert found["not_measured"] == {"prefill 16": REASON, "prefill 512": beyond}
    assert found["cold_start"] == {}
    assert (found["peak_memory_bytes"], found["memory_by"], found["kv_bytes"]) == (None, None, None)
    engine_of = found["engine"]
    assert (engine_of["name"], engine_of["device"], engine_of["threads"]) == ("mlx-lm in float32", "cpu", 1)


def test_the_others_are_measured_in_full(speed: dict[str, Any]) -> None:
    found = speed["variants"]["gguf"]
    assert found["unrepresentative"] is None
    assert [*found["prefill"]] == ["8", "16"]
    assert len(found["cold_start"]["load_seconds"]["samples"]) == 1
    assert found["peak_memory_bytes"] > found["kv_bytes"] > 0
    assert len(found["prefill"]["8"]["seconds"]) == 4
    assert speed["visits"] == ["gguf"] * 4  # before the other is opened
    assert speed["variants"]["mlx"]["engine"] != found["engine"]


def test_a_cold_start_on_apple_silicon_asks_mlx_for_its_memory(
    made: Path, described: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlx.core as mx

    monkeypatch.setattr(engine, "has_gpu", lambda: True)
    monkeypatch.setattr(engine, "device", lambda name: mx.cpu)
    opening = Opening(made, described, (8, 16), 4, TIME | {"flash_attention": None})
    mx.reset_peak_memory()
    found = cold_start(opening, and_memory=True)
    assert (found.tokens, found.memory_by) == (8, "mlx.core.get_peak_memory")
    weights = (made / "model.safetensors").stat().st_size
    assert weights < (found.peak_memory_bytes or 0) < 20e6
    assert found.kv_bytes == 2 * 2 * 2 * 16 * 2 * 256
    assert cold_start(opening, and_memory=False).memory_by is None
