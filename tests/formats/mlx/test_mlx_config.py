"""config.json: mlx-lm's own text where it reads what transformers does, else one by which it computes the same."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mlx_oracle import mlx_convert, options_of, silenced
from numpy.typing import NDArray
from support import Shape, config_of, write_checkpoint

from pipeline.errors import CheckpointError
from pipeline.formats.mlx.config import normalised
from pipeline.formats.mlx.write import check, write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint

QWEN2, QWEN3 = Shape(), Shape("qwen3", heads=4, kv_heads=2, head_dim=32)
YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 32}
IDS = np.arange(100, dtype=np.int32) * 7 % 256


def change_of(config: dict[str, Any]) -> dict[str, Any]:
    """What normalising adds or alters."""
    found = normalised(config, spec_of(config))
    assert config.keys() <= found.keys()
    return {key: value for key, value in found.items() if key not in config or config[key] != value}


# Text


@pytest.mark.parametrize("scheme", ["int4", "mixed_4_6", "mxfp8", "bf16"])
@pytest.mark.parametrize("shape", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_a_config_that_mlx_lm_reads_as_it_is_keeps_its_text(shape: Shape, scheme: str, tmp_path: Path) -> None:
    config: dict[str, Any] = {
        **{"_name_or_path": "/home/me", "vision_config": {"a": 1}, "torch_dtype": "bfloat16", "Zed": "é", "n": None},
        **{"big": math.inf, "tagged": [{"__float__": "-Infinity"}, math.nan], "nested": {"b": 1, "a": [1e-9, True]}},
        "rope_scaling": {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512},
    }
    source = write_checkpoint(tmp_path / "c", shape, config=config)
    (source / "generation_config.json").write_text('{"eos_token_id": [262, 260], "top_p": 0.8}')
    (tmp_path / "ours").mkdir()
    with Checkpoint(source) as checkpoint:
        write(checkpoint, scheme, tmp_path / "ours")
    expected = mlx_convert(source, tmp_path / "theirs", options_of(scheme))
    text = (tmp_path / "ours" / "config.json").read_text()
    assert text == (expected / "config.json").read_text()
    assert "/home/me" not in text


@pytest.mark.parametrize(
    ("scheme", "config", "written"),
    [
        ("fp16", {"torch_dtype": "bfloat16"}, {"torch_dtype": "float16"}),
        ("fp16", {"dtype": "bfloat16"}, {"torch_dtype": "float16", "dtype": "float16"}),
        ("bf16", {"dtype": "float32", "torch_dtype": "float32"}, {"torch_dtype": "bfloat16", "dtype": "bfloat16"}),
        ("bf16", {}, {}),
        ("int4", {"dtype": "float16"}, {"torch_dtype": "float16", "dtype": "float16"}),
    ],
)
def test_the_dtype_is_that_of_the_weights(
    scheme: str, config: dict[str, str], written: dict[str, str], tmp_path: Path
) -> None:
    """mlx-lm leaves the checkpoint's, to which it would itself cast the weights back."""
    with Checkpoint(write_checkpoint(tmp_path / "c", config=config)) as checkpoint:
        write(checkpoint, scheme, tmp_path)
    found = json.loads((tmp_path / "config.json").read_text())
    assert {key: found[key] for key in ("torch_dtype", "dtype") if key in found} == written


def test_what_has_mlx_lm_run_other_code_is_left_out(tmp_path: Path) -> None:
    config = {"model_file": "evil.py", "quantize_activations": True, "quantization": None, "quantization_config": {}}
    with Checkpoint(write_checkpoint(tmp_path / "c", config=config)) as checkpoint:
        write(checkpoint, "bf16", tmp_path)
    assert not config.keys() & json.loads((tmp_path / "config.json").read_text()).keys()


# Keys


