"""The architectures with experts and DeltaNets: their tensors are transformers' parameters, however they are stored."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support import write_safetensors

from pipeline.errors import CheckpointError
from pipeline.models import MODEL_TYPES, spec_of, text_config
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import DeltaNet, Dropped, Experts, ModelSpec, Rope, Span, TensorSpec

SIZES = {
    **{"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2},
    **{"vocab_size": 272, "max_position_embeddings": 2048, "intermediate_size": 96, "head_dim": 24},
}
EXPERTS = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 40}
SHARED = EXPERTS | {"shared_expert_intermediate_size": 48}
DELTA = {
    **{"linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    **{"linear_key_head_dim": 16, "linear_value_head_dim": 8},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2": {key: value for key, value in SIZES.items() if key != "head_dim"},
    "qwen3": SIZES,
    "qwen2_moe": {key: value for key, value in SIZES.items() if key != "head_dim"} | SHARED,
    "qwen3_moe": SIZES | EXPERTS,
    "qwen3_next": SIZES | SHARED | DELTA,
    "qwen3_5": SIZES | DELTA,
    "qwen3_5_moe": SIZES | SHARED | DELTA,
}


def config_of(model_type: str, **settings: Any) -> dict[str, Any]:
    return {"model_type": model_type, **CONFIGS[model_type], **settings}


def hybrid(**settings: Any) -> dict[str, Any]:
    return config_of("qwen3_5", **settings)


def shapes_of(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """As a checkpoint stores them."""
    return {span.name: span.shape for tensor in (*spec.tensors, *spec.mtp) for span in tensor.stored}


def renamed(shapes: dict[str, tuple[int, ...]], before: str, after: str) -> dict[str, tuple[int, ...]]:
    return {after + name.removeprefix(before) if name.startswith(before) else name: s for name, s in shapes.items()}


MTP = {
    "mtp.fc.weight": (64, 128),
    "mtp.pre_fc_norm_embedding.weight": (64,),
    "mtp.pre_fc_norm_hidden.weight": (64,),
    "mtp.norm.weight": (64,),
    "mtp.layers.0.input_layernorm.weight": (64,),
    "mtp.layers.0.self_attn.q_proj.weight": (192, 64),
    "mtp.layers.0.self_attn.k_proj.weight": (48, 64),
    "mtp.layers.0.self_attn.v_proj.weight": (48, 64),
    "mtp.layers.0.self_attn.q_norm.weight": (24,),
    "mtp.layers.0.self_attn.k_norm.weight": (24,),
    "mtp.layers.0.self_attn.o_proj.weight": (64, 96),
    "mtp.layers.0.post_attention_layernorm.weight": (64,),
    "mtp.layers.0.mlp.gate_proj.weight": (96, 64),
    "mtp.layers.0.mlp.up_proj.weight": (96, 64),
    "mtp.layers.0.mlp.down_proj.weight": (64, 96),
}
"""One layer that guesses the token after next, of `hybrid()`."""


# Tensors


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("model_type", [*MODEL_TYPES])
def test_tensors_are_transformers_parameters(model_type: str, tied: bool) -> None:
    import torch
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    config = config_of(model_type, tie_word_embeddings=tied)
    read = CONFIG_MAPPING[text_config(config)["model_type"]].from_dict(config)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(read)
    expected = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    assert {tensor.name: tensor.shape for tensor in spec_of(config).tensors} == expected


def test_experts_are_stored_each_alone() -> None:
    spec = spec_of(config_of("qwen3_moe"))
    assert spec.experts == Experts(6, 2, 40, 0, norm_topk=False)
    at = "model.layers.1.mlp.experts"
    gate_up, down = (t for t in spec.tensors if t.name.startswith(at))
    assert gate_up.spans[:3] == (
        Span(f"{at}.0.gate_proj.weight", (40, 64), 0, 40),
        Span(f"{at}.0.up_proj.weight", (40, 64), 0, 40),
        Span(f"{at}.1.gate_proj.weight", (40, 64), 0, 40),
    )
    assert len(gate_up.spans) == 12
    assert [span.name for span in down.spans] == [f"{at}.{i}.down_proj.weight" for i in range(6)]


def test_fused_experts_are_one_stored_tensor() -> None:
    config = config_of("qwen3_5_moe")
    fused = {tensor.name: tensor.shape for tensor in spec_of(config).tensors}
    spec = spec_of(config, fused)
    gate_up = next(t for t in spec.tensors if t.role == "expert_gate_up")
    assert gate_up.stored == (Span(gate_up.name, (6, 80, 64), 0, 480),)
    assert not spec.dropped


def test_rows_are_read_wherever_they_are_stored(tmp_path: Any) -> None:
    rng = np.random.default_rng(0)
    tensors = {name: rng.standard_normal(shape, np.float32) for name, shape in (("a", (3, 4)), ("b", (2, 5, 4)))}
    write_safetensors(tmp_path / "model.safetensors", tensors, "F32")
    (tmp_path / "config.json").write_text("{}")
    spans = (Span("b", (2, 5, 4), 7, 3), Span("a", (3, 4), 0, 2), Span("b", (2, 5, 4), 0, 1))
    tensor = TensorSpec("made", "", None, (2, 3, 4), spans=spans)
    flat = tensors["b"].reshape(10, 4)
    expected = np.concatenate([flat[7:10], tensors["a"][:2], flat[:1]])
    with Checkpoint(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor(tensor), expected.reshape(2, 3, 4))
        np.testing.assert_array_equal(checkpoint.rows(tensor, 2, 3), expected[2:5])
        part = replace(tensor, shape=(3, 4), spans=tensor.taken([(5, 1), (1, 2)]))
        np.testing.assert_array_equal(checkpoint.tensor(part), expected[[5, 1, 2]])


# Layers of a hybrid


def test_every_fourth_layer_of_a_hybrid_has_attention() -> None:
    spec = spec_of(hybrid(num_hidden_layers=8))
    assert spec.linear == (0, 1, 2, 4, 5, 6)
    assert spec.delta == DeltaNet(conv=4, k_heads=2, v_heads=6, k_dim=16, v_dim=8)
    assert (spec.delta.keys, spec.delta.values, spec.delta.channels) == (32, 48, 112)
    assert spec_of(hybrid(full_attention_interval=2)).linear == (0, 2)
    kinds = ["full_attention", "linear_attention", "full_attention", "linear_attention"]
    assert spec_of(hybrid(layer_types=kinds)).linear == (1, 3)


def test_projections_are_fused_in_qwen3_next_alone() -> None:
    roles = {kind: {t.role for t in spec_of(config_of(kind)).tensors} for kind in ("qwen3_next", "qwen3_5")}
    assert {"delta_qkvz", "delta_ba"} <= roles["qwen3_next"]
    assert {"delta_qkv", "delta_z", "delta_a", "delta_b"} <= roles["qwen3_5"]


@pytest.mark.parametrize(
    "spelling",
    [
        {"rope_theta": 1e7, "partial_rotary_factor": 0.5},
        {"rope_parameters": {"rope_theta": 1e7, "rope_type": "default", "partial_rotary_factor": 0.5}},
        {"rope_theta": 1e7, "rope_scaling": {"type": "default", "partial_rotary_factor": 0.5}},
    ],
)
def test_a_part_of_each_head_is_rotated_under_every_spelling(spelling: dict[str, Any]) -> None:
    assert spec_of(config_of("qwen3_next", **spelling)).rope == Rope(1e7, dims=12)
    assert spec_of(hybrid(**spelling)).rope == Rope(1e7, dims=12, sections=(11, 11, 10))


def test_sections_are_those_of_the_config() -> None:
    parameters = {"rope_theta": 1e7, "mrope_section": [2, 1, 1], "mrope_interleaved": True}
    assert spec_of(hybrid(rope_parameters=parameters)).rope == Rope(1e7, dims=6, sections=(2, 1, 1))


# Checkpoints that hold more


@pytest.mark.parametrize("prefix", ["model.language_model.", "language_model.model."])
def test_the_text_part_of_a_larger_model_is_found(prefix: str) -> None:
    text = hybrid() | {"model_type": "qwen3_5_text"}
    config = {"model_type": "qwen3_5", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    vision = {"model.visual.blocks.0.attn.qkv.weight": (96, 32), "model.visual.pos_embed.weight": (9, 32)}
    spec = spec_of(config, renamed(shapes_of(spec_of(text)), "model.", prefix) | vision)
    assert spec.model_type == "qwen3_5"
    assert spec.tensors[0] == TensorSpec(
        "model.embed_tokens.weight",
        "embed",
        None,
        (272, 64),
        spans=(Span(f"{prefix}embed_tokens.weight", (272, 64), 0, 272),),
    )
    assert spec.dropped == (
        Dropped("vision tower", "only the text part is converted", tuple(sorted(vision)), 96 * 32 + 9 * 32),
    )


def test_a_tensor_that_is_missing_is_named_as_the_others_are(tmp_path: Any) -> None:
    text = hybrid(num_hidden_layers=1) | {"model_type": "qwen3_5_text"}
    shapes = renamed(shapes_of(spec_of(text)), "model.", "model.language_model.")
    del shapes["model.language_model.layers.0.linear_attn.A_log"]
    spec = spec_of({"model_type": "qwen3_5", "text_config": text}, shapes | {"model.odd": (3,)})
    names = {span.name for tensor in spec.tensors for span in tensor.stored}
    assert "model.language_model.layers.0.linear_attn.A_log" in names
    assert not spec.dropped  # what is unknown is not dropped: `check` lists it


def test_mtp_layers_that_are_there_are_numbered_behind_the_others() -> None:
    shapes = shapes_of(spec_of(hybrid())) | MTP
    for settings in ({}, {"mtp_num_hidden_layers": 1}):  # some configs do not say
        spec = spec_of(hybrid(**settings), shapes)
        assert {span.name: span.shape for tensor in spec.mtp for span in tensor.stored} == MTP
        assert {tensor.layer for tensor in spec.mtp} == {4}
        assert (spec.mtp_layers, spec.dropped) == (1, ())
    assert spec.weights == sum(tensor.weights for tensor in spec.tensors)


def test_mtp_layers_that_are_not_wanted_are_dropped() -> None:
    spec = spec_of(hybrid(mtp_num_hidden_layers=0), shapes_of(spec_of(hybrid())) | MTP)
    assert (spec.mtp, spec.mtp_layers) == ((), 0)
    (dropped,) = spec.dropped
    assert (dropped.part, dropped.tensors) == ("MTP layers", tuple(sorted(MTP)))
    assert dropped.weights == 64 * 128 + 5 * 64 + (192 + 48 + 48 + 96) * 64 + 2 * 24 + 3 * 96 * 64


def test_stray_mtp_tensors_are_not_dropped() -> None:
    """Those without a layer, of a model that has none, and of another name: config.json does not say 0 of them."""
    join = {"mtp.fc.weight": MTP["mtp.fc.weight"]}
    assert spec_of(hybrid(mtp_num_hidden_layers=1), shapes_of(spec_of(hybrid())) | join).dropped == ()
    assert spec_of(hybrid(), shapes_of(spec_of(hybrid())) | MTP | {"mtp.embed_tokens.weight": (9, 64)}).dropped == ()
    dense = config_of("qwen3_moe")
    assert spec_of(dense, shapes_of(spec_of(dense)) | join).dropped == ()


def test_mtp_layers_that_are_only_declared_are_none() -> None:
    spec = spec_of(hybrid(mtp_num_hidden_layers=1), shapes_of(spec_of(hybrid())))
    assert (spec.mtp, spec.dropped) == ((), ())


def test_an_mtp_layer_of_which_a_tensor_is_missing_is_there_and_named(tmp_path: Any) -> None:
    shapes = shapes_of(spec_of(hybrid())) | MTP
    for missing in ("mtp.layers.0.input_layernorm.weight", "mtp.fc.weight"):
        left = {name: shape for name, shape in shapes.items() if name != missing}
        spec = spec_of(hybrid(), left)
        assert (spec.mtp_layers, spec.dropped) == (1, ())
        assert missing in {span.name for tensor in spec.mtp for span in tensor.stored}


# Refused


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (config_of("qwen3_moe", num_experts=None), "num_experts: missing or not a positive integer"),
        (
            config_of("qwen3_moe", num_experts_per_tok=7),
            "num_experts_per_tok: expected at most num_experts, 6, found 7",
        ),
        (config_of("qwen3_moe", moe_intermediate_size=0), "moe_intermediate_size: missing or not a positive integer"),
        (config_of("qwen3_moe", mlp_only_layers=[0]), "every layer must have experts; mixed ones are not read"),
        (config_of("qwen3_moe", decoder_sparse_step=2), "every layer must have experts; mixed ones are not read"),
        (config_of("qwen3_moe", norm_topk_prob="yes"), "norm_topk_prob: expected true or false, found 'yes'"),
        (config_of("qwen3_moe", attention_bias=True), "attention_bias: expected false"),
        (config_of("qwen2_moe", qkv_bias=False), "qkv_bias: expected true"),
        (config_of("qwen2_moe", shared_expert_intermediate_size=None), "shared_expert_intermediate_size: missing"),
        (config_of("qwen3_5_moe", norm_topk_prob=False), "norm_topk_prob: expected true"),
        (hybrid(linear_num_value_heads=3), "linear_num_value_heads 3 is not a multiple of linear_num_key_heads 2"),
        (hybrid(linear_conv_kernel_dim=None), "linear_conv_kernel_dim: missing or not a positive integer"),
        (hybrid(layer_types=["full_attention"]), "layer_types: expected linear_attention or full_attention for each"),
        (hybrid(layer_types=[["full_attention"]] * 4), "layer_types: expected linear_attention or full_attention"),
        (hybrid(mtp_use_dedicated_embeddings=True), "mtp_use_dedicated_embeddings: expected false"),
        (hybrid(full_attention_interval=0), "full_attention_interval: expected a positive integer, found 0"),
        (hybrid(partial_rotary_factor=1.5), "partial_rotary_factor must be above 0 and at most 1, found 1.5"),
        (
            hybrid(partial_rotary_factor=0.01),
            "partial_rotary_factor 0.01 of head_dim 24 must be an even number, found 0",
        ),
        (
            hybrid(partial_rotary_factor=0.125),
            "partial_rotary_factor 0.125 of head_dim 24 must be an even number, found 3",
        ),
        (hybrid(rope_parameters={"mrope_section": [1] * 5}), "mrope_section must be three or four whole numbers"),
        (
            hybrid(rope_parameters={"mrope_section": [8]}),
            "mrope_section must be three or four whole numbers, found [8]",
        ),
        (hybrid(rope_parameters={"mrope_interleaved": False}), "mrope_interleaved must be true, found False"),
        ({"model_type": "qwen3_5", "text_config": 3}, "text_config must be an object, found 3"),
    ],
)
def test_a_setting_that_would_change_the_function_unseen_is_refused(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        spec_of(config)
    assert problem in str(caught.value)
