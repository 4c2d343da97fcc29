"""llama.cpp in this process: its logits against transformers, its repeatability, and what it refuses."""

from __future__ import annotations

import re
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, write_checkpoint

from pipeline.errors import ArtifactError, MeasurementError, ParamsError
from pipeline.formats.gguf import engine
from pipeline.formats.gguf.engine import cpu_features, device, llama, load_model, metadata
from pipeline.formats.gguf.run import BATCH, MICRO_BATCH, GgufRuntime, context_length, open_runtime
from pipeline.formats.gguf.write import write
from pipeline.source.checkpoint import Checkpoint

SHAPES = {
    "qwen2": Shape("qwen2", 3, hidden=64, ff=160, heads=4, kv_heads=2),
    "qwen2-untied": Shape("qwen2", 2, hidden=128, ff=96, heads=8, kv_heads=1, tied=False),
    "qwen3": Shape("qwen3", 3, hidden=64, ff=160, heads=4, kv_heads=2, head_dim=16),
    "qwen3-head-dim-128": Shape("qwen3", 2, hidden=64, ff=96, heads=2, kv_heads=1, head_dim=128, tied=False),
}
TOLERANCE = 1e-3  # facts/gguf.md measured 2.6e-5 on tiny models


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 272, 200).astype(np.int32)


@pytest.fixture
def f32_file(tmp_path: Path) -> Path:
    return converted(write_checkpoint(tmp_path / "checkpoint", SHAPES["qwen3"]), tmp_path)


def converted(source: Path, folder: Path, scheme: str = "f32") -> Path:
    with Checkpoint(source) as checkpoint:
        (name,) = write(checkpoint, scheme, folder).files
    return folder / name


def score(path: Path, ids: np.ndarray, start: int = 0, **settings: Any) -> np.ndarray:
    """All rows of one scoring, copied: a chunk is valid until the next one is asked for."""
    settings = {"context": len(ids), "threads": 2, "kv_type": "f32"} | settings
    with closing(GgufRuntime(path, **settings)) as runtime:
        return np.concatenate([rows.copy() for rows in runtime.score(ids, start)])


def reference(source: Path, ids: np.ndarray) -> np.ndarray:
    from pipeline.torch_runtime import of_checkpoint

    with Checkpoint(source) as checkpoint:
        (logits,) = of_checkpoint(checkpoint, threads=2).score(ids, 0)
    return logits


def assert_logits_equal_transformers(source: Path, folder: Path, ids: np.ndarray) -> None:
    ours, theirs = score(converted(source, folder), ids), reference(source, ids)
    assert ours.dtype == np.float32
    assert ours.shape == theirs.shape == (len(ids), 272)
    assert theirs.std() > 0.1  # not uniform: a model that predicts nothing would agree with anything
    assert np.abs(ours - theirs).max() < TOLERANCE


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
@pytest.mark.parametrize("name", SHAPES)
def test_logits_equal_transformers(name: str, dtype: str, ids: np.ndarray, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", SHAPES[name], dtype)
    assert_logits_equal_transformers(source, tmp_path, ids)


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "beta_fast": 32, "beta_slow": 1},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
        {"rope_type": "linear", "factor": 2.0},
    ],
    ids=["yarn", "yarn-default-betas", "yarn-attention-factor", "linear"],
)
def test_scaled_rope_equals_transformers(scaling: dict[str, Any], ids: np.ndarray, tmp_path: Path) -> None:
    """theta 10000 and sharper attention, so that positions matter."""
    shape = SHAPES["qwen2"]
    config = {"rope_theta": 10_000.0, "rope_scaling": scaling, "max_position_embeddings": 256}

    def sharpen(tensors: dict[str, np.ndarray]) -> None:
        for name in tensors:
            if "q_proj" in name or "k_proj" in name:
                tensors[name] *= np.float32(3)

    source = write_checkpoint(tmp_path / "checkpoint", shape, "F32", change=sharpen, config=config)
    plain = write_checkpoint(tmp_path / "plain", shape, "F32", change=sharpen, config={**config, "rope_scaling": None})
    assert np.abs(reference(plain, ids) - reference(source, ids)).max() > 100 * TOLERANCE  # the setting is seen
    assert_logits_equal_transformers(source, tmp_path, ids)


@pytest.mark.parametrize("start", [1, 100, 199])
def test_selected_rows_equal_those_of_all_bit_for_bit(start: int, f32_file: Path, ids: np.ndarray) -> None:
    selected = score(f32_file, ids, start)
    assert selected.shape == (200 - start, 272)
    assert selected.tobytes() == score(f32_file, ids)[start:].tobytes()


def test_a_longer_context_changes_no_bit(f32_file: Path, ids: np.ndarray) -> None:
    """It is given where a chat needs it."""
    assert score(f32_file, ids, context=1000).tobytes() == score(f32_file, ids, context=200).tobytes()