@pytest.mark.parametrize("shape", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_an_old_config_is_not_changed(shape: Shape) -> None:
    for scaling in (
        None,
        {"type": "linear", "factor": 2},
        {"rope_type": "yarn", **YARN, "beta_fast": 32, "beta_slow": 1.0},
    ):
        assert change_of(config_of(shape) | {"torch_dtype": "float32", "rope_scaling": scaling}) == {}


@pytest.mark.parametrize("shape", [QWEN2, QWEN3], ids=["qwen2", "qwen3"])
def test_what_is_absent_is_transformers_default(shape: Shape) -> None:
    config = config_of(shape)
    for key in ("rope_theta", "tie_word_embeddings", "num_key_value_heads", "rms_norm_eps"):
        del config[key]
    expected = {"rope_theta": 10_000.0, "tie_word_embeddings": False, "num_key_value_heads": 4, "rms_norm_eps": 1e-6}
    if shape is QWEN3:
        del config["head_dim"]
        expected["head_dim"] = 128
    assert change_of(config) == expected


def test_what_transformers_5_writes_elsewhere_is_found() -> None:
    config = config_of(QWEN2) | {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    assert change_of(config) == {"rope_theta": 5e5, "torch_dtype": "bfloat16"}
    del config["rope_theta"]
    assert change_of(config) == {"rope_theta": 5e5, "torch_dtype": "bfloat16"}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "yarn", **YARN, "beta_slow": None}},
        {"rope_scaling": {"type": "linear", "rope_type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0}, "max_position_embeddings": 32},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    ],
)
def test_yarn_that_mlx_lm_would_compute_otherwise_is_spelled_out(config: dict[str, Any]) -> None:
    """mlx-lm takes `type` first, 4096 for an original context that is not given, and null as it is."""
    assert change_of(config_of(QWEN2) | config) == {"rope_scaling": {"type": "yarn", "rope_type": "yarn", **YARN}}
    assert spec_of(normalised(config_of(QWEN2) | config, spec_of(config_of(QWEN2) | config))).rope == (
        spec_of(config_of(QWEN2) | config).rope
    )


def test_qwen3_reads_rope_parameters_itself() -> None:
    parameters = {"rope_type": "yarn", "rope_theta": 1e6, **YARN}
    assert change_of(config_of(QWEN3) | {"rope_parameters": parameters}) == {}


def test_an_attention_factor_becomes_mscale() -> None:
    config = config_of(QWEN3) | {"rope_scaling": {"rope_type": "yarn", **YARN, "attention_factor": 1.25}}
    scaling = change_of(config)["rope_scaling"]
    assert 0.1 * scaling["mscale"] * math.log(4.0) + 1 == pytest.approx(1.25, rel=1e-15)
    assert scaling["attention_factor"] == 1.25  # by which transformers goes
    again = normalised(config, spec_of(config))
    assert normalised(again, spec_of(again)) == again


def test_what_mlx_lm_cannot_compute_is_refused(tmp_path: Path) -> None:
    alone = {"rope_type": "yarn", "factor": 1.0, "attention_factor": 1.25}
    for shape, config, message in (
        (QWEN2, {"rope_scaling": alone}, r"attention_factor is 1\.25, but mlx-lm takes 1 where the factor is 1"),
        (QWEN2, {"head_dim": 32}, r"head_dim is 32, but mlx-lm takes hidden_size / num_attention_heads, 64 / 4"),
    ):
        source = write_checkpoint(tmp_path / "c", shape, config=config)
        with Checkpoint(source) as checkpoint, pytest.raises(CheckpointError, match=message):
            check(checkpoint, spec_of(checkpoint.config))


# Logits


def saved_by_transformers(folder: Path, model_type: str, tied: bool, rope: dict[str, Any]) -> NDArray[np.float32]:
    """A checkpoint as transformers 5 writes it, of weights that bfloat16 holds; returns the float32 logits of IDS."""
    import torch
    import transformers

    shape = QWEN3 if model_type == "qwen3" else QWEN2
    sizes = {key: value for key, value in config_of(shape).items() if key not in {"rope_theta", "architectures"}}
    settings = {**sizes, "tie_word_embeddings": tied, "rope_parameters": rope, "rms_norm_eps": 1e-5}
    name = model_type.capitalize()
    torch.manual_seed(7)
    model = getattr(transformers, f"{name}ForCausalLM")(getattr(transformers, f"{name}Config")(**settings)).eval()
    with torch.no_grad():
        for tensor in model.parameters():
            wide = torch.randn(tensor.shape) * (0.15 if tensor.ndim == 2 else 0.3) + (0 if tensor.ndim == 2 else 1)
            tensor.copy_(wide.to(torch.bfloat16))
        logits = model(torch.from_numpy(IDS[None].astype(np.int64))).logits[0].float().numpy()
    model.to(torch.bfloat16).save_pretrained(folder)
    made = write_checkpoint(folder.with_name("tokenizer"), shape)
    (folder / "tokenizer.json").write_text((made / "tokenizer.json").read_text())
    config = json.loads((folder / "config.json").read_text())
    assert "rope_theta" not in config
    assert config["rope_parameters"]["rope_theta"] == rope["rope_theta"]
    return logits


def mlx_logits(folder: Path) -> NDArray[np.float32]:
    """What mlx-lm computes in float32 from a folder."""
    with silenced():
        import mlx.core as mx
        from mlx_lm.utils import load_model

        model, _ = load_model(folder)
        model.set_dtype(mx.float32)
        return np.array(model(mx.array(IDS[None]))[0])


ROPES: dict[str, dict[str, Any]] = {
    "theta": {"rope_type": "default", "rope_theta": 500.0},
    "yarn": {"rope_type": "yarn", "rope_theta": 5000.0, **YARN},
    "yarn-attention": {"rope_type": "yarn", "rope_theta": 5000.0, **YARN, "attention_factor": 0.8, "beta_fast": 8.0},
    "yarn-own-context": {"rope_type": "yarn", "rope_theta": 5000.0, "factor": 2.0},
    "linear": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize(("model_type", "tied"), [("qwen2", False), ("qwen3", True)])
def test_mlx_lm_computes_what_transformers_does(model_type: str, tied: bool, rope: str, tmp_path: Path) -> None:
    expected = saved_by_transformers(tmp_path / "c", model_type, tied, ROPES[rope])
    (tmp_path / "out").mkdir()
    with Checkpoint(tmp_path / "c") as checkpoint:
        write(checkpoint, "bf16", tmp_path / "out")
    assert expected.std() > 0.5
    np.testing.assert_allclose(mlx_logits(tmp_path / "out"), expected, rtol=0, atol=1e-4)
    if model_type == "qwen2":  # this test sees it: mlx-lm takes the checkpoint as it is for another model
        config = json.loads((tmp_path / "c" / "config.json").read_text())
        (tmp_path / "out" / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": tied}))
        assert np.abs(mlx_logits(tmp_path / "out") - expected).max() > 0.1


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
def test_yarn_gives_the_same_logits_however_it_is_written(spelling: str, tmp_path: Path) -> None:
    """llama.cpp#13322."""
    import torch
    import transformers

    yarn = {spelling: "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config: dict[str, Any] = {"rope_scaling": yarn, "rope_theta": 5000.0}
    if spelling == "rope_parameters":
        config = {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5000.0, **YARN}, "rope_theta": None}
    source = write_checkpoint(tmp_path / "c", config=config)
    (tmp_path / "out").mkdir()
    with Checkpoint(source) as checkpoint:
        write(checkpoint, "bf16", tmp_path / "out")
    with silenced(), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
        expected = model(torch.from_numpy(IDS[None].astype(np.int64))).logits[0].numpy()
    np.testing.assert_allclose(mlx_logits(tmp_path / "out"), expected, rtol=0, atol=1e-4)
