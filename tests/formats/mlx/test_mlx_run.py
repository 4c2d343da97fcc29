"""MLX folders as runtimes: the logits of three engines, replies, and what is refused."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, write_checkpoint

from pipeline import chat as chats
from pipeline.errors import ArtifactError, MeasurementError, ParamsError, PipelineError
from pipeline.formats import room
from pipeline.formats.mlx import engine, native
from pipeline.formats.mlx.native import MlxModel
from pipeline.formats.mlx.run import MlxRuntime, check_settings, context_length, unrepresentative
from pipeline.metrics import machine, parity
from pipeline.types import Windows

TOLERANCE = 1e-4
SHAPES = {
    "qwen2": Shape("qwen2", 2, hidden=64, ff=128, heads=4, kv_heads=2),
    "qwen2-untied": Shape("qwen2", 2, hidden=128, ff=64, heads=8, kv_heads=1, tied=False),
    "qwen3": Shape("qwen3", 2, hidden=64, ff=128, heads=4, kv_heads=2, head_dim=32),
    "qwen3-untied": Shape("qwen3", 2, hidden=64, ff=128, heads=2, kv_heads=1, head_dim=64, tied=False),
}
INT4 = {"quantize": True, "q_bits": 4}
PACKINGS: dict[str, dict[str, Any]] = {
    "int4": INT4,
    "int3-g32": {"quantize": True, "q_bits": 3, "q_group_size": 32},
    "mxfp4": {"quantize": True, "q_mode": "mxfp4"},
    "nvfp4": {"quantize": True, "q_mode": "nvfp4"},
    "mxfp8": {"quantize": True, "q_mode": "mxfp8"},
    "bf16": {},
}
CASES = [*((shape, "int4") for shape in SHAPES), *(("qwen3", packing) for packing in PACKINGS if packing != "int4")]
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
IM_END = 262


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 272, 150).astype(np.int32)


def converted(source: Path, **settings: Any) -> Path:
    """What mlx-lm makes of a checkpoint."""
    from mlx_lm import convert

    out = source.parent / f"{source.name}-mlx"
    convert(str(source), str(out), **settings)
    return out


def opened(folder: Path, **settings: Any) -> MlxRuntime:
    return MlxRuntime(folder, **{"context": 200, "threads": 2} | settings)


def score(scorer: Any, ids: np.ndarray, start: int = 0) -> np.ndarray:
    return np.concatenate([*scorer.score(ids, start)])


def reference(source: Path, made: Path, ids: np.ndarray) -> np.ndarray:
    """Logits of transformers' model of the checkpoint with the weights that mlx.core finds in the folder."""
    import mlx.core as mx
    import torch
    from transformers import AutoModelForCausalLM

    config = json.loads((made / "config.json").read_text()).get("quantization", {})
    stored: dict[str, Any] = {}
    for file in made.glob("*.safetensors"):
        stored |= mx.load(str(file))
    weights = {}
    for name, array in stored.items():
        stem = name.removesuffix(".weight")
        if name.endswith((".scales", ".biases")):
            continue
        if f"{stem}.scales" in stored:
            scales, biases = stored[f"{stem}.scales"], stored.get(f"{stem}.biases")
            if biases is not None:
                scales, biases = scales.astype(mx.float32), biases.astype(mx.float32)
            array = mx.dequantize(array, scales, biases, **config, dtype=mx.float32)
        weights[name] = torch.from_numpy(np.array(array.astype(mx.float32)))
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    missing, unexpected = model.load_state_dict(weights, strict=False)
    assert not unexpected
    assert set(missing) <= {"lm_head.weight"}
    with torch.inference_mode():
        found: np.ndarray = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
    return found