def test_two_runs_and_two_windows_are_bit_identical(f32_file: Path, ids: np.ndarray) -> None:
    first = score(f32_file, ids)
    assert first.tobytes() == score(f32_file, ids).tobytes()
    with closing(GgufRuntime(f32_file, context=200, threads=2, kv_type="f32")) as runtime:
        for window in (ids, ids[::-1], ids):  # nothing of one window is left in the next
            again = np.concatenate([rows.copy() for rows in runtime.score(np.ascontiguousarray(window), 0)])
            assert (again.tobytes() == first.tobytes()) == (window is ids)


@pytest.mark.parametrize("scheme", ["f32", "q4_k_m"])
def test_one_thread_and_two_are_bit_identical(scheme: str, ids: np.ndarray, tmp_path: Path) -> None:
    path = converted(write_checkpoint(tmp_path / "c", SHAPES["qwen3"]), tmp_path, scheme)
    assert score(path, ids, threads=1).tobytes() == score(path, ids, threads=2).tobytes()


def test_a_context_longer_than_a_batch(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "checkpoint", SHAPES["qwen2"], config={"max_position_embeddings": 4096})
    path = converted(source, tmp_path)
    ids = np.random.default_rng(5).integers(0, 272, BATCH + 300).astype(np.int32)
    with closing(GgufRuntime(path, context=len(ids), threads=2, kv_type="f32")) as runtime:
        chunks = [rows.copy() for rows in runtime.score(ids, 0)]
        late = [rows.copy() for rows in runtime.score(ids, BATCH + 100)]
        assert runtime.prefill(ids) > 0
    assert [len(rows) for rows in chunks] == [BATCH, 300]
    assert [len(rows) for rows in late] == [200]
    ours = np.concatenate(chunks)
    assert late[0].tobytes() == ours[BATCH + 100 :].tobytes()
    assert np.abs(ours - reference(source, ids)).max() < TOLERANCE


def test_kv_types_and_flash_attention_change_little_but_something(ids: np.ndarray, tmp_path: Path) -> None:
    path = converted(write_checkpoint(tmp_path / "c", SHAPES["qwen3-head-dim-128"]), tmp_path)
    exact = score(path, ids)
    for settings, most in (  # facts/gguf.md: 3.5e-3 for f16, about 0.1 for q8_0
        ({"kv_type": "f16"}, 0.01),
        ({"kv_type": "f16", "flash_attention": True}, 0.01),
        ({"kv_type": "bf16"}, 0.1),
        ({"kv_type": "q8_0", "flash_attention": True}, 0.3),
    ):
        difference = np.abs(score(path, ids, **settings) - exact).max()
        assert 0 < difference < most, settings


def test_a_cache_type_that_does_not_divide_the_head_is_refused_in_llama_cpps_words(f32_file: Path) -> None:
    with pytest.raises(ArtifactError, match="block size 32 does not divide n_embd_head_k=16"):
        GgufRuntime(f32_file, context=16, kv_type="q8_0", flash_attention=True)


def test_engine_says_what_a_score_depends_on(f32_file: Path) -> None:
    for flash_attention, said in ((False, "off"), (True, "on"), (None, "auto")):
        with closing(GgufRuntime(f32_file, context=16, threads=2, flash_attention=flash_attention)) as runtime:
            by = runtime.engine
        assert (by.name, by.kv_type, by.flash_attention, by.threads) == ("llama.cpp", "f16", said, 2)
        assert by.version.startswith("llama-cpp-python 0.3.36, ggml ")
        assert by.instruction_set
        assert (by.batch, by.micro_batch, by.mmap) == (BATCH, MICRO_BATCH, True)
        assert by.device == device()


@pytest.mark.parametrize("built", [True, False])
def test_the_device_is_what_the_build_has(built: bool, f32_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama(), "llama_supports_gpu_offload", lambda: built)
    for asked, said in (("auto", "gpu" if built else "cpu"), ("cpu", "cpu")):
        with closing(GgufRuntime(f32_file, context=16, threads=2, device=asked)) as runtime:
            assert runtime.engine.device == said


@pytest.mark.parametrize(
    "info",
    [
        "CPU : SSE3 = 1 | AVX = 1 | AVX2 = 0 | FMA = 1 | ",
        "CUDA : ARCHS = 900 | USE_GRAPHS = 1 | CPU : SSE3 = 1 | AVX = 1 | AVX2 = 0 | FMA = 1 | ",
        "SSE3 = 1 | AVX = 1 | AVX2 = 0 | FMA = 1 | ",
    ],
)
def test_the_instruction_set_is_the_cpus(info: str) -> None:
    assert cpu_features(info) == "SSE3 AVX FMA"


def test_open_runtime_takes_the_artifacts_file(tmp_path: Path, ids: np.ndarray) -> None:
    with Checkpoint(write_checkpoint(tmp_path / "c", SHAPES["qwen3"])) as checkpoint:
        artifact = write(checkpoint, "f32", tmp_path)
    with closing(open_runtime(tmp_path, artifact, context=200, threads=2, kv_type="f32")) as runtime:
        (rows,) = runtime.score(ids, 0)
        assert rows.tobytes() == score(tmp_path / "model.gguf", ids).tobytes()


