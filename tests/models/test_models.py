"""config.json -> ModelSpec: sizes, tensors, rope, and configs that must be refused."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from support import Shape, config_of, random_tensors

from pipeline.errors import CheckpointError
from pipeline.models import spec_of
from pipeline.models.settings import AGAIN
from pipeline.types import Rope

QWEN3_0_6B = {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "head_dim": 128,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "attention_bias": False,
    "use_sliding_window": False,
    "sliding_window": None,
}
QWEN2_5_0_5B = {
    "model_type": "qwen2",
    "hidden_size": 896,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "num_hidden_layers": 24,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "use_sliding_window": False,
    "sliding_window": 32768,
}


def shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    return {tensor.name: tensor.shape for tensor in spec_of(config).tensors}


# Sizes and tensors


def test_qwen3_0_6b_has_the_head_dim_of_its_config() -> None:
    spec = spec_of(QWEN3_0_6B)
    assert (spec.d_model, spec.n_heads, spec.n_kv_heads, spec.head_dim) == (1024, 16, 8, 128)  # 1024 / 16 is 64
    found = shapes(QWEN3_0_6B)
    at = "model.layers.27.self_attn"
    assert found[f"{at}.q_proj.weight"] == (2048, 1024)
    assert found[f"{at}.k_proj.weight"] == found[f"{at}.v_proj.weight"] == (1024, 1024)
    assert found[f"{at}.o_proj.weight"] == (1024, 2048)
    assert found[f"{at}.q_norm.weight"] == found[f"{at}.k_norm.weight"] == (128,)
    assert spec.weights == 596_049_920  # as the model's page on the Hub says


def test_qwen3_without_head_dim_has_transformers_default() -> None:
    config = {key: value for key, value in QWEN3_0_6B.items() if key != "head_dim"}
    assert spec_of(config).head_dim == 128


def test_qwen2_5_0_5b_has_the_heads_of_its_width() -> None:
    spec = spec_of(QWEN2_5_0_5B)
    assert spec.head_dim == 64
    assert spec.weights == 494_032_768  # as the model's page on the Hub says
    assert (spec.n_layers, spec.d_ff, spec.vocab_size, spec.context_length) == (24, 4864, 151936, 32768)
    assert spec.norm_eps == 1e-6
    assert spec.rope == Rope(1e6)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_tensors_are_those_of_a_checkpoint(model_type: str, tied: bool) -> None:
    shape = Shape(model_type, layers=3, heads=4, kv_heads=2, hidden=64, head_dim=32, tied=tied)
    spec = spec_of(config_of(shape))
    assert shapes(config_of(shape)) == {name: weights.shape for name, weights in random_tensors(shape).items()}
    assert len({tensor.name for tensor in spec.tensors}) == len(spec.tensors)
    assert spec.tied is tied
    assert ("lm_head.weight" in shapes(config_of(shape))) is not tied


def test_qwen2_has_biases_and_qwen3_has_norms_on_q_and_k() -> None:
    def roles_of(model_type: str) -> set[str]:
        return {tensor.role for tensor in spec_of(config_of(Shape(model_type))).tensors}

    two, three = (spec_of(config_of(Shape(model_type))) for model_type in ("qwen2", "qwen3"))
    assert (two.qkv_bias, two.qk_norm) == (True, False)
    assert (three.qkv_bias, three.qk_norm) == (False, True)
    assert roles_of("qwen2") - roles_of("qwen3") == {"attn_q_bias", "attn_k_bias", "attn_v_bias"}
    assert roles_of("qwen3") - roles_of("qwen2") == {"attn_q_norm", "attn_k_norm"}


def test_roles_and_layers_of_a_layer() -> None:
    found = [(tensor.role, tensor.layer) for tensor in spec_of(config_of(Shape("qwen3", layers=1, tied=False))).tensors]
    assert found == [
        ("embed", None),
        ("attn_norm", 0),
        ("attn_q", 0),
        ("attn_k", 0),
        ("attn_v", 0),
        ("attn_q_norm", 0),
        ("attn_k_norm", 0),
        ("attn_output", 0),
        ("ffn_norm", 0),
        ("ffn_gate", 0),
        ("ffn_up", 0),
        ("ffn_down", 0),
        ("output_norm", None),
        ("head", None),
    ]


def test_the_embedded_checkpoint_has_these_weights(tiny: Path) -> None:
    with (tiny / "model.safetensors").open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    config = json.loads((tiny / "config.json").read_text())
    assert shapes(config) == {name: tuple(entry["shape"]) for name, entry in header.items()}
    assert spec_of(config).weights == 6_819_840
    assert sum(math.prod(entry["shape"]) for entry in header.values()) == 6_819_840


# Rope scaling in its three spellings (llama.cpp#13322, #10698)

YARN = {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 1.2, "beta_fast": 32.0}


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_theta": 1e6, "rope_scaling": {"rope_type": "yarn", "type": "yarn", **YARN}},
        {"rope_theta": None, "rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
        {"rope_theta": None, "rope_scaling": None, "rope_parameters": {"type": "yarn", "rope_theta": 1e6, **YARN}},
    ],
)
@pytest.mark.parametrize("base", [QWEN2_5_0_5B, QWEN3_0_6B])
def test_yarn_is_the_same_in_each_spelling(base: dict[str, Any], spelling: dict[str, Any]) -> None:
    expected = Rope(theta=1e6, scaling="yarn", factor=4.0, original_context=32768, attention_factor=1.2, beta_fast=32.0)
    assert spec_of(base | {"rope_theta": 5.0} | spelling).rope == expected


def test_yarn_without_an_original_context_has_the_config_s() -> None:
    rope = spec_of(QWEN2_5_0_5B | {"rope_scaling": {"type": "yarn", "factor": 2}}).rope
    assert rope == Rope(1e6, "yarn", 2.0, 32768)


def test_rope_scaling_takes_the_place_of_rope_parameters() -> None:
    """As in transformers 5: what the latter says and the former lacks would be lost, which nobody means."""
    yarn = {"rope_type": "yarn", **YARN}
    same = {"rope_parameters": {"rope_theta": 1e6, **yarn}, "rope_scaling": {"type": "yarn", **YARN}}
    assert spec_of(QWEN2_5_0_5B | same).rope == spec_of(QWEN2_5_0_5B | {"rope_scaling": yarn}).rope
    assert spec_of(QWEN2_5_0_5B | {"rope_scaling": {**yarn, "rope_theta": 5e5}}).rope.theta == 5e5
    lost = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "rope_scaling": yarn}
    with pytest.raises(CheckpointError) as caught:
        spec_of(QWEN2_5_0_5B | lost)
    assert "rope_parameters says rope_theta 500000.0, but rope_scaling takes its place, without it" in str(caught.value)
    assert "rope_parameters says rope_type 'default', but rope_scaling takes its place" in str(caught.value)


@pytest.mark.parametrize(
    "spelling",
    [
        {},
        {"rope_scaling": None},
        {"rope_scaling": {"rope_type": "default"}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "rope_theta": None},
    ],
)
def test_rope_without_scaling(spelling: dict[str, Any]) -> None:
    assert spec_of(QWEN2_5_0_5B | spelling).rope == Rope(1e6, scaling=None, factor=1.0, original_context=None)


def test_linear_scaling() -> None:
    rope = spec_of(QWEN2_5_0_5B | {"rope_scaling": {"type": "linear", "factor": 8}}).rope
    assert (rope.scaling, rope.factor) == ("linear", 8.0)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "llama3", "mrope"])
def test_a_scaling_that_is_not_computed_is_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match=f"rope scaling '{kind}' is not supported; known: default, linear, yarn"):
        spec_of(QWEN2_5_0_5B | {"rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize("kind", ["yarn", "linear"])
def test_a_scaling_without_its_factor_is_refused(kind: str) -> None:
    with pytest.raises(CheckpointError, match="factor"):
        spec_of(QWEN2_5_0_5B | {"rope_scaling": {"rope_type": kind}})


# Refused


def test_every_missing_key_is_listed() -> None:
    with pytest.raises(CheckpointError, match=r"config\.json of qwen3") as caught:
        spec_of({"model_type": "qwen3"})
    for key in (
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "intermediate_size",
        "vocab_size",
        "max_position_embeddings",
    ):
        assert f"- {key}: missing or not a positive integer" in str(caught.value)


@pytest.mark.parametrize("value", [0, -1, "896", 896.0, None])
def test_a_size_that_is_no_positive_integer_is_refused(value: object) -> None:
    with pytest.raises(CheckpointError, match="hidden_size: missing or not a positive integer") as caught:
        spec_of(QWEN2_5_0_5B | {"hidden_size": value})
    assert str(caught.value).count("\n  - ") == 1  # and no other


def test_all_kinds_of_problems_are_one_error() -> None:
    config = QWEN2_5_0_5B | {"vocab_size": None, "hidden_act": "gelu", "use_sliding_window": True}
    with pytest.raises(CheckpointError, match="vocab_size: missing") as caught:
        spec_of(config)
    assert "hidden_act: expected 'silu', found 'gelu'" in str(caught.value)
    assert "use_sliding_window: sliding-window attention is not supported" in str(caught.value)


@pytest.mark.parametrize(
    "setting",
    [{"use_sliding_window": True}, {"layer_types": ["full_attention", "sliding_attention"]}],
)
@pytest.mark.parametrize("base", [QWEN2_5_0_5B, QWEN3_0_6B])
def test_a_sliding_window_is_refused(base: dict[str, Any], setting: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="sliding-window attention is not supported"):
        spec_of(base | setting)


def test_a_window_that_is_switched_off_is_no_window() -> None:
    config = QWEN2_5_0_5B | {
        "sliding_window": 4096,
        "use_sliding_window": False,
        "layer_types": ["full_attention"] * 24,
    }
    assert spec_of(config) == spec_of(QWEN2_5_0_5B)


@pytest.mark.parametrize(
    ("model_type", "hint"),
    [
        ("qwen22", "did you mean 'qwen2'"),
        ("Qwen3", "did you mean 'qwen3'"),
        ("llama", "known: qwen2, qwen2_moe, qwen3, "),
    ],
)
def test_an_unknown_model_type_is_refused_with_a_hint(model_type: str, hint: str) -> None:
    with pytest.raises(CheckpointError, match=f"model_type '{model_type}' is not supported; {hint}"):
        spec_of(QWEN3_0_6B | {"model_type": model_type})


def test_no_model_type_is_refused() -> None:
    with pytest.raises(CheckpointError, match="model_type"):
        spec_of({"hidden_size": 64})


@pytest.mark.parametrize("kv_heads", [3, 5, 28])
def test_heads_that_are_no_multiple_of_kv_heads_are_refused(kv_heads: int) -> None:
    with pytest.raises(CheckpointError, match=f"num_attention_heads 14 is not a multiple of .* {kv_heads}"):
        spec_of(QWEN2_5_0_5B | {"num_key_value_heads": kv_heads})


@pytest.mark.parametrize("kv_heads", [0, -2, "2"])
def test_kv_heads_that_are_no_positive_integer_are_refused(kv_heads: object) -> None:
    with pytest.raises(CheckpointError, match="num_key_value_heads"):
        spec_of(QWEN2_5_0_5B | {"num_key_value_heads": kv_heads})


def test_without_kv_heads_every_head_has_its_own() -> None:
    config = {key: value for key, value in QWEN2_5_0_5B.items() if key != "num_key_value_heads"}
    assert spec_of(config).n_kv_heads == 14


def test_null_kv_heads_are_no_kv_heads() -> None:
    assert spec_of(QWEN2_5_0_5B | {"num_key_value_heads": None}).n_kv_heads == 14


@pytest.mark.parametrize("head_dim", [0, -1, "64", 64.0, True, [64]])
@pytest.mark.parametrize("base", [QWEN2_5_0_5B, QWEN3_0_6B])
def test_a_head_dim_that_is_no_positive_integer_is_refused(base: dict[str, Any], head_dim: object) -> None:
    with pytest.raises(CheckpointError, match=re.escape(f"head_dim must be a positive integer, found {head_dim!r}")):
        spec_of(base | {"head_dim": head_dim})


def test_a_width_below_the_heads_gives_no_head_dim() -> None:
    with pytest.raises(CheckpointError, match=r"head_dim must be a positive integer, found 0\n"):
        spec_of(QWEN2_5_0_5B | {"hidden_size": 8})


@pytest.mark.parametrize(
    "kinds", [["linear_attention"] * 24, ["full_attention"], "full_attention", [["full_attention"]]]
)
def test_layer_types_that_a_dense_model_does_not_have_are_refused(kinds: Any) -> None:
    with pytest.raises(
        CheckpointError, match=r"layer_types: expected full_attention for each of 24 layers, found \[?'?"
    ):
        spec_of(QWEN2_5_0_5B | {"layer_types": kinds})


def test_qwen3_with_biases_is_refused() -> None:
    with pytest.raises(CheckpointError, match="attention_bias is true"):
        spec_of(QWEN3_0_6B | {"attention_bias": True})


def test_what_is_wrong_with_sizes_rope_experts_and_layers_is_one_error() -> None:
    config = {
        "model_type": "qwen3_5_moe",
        "text_config": {
            "model_type": "qwen3_5_moe_text",
            **{key: QWEN3_0_6B[key] for key in ("hidden_size", "num_attention_heads", "num_key_value_heads")},
            "vocab_size": 0,
            "max_position_embeddings": 4096,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention"],
            "rope_parameters": {"rope_type": "longrope", "rope_theta": -1, "mrope_interleaved": False},
            "num_experts": 8,
            "num_experts_per_tok": 9,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 32,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 6,
            "linear_key_head_dim": 16,
            "linear_value_head_dim": 16,
        },
    }
    with pytest.raises(CheckpointError) as caught:
        spec_of(config)
    first, *problems, last = str(caught.value).splitlines()
    assert (first, last) == ("config.json of qwen3_5_moe:", AGAIN)
    assert problems == [
        "  - vocab_size: missing or not a positive integer, found 0",
        "  - num_experts_per_tok: expected at most num_experts, 8, found 9",
        "  - linear_conv_kernel_dim: missing or not a positive integer",
        "  - linear_num_value_heads 6 is not a multiple of linear_num_key_heads 4",
        "  - layer_types: expected linear_attention or full_attention for each of 4 layers",
        "  - rope_theta must be a number above 0, found -1",
        "  - rope scaling 'longrope' is not supported; known: default, linear, yarn",
        "  - mrope_interleaved must be true, found False",
    ]


def test_a_rope_that_is_no_object_is_told_with_the_rest() -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of(QWEN3_0_6B | {"rope_scaling": [4], "attention_bias": True, "hidden_act": "gelu"})
    assert str(caught.value).splitlines()[1:-1] == [
        "  - hidden_act: expected 'silu', found 'gelu'",
        "  - attention_bias is true; no released Qwen3 has biases and none are written",
        "  - rope_scaling must be an object or null, found [4]",
    ]


def test_experts_that_are_not_understood_ask_for_no_other_size() -> None:
    """A model of experts alone needs no intermediate_size, whatever else is wrong with it."""
    config = {key: value for key, value in QWEN3_0_6B.items() if key != "intermediate_size"}
    with pytest.raises(CheckpointError) as caught:
        spec_of(config | {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2})
    assert str(caught.value).splitlines()[1:-1] == ["  - moe_intermediate_size: missing or not a positive integer"]