@pytest.mark.parametrize(("shape", "packing"), CASES)
def test_logits_are_those_of_the_dequantized_model(shape: str, packing: str, ids: np.ndarray, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SHAPES[shape])
    made = converted(source, **PACKINGS[packing])
    expected = reference(source, made, ids)
    with closing(opened(made)) as runtime:
        by_torch = score(runtime, ids)
        assert runtime.native is not None
        by_mlx = score(runtime.native, ids)
    assert by_torch.dtype == by_mlx.dtype == np.float32
    assert by_torch.shape == by_mlx.shape == expected.shape == (150, 272)
    assert expected.std() > 0.1
    assert np.abs(by_torch - expected).max() < TOLERANCE
    assert np.abs(by_mlx - expected).max() < TOLERANCE


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose floats are bfloat16, with a chat template."""
    source = write_checkpoint(
        tmp_path_factory.mktemp("mlx") / "source", SHAPES["qwen3"], config={"torch_dtype": "bfloat16"}
    )
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    return converted(source, **INT4)


@pytest.mark.parametrize("start", [1, 100, 149])
def test_rows_are_those_behind_the_start(start: int, folder: Path, ids: np.ndarray) -> None:
    with closing(opened(folder)) as runtime:
        for scorer in (runtime, runtime.native):
            found = score(scorer, ids, start)
            assert found.shape == (150 - start, 272)
            assert np.abs(found - score(scorer, ids)[start:]).max() < TOLERANCE


def test_engines_say_what_they_are(folder: Path) -> None:
    with closing(opened(folder, threads=1)) as runtime:
        assert context_length(folder, None) == 2048  # type: ignore[arg-type]
        scored_by, checked_by = runtime.engine, runtime.native.engine  # type: ignore[union-attr]
    assert (scored_by.name, scored_by.threads) == ("transformers on dequantized MLX weights", 1)
    assert scored_by.version.startswith("transformers 5.24.0, torch 2.13.0")
    assert (checked_by.name, checked_by.version) == ("mlx-lm in float32", "mlx-lm 0.32.2, mlx 0.32.4")
    for by in (scored_by, checked_by):
        assert (by.device, by.kv_type) == ("cpu", "f32")
        assert by.instruction_set
    assert scored_by.instruction_set.endswith(f", {machine.fingerprint()['cpu']}")  # MKL chooses kernels by it


def test_one_model_at_a_time_is_loaded(folder: Path, ids: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(opened(folder)) as runtime:
        before = score(runtime, ids)
        assert "_mlx" not in runtime.__dict__
        assert runtime.native is not None
        assert "_torch" not in runtime.__dict__
        assert score(runtime, ids).tobytes() == before.tobytes()
    with closing(opened(folder)) as runtime:
        monkeypatch.setattr("pipeline.formats.mlx.run.of_tensors", None)  # what is timed needs no torch
        assert runtime.prefill(ids) > 0


# The cache


@pytest.mark.parametrize("step", [16, 2048])
def test_a_prompt_and_then_token_by_token_is_what_score_says(
    step: int, folder: Path, ids: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "STEP", step)
    model = MlxModel(folder, "cpu")
    expected = score(model, ids)
    for prompt in (1, 50):
        model.prefill(ids[:prompt])
        found = [model._take_in(ids[at : at + 1]) for at in range(prompt, 150)]
        assert np.abs(np.stack(found) - expected[prompt:]).max() < TOLERANCE
        assert model._cache[0].offset == 150
    assert model.decode(3) > 0
    assert model._cache[0].offset == 153


@pytest.mark.parametrize(("prompt", "decoded"), [(100, 20), (256, 1), (40, 0)])
def test_the_bytes_of_the_cache_are_those_of_its_arrays(prompt: int, decoded: int, folder: Path) -> None:
    with closing(opened(folder, context=prompt + decoded)) as runtime:
        runtime.prefill(np.zeros(prompt, np.int32))
        runtime.decode(decoded)
        held = sum(layer.keys.nbytes + layer.values.nbytes for layer in runtime._mlx._cache)
        assert runtime.kv_bytes == held
        assert held == 2 * 2 * 2 * 32 * 4 * (256 if prompt + decoded <= 256 else 512)


# Apple Silicon, but for its GPU


@pytest.fixture
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    import mlx.core as mx

    monkeypatch.setattr(engine, "has_gpu", lambda: True)
    monkeypatch.setattr(engine, "device", lambda name: mx.cpu)


@pytest.mark.usefixtures("apple")
def test_on_apple_silicon_mlx_scores_in_the_artifacts_own_type(folder: Path, ids: np.ndarray, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SHAPES["qwen2"], "F32", config={"torch_dtype": "float32"})
    made = converted(source, **INT4)
    with closing(opened(made)) as runtime:
        assert "_mlx" in runtime.__dict__  # a cold start times the opening
        assert runtime.native is None
        assert (runtime.engine.name, runtime.engine.device, runtime.engine.kv_type) == ("mlx-lm", "gpu", "f32")
        assert np.abs(score(runtime, ids) - reference(source, made, ids)).max() < TOLERANCE
        assert "_torch" not in runtime.__dict__
        bytes_held, by = runtime.peak_memory()  # type: ignore[misc]
        assert by == "mlx.core.get_peak_memory"
        assert bytes_held > made.joinpath("model.safetensors").stat().st_size
    with closing(opened(folder)) as runtime:
        assert runtime.engine.kv_type == "bf16"
        assert runtime.kv_bytes == 2 * 2 * 2 * 32 * 2 * 256
        found = score(runtime, ids)
        with closing(opened(folder, device="cpu")) as other:
            assert other.engine.device == "cpu"
            assert other.peak_memory() is None
            assert 1e-4 < np.abs(found - score(other, ids)).max() < 0.5  # sums in bfloat16


@pytest.mark.usefixtures("apple")
def test_replies_of_mlx_are_those_of_torch(folder: Path, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", SHAPES["qwen3"], "F32", config={"torch_dtype": "float32"})
    made = converted(source, **INT4)
    said = []
    for device in ("auto", "cpu"):
        with closing(opened(made, device=device)) as runtime:
            said.append(runtime.reply([1, 2, 3], 12))
    assert said[0] == said[1]
    assert len(said[0].ids) == 12


def test_a_speed_counts_where_users_run_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gpu, device, expected in (
        (False, "auto", "MLX on a CPU is not what its users run"),
        (True, "cpu", "MLX on a CPU is not what its users run"),
        (True, "auto", None),
    ):
        monkeypatch.setattr(engine, "has_gpu", lambda has_gpu=has_gpu: has_gpu)
        assert unrepresentative(device) == expected
        assert room("gguf", "run").unrepresentative(device) is None


# The chat


def test_the_prompt_is_the_templates(folder: Path, tmp_path: Path) -> None:
    with closing(opened(folder)) as runtime:
        found = runtime.prompt(chats.MESSAGES)
        assert found is not None
        assert found.text == "<|im_start|>Repeat after me: one, two, three.<|im_end|>"
        assert (found.ids[0], found.ids[-1]) == (261, IM_END)
        assert runtime._decoded(found.ids) == found.text
    with closing(opened(converted(write_checkpoint(tmp_path / "c", SHAPES["qwen2"]), **INT4))) as runtime:
        assert runtime.prompt(chats.MESSAGES) is None


def test_a_template_that_fails_is_an_error(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "chat_template.jinja").write_text("{{ raise_exception('no system message') }}")
    with (
        closing(opened(copy)) as runtime,
        pytest.raises(ArtifactError, match=r"copy: its chat template fails .* \(no system message\)"),
    ):
        runtime.prompt(chats.MESSAGES)


def test_a_reply_ends_where_mlx_lm_would(folder: Path, tmp_path: Path) -> None:
    prompt = [5, 6, 7]
    with closing(opened(folder)) as runtime:
        said = runtime.reply(prompt, 12)
        expected = [int(np.argmax(score(runtime, np.array(prompt), 2)[-1]))]
        while len(expected) < 12:
            expected.append(int(np.argmax(score(runtime, np.array(prompt + expected), len(prompt))[-1])))
        assert said.ids == tuple(expected)
        assert (said.text, said.stopped) == (runtime._decoded(expected), None)
    end = max(set(expected), key=expected.index)  # first comes late
    at = expected.index(end)
    for name, change in (
        ("config.json", {"eos_token_id": [end]}),
        ("generation_config.json", {"eos_token_id": [IM_END, end]}),  # before config.json
    ):
        copy = tmp_path / name
        shutil.copytree(folder, copy)
        raw = json.loads((copy / name).read_text()) if (copy / name).exists() else {}
        (copy / name).write_text(json.dumps(raw | change))
        with closing(opened(copy)) as runtime:
            found = runtime.reply(prompt, 12)
            assert found.ids == tuple(expected[: at + 1])
            assert found.stopped == runtime._decoded([end])
            assert found.text == runtime._decoded(expected[:at])


# Parity


def windows(ids: np.ndarray) -> Windows:
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(len(ids), 30))


def test_a_config_that_mlx_reads_otherwise_fails_parity(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 5 writes rope_theta into rope_parameters alone, and mlx-lm's qwen2 then takes 1e6: were torch to
    score by what transformers reads, MLX would not agree.
    """
    monkeypatch.setattr("pipeline.formats.mlx.run.as_read", lambda config: config)
    for theta, agrees in ((1e6, True), (1e3, False)):
        source = write_checkpoint(tmp_path / f"{theta:g}", SHAPES["qwen2"])
        config = json.loads((source / "config.json").read_text())
        del config["rope_theta"]
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": theta}
        (source / "config.json").write_text(json.dumps(config))
        given = windows(np.random.default_rng(1).integers(0, 272, (3, 80)).astype(np.int32))
        with closing(opened(converted(source, **INT4))) as runtime:
            logits = np.stack([score(runtime, ids, given.start)[:-1] for ids in given.ids]).astype(np.float64)
            targets = given.ids[:, given.start + 1 :, None]
            scored = np.take_along_axis(logits, targets, 2)[..., 0] - np.log(np.exp(logits).sum(2))
            assert runtime.native is not None
            if agrees:
                found = parity.check(runtime.native, given, scored.astype(np.float32), "torch")
                assert 0 < found["max_difference"] < 5e-5
                assert (found["windows"], found["tokens"], found["limit"]) == (2, 2 * 39, 1e-3)
                assert found["engine"]["name"] == "mlx-lm in float32"
            else:
                with pytest.raises(MeasurementError, match="mlx-lm in float32 does not compute what was scored"):
                    parity.check(runtime.native, given, scored.astype(np.float32), "torch")


# Refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_type": "q8_0"}, "kv_type q8_0 is a setting of GGUF: .* the `evaluate` of the GGUF variants"),
        ({"kv_type": "f32"}, "kv_type f32 is a setting of GGUF"),
        ({"flash_attention": True}, "flash_attention is a setting of GGUF"),
        ({"device": "cuda"}, r"device 'cuda' does not exist; known: auto, cpu"),
    ],
)
def test_settings_that_mlx_does_not_have(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ParamsError, match=message):
        opened(folder, **settings)


def test_the_defaults_are_taken() -> None:
    check_settings("f16", False)
    check_settings("f16", None, "cpu")


def test_a_folder_that_mlx_lm_does_not_load_is_named(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no_such_model"}))
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(ArtifactError, match=rf"cannot load the model of {tmp_path}: .*no_such_model"):
        engine.load_model(tmp_path)
    with pytest.raises(ArtifactError, match=rf"cannot load the tokenizer of {tmp_path}"):
        engine.load_tokenizer(tmp_path)


def test_code_of_a_folder_is_not_run(folder: Path, tmp_path: Path) -> None:
    """Neither a model's nor a tokenizer's."""
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for name, change in (
        ("config.json", {"model_file": "own.py"}),
        ("tokenizer_config.json", {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}),
    ):
        (copy / name).write_text(json.dumps(json.loads((copy / name).read_text()) | change))
    with pytest.raises(ArtifactError, match=r"own\.py"):
        engine.load_model(copy)
    assert type(engine.load_tokenizer(copy)._tokenizer).__module__.startswith("transformers.")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(("module", "said"), [("mlx.core", "MLX does not load"), ("mlx_lm", "mlx-lm is not installed")])
def test_a_machine_without_mlx_is_told_what_to_install(
    module: str, said: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.core.cache_clear()
    if module == "mlx.core":
        monkeypatch.setitem(sys.modules, "mlx.core", None)
    else:
        monkeypatch.setattr(engine, "find_spec", lambda name: None)
    with pytest.raises(PipelineError, match=rf"{said}.* Run: make setup"):
        opened(folder)