def test_prefill_and_decode_take_positive_finite_time(f32_file: Path, ids: np.ndarray) -> None:
    with closing(GgufRuntime(f32_file, context=512, threads=1)) as runtime:
        seconds = [runtime.prefill(ids), runtime.decode(1), runtime.decode(20), runtime.prefill(ids)]
    assert all(0 < second < 60 for second in seconds)


def test_decoding_past_the_context_is_an_error(f32_file: Path) -> None:
    with closing(GgufRuntime(f32_file, context=256, threads=2)) as runtime:
        runtime.prefill(np.zeros(256, np.int32))
        with pytest.raises(MeasurementError, match="llama_decode of 1 tokens behind 256 failed with 1"):
            runtime.decode(1)


@pytest.mark.parametrize("kv_type", ["q8_0", "q4_0"])
def test_a_quantized_cache_needs_flash_attention(kv_type: str, f32_file: Path) -> None:
    with pytest.raises(ParamsError, match=f"kv_type {kv_type} needs flash attention"):
        GgufRuntime(f32_file, context=16, kv_type=kv_type, flash_attention=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_type": "q8"}, r"kv_type 'q8' does not exist; did you mean 'q8_0'\?"),
        ({"kv_type": "x"}, r"kv_type 'x' does not exist; known: f32, f16, bf16, q8_0, q4_0"),
        ({"device": "cuda"}, r"device 'cuda' does not exist; known: auto, cpu"),
    ],
)
def test_unknown_settings(settings: dict[str, str], message: str, f32_file: Path) -> None:
    with pytest.raises(ParamsError, match=message):
        GgufRuntime(f32_file, context=16, **settings)


def test_a_file_that_is_not_gguf_is_refused_in_llama_cpps_words(tmp_path: Path) -> None:
    path = tmp_path / "garbage.gguf"
    path.write_bytes(b"garbage" * 100)
    with pytest.raises(ArtifactError, match=r"cannot load .*garbage\.gguf:\n  llama\.cpp: .*(magic|gguf)"):
        GgufRuntime(path, context=16)


def test_a_file_cut_short_is_refused(f32_file: Path) -> None:
    f32_file.write_bytes(f32_file.read_bytes()[:-1000])
    with pytest.raises(ArtifactError, match=r"cannot load .*\n  llama\.cpp: "):
        GgufRuntime(f32_file, context=16)


KV_SHAPES = {  # layers, heads of keys and values, their size: each counts on its own
    "qwen2": Shape("qwen2", 3, hidden=128, ff=96, heads=2, kv_heads=1),
    "qwen3": Shape("qwen3", 2, hidden=64, ff=96, heads=4, kv_heads=4, head_dim=32),
}


class Endless(list[str]):
    """A log of which nothing is deleted."""

    def __delitem__(self, at: object) -> None:
        pass


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0", "q4_0"])
@pytest.mark.parametrize("context", [256, 1000])
@pytest.mark.parametrize("name", KV_SHAPES)
def test_the_bytes_of_the_cache_are_what_llama_cpp_logs(
    name: str, context: int, kv_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = Endless()
    monkeypatch.setattr(engine, "_log", log)
    path = converted(write_checkpoint(tmp_path / "c", KV_SHAPES[name]), tmp_path)
    with closing(GgufRuntime(path, context=context, threads=1, kv_type=kv_type, flash_attention=True)) as runtime:
        found = re.search(r"size = +([\d.]+) MiB \( *(\d+) cells, +(\d+) layers", "".join(log))
        assert found
        assert int(found[2]) == -(-context // 256) * 256
        assert int(found[3]) == KV_SHAPES[name].layers
        assert f"{runtime.kv_bytes / 2**20:.2f}" == found[1]
        shape = KV_SHAPES[name]
        head_dim = shape.head_dim if name == "qwen3" else 64
        bytes_each = {"f32": 4, "f16": 2, "q8_0": 34 / 32, "q4_0": 18 / 32}[kv_type]
        assert runtime.kv_bytes == 2 * shape.layers * shape.kv_heads * head_dim * int(found[2]) * bytes_each


def test_the_context_is_the_one_the_model_was_trained_for(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", SHAPES["qwen3"], config={"max_position_embeddings": 777})
    with Checkpoint(source) as checkpoint:
        artifact = write(checkpoint, "q8_0", tmp_path)
    assert context_length(tmp_path, artifact) == 777


def test_a_key_that_a_file_lacks_is_named(f32_file: Path) -> None:
    model = load_model(f32_file, vocab_only=True)
    assert metadata(model, "{arch}.head_width", "64") == "64"
    with pytest.raises(ArtifactError, match=r"the GGUF file has no key qwen3\.head_width"):
        metadata(model, "{arch}.head_width")
    llama().llama_model_free(model)


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match=r"cannot load .*absent\.gguf"):
        GgufRuntime(tmp_path / "absent.gguf", context=16)
