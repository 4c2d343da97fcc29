"""config.json of models with experts and of hybrids: what mlx-lm takes of it, and what it cannot hold."""

from __future__ import annotations

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from family import COMMON, FAMILY, OWN
from family_folders import checkpoint, convert

from pipeline.errors import ArtifactError, CheckpointError
from pipeline.formats.mlx.arguments import read_spec
from pipeline.formats.mlx.config import normalised
from pipeline.formats.mlx.write import check
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import ModelSpec

NEW = {"decoder_sparse_step": 1, "mlp_only_layers": [], "rms_norm_eps": 1e-6}
"""Keys that transformers writes for all models with experts."""

OLD: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"num_experts": 6},
    "qwen3_moe": {"num_experts": 6},
    "qwen3_next": {"num_experts": 6, "partial_rotary_factor": 0.5, "full_attention_interval": 4},
    "qwen3_5": {"full_attention_interval": 4},
    "qwen3_5_moe": {"num_experts": 6, "full_attention_interval": 4},
}
"""Keys of checkpoints as transformers 4 saved them, or of the Hub's own."""


def config_of(model_type: str, **settings: Any) -> dict[str, Any]:
    """A config.json that mlx-lm reads as it is."""
    config = {"model_type": model_type, **COMMON, **OWN[model_type], **NEW, **OLD[model_type]}
    if not model_type.startswith("qwen3_5"):
        config = {key: value for key, value in config.items() if key != "rope_parameters"} | {"rope_theta": 10_000.0}
    return config | settings


def saved(model_type: str) -> dict[str, Any]:
    """The same as transformers 5 writes it."""
    config = {"model_type": model_type, **COMMON, **OWN[model_type], **NEW, "dtype": "bfloat16"}
    if model_type.startswith("qwen3_5"):
        config["model_type"] += "_text"
    if model_type in FAMILY[2:]:
        config["layer_types"] = [*["linear_attention"] * 3, "full_attention"]
    if "moe" in model_type or model_type == "qwen3_next":
        config["num_local_experts" if model_type == "qwen3_moe" else "num_experts"] = 6
    return config


def change_of(config: dict[str, Any]) -> dict[str, Any]:
    """What normalising adds or alters."""
    found = normalised(config, spec_of(config))
    return {key: value for key, value in found.items() if key not in config or config[key] != value}


@pytest.mark.parametrize("model_type", FAMILY)
def test_what_mlx_lm_reads_as_transformers_does_is_not_changed(model_type: str) -> None:
    assert change_of(config_of(model_type)) == {}


ROPE: dict[str, Any] = {"rope_theta": 10_000.0}


@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("qwen2_moe", ROPE),
        ("qwen3_moe", {**ROPE, "num_experts": 6}),
        ("qwen3_next", {**ROPE, "partial_rotary_factor": 0.5}),
        ("qwen3_5", {"model_type": "qwen3_5"}),
        ("qwen3_5_moe", {"model_type": "qwen3_5_moe"}),
    ],
)
def test_what_transformers_5_writes_elsewhere_is_found(model_type: str, changes: dict[str, Any]) -> None:
    assert change_of(saved(model_type)) == changes | {"torch_dtype": "bfloat16"}
    assert read_spec(normalised(saved(model_type), spec_of(saved(model_type)))) == spec_of(saved(model_type))


def test_what_is_absent_is_transformers_default() -> None:
    config = config_of("qwen3_next")
    for key in (
        "norm_topk_prob",
        "partial_rotary_factor",
        "mlp_only_layers",
        "decoder_sparse_step",
        "intermediate_size",
    ):
        del config[key]
    assert change_of(config) == {
        **{"norm_topk_prob": True, "partial_rotary_factor": 0.25, "mlp_only_layers": [], "decoder_sparse_step": 1},
        "intermediate_size": 32,
    }
    config = config_of("qwen3_5", full_attention_interval=2)
    for key in ("rope_parameters", "full_attention_interval", "head_dim"):
        del config[key]
    rope = {"type": "default", "rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": 0.25}
    positions = {"mrope_section": [11, 11, 10], "mrope_interleaved": True}
    assert change_of(config) == {"head_dim": 256, "rope_parameters": rope | positions}


def test_a_null_is_written_out() -> None:
    assert change_of(config_of("qwen3_moe", mlp_only_layers=None)) == {"mlp_only_layers": []}
    assert change_of(config_of("qwen2_moe", rope_scaling={"type": "default"})) == {"rope_scaling": None}
    assert change_of(config_of("qwen2_moe", rope_traditional=True)) == {"rope_traditional": False}


YARN = {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize("spelling", ["type", "rope_type", "rope_parameters"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5"])
def test_yarn_is_the_same_however_it_is_written(model_type: str, spelling: str) -> None:
    """llama.cpp#13322."""
    config = config_of(model_type)
    config.pop("rope_parameters", None)
    config |= {"rope_theta": 5000.0, "partial_rotary_factor": 0.5}
    if spelling == "rope_parameters":
        own = {key: config.pop(key) for key in ("rope_theta", "partial_rotary_factor")}
        config["rope_parameters"] = {"rope_type": "yarn", **YARN, **own}
    else:
        config["rope_scaling"] = {spelling: "yarn", **YARN}
    spec = spec_of(config)
    assert (spec.rope.scaling, spec.rope.theta, spec.rope.dims) == ("yarn", 5000.0, 16)
    read = read_spec(normalised(config, spec)).rope
    assert (read.scaling, read.theta, read.dims, read.factor, read.original_context) == ("yarn", 5000, 16, 4, 512)
    assert read.attention_factor == pytest.approx(1.138629436, rel=1e-9)


@pytest.mark.parametrize(("share", "head_dim"), [(0.3, 48), (0.25, 256), (0.69, 44), (1.0, 50)])
def test_a_share_of_a_head_rotates_as_many_dims(share: float, head_dim: int) -> None:
    """Of 44, 30 over 44 would be 29."""
    config = config_of("qwen3_next", head_dim=head_dim, partial_rotary_factor=share)
    assert change_of(config) == {}
    del config["partial_rotary_factor"]
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 10_000.0, "partial_rotary_factor": share}
    written = normalised(config, spec_of(config))["partial_rotary_factor"]
    assert int(head_dim * written) == int(head_dim * share)


# Larger models


def wrapped(model_type: str, **text: Any) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": model_type,
        "text_config": {**config_of(model_type), "model_type": f"{model_type}_text", "dtype": "bfloat16", **text},
        "vision_config": {"depth": 1},
        "tie_word_embeddings": True,
    }


def test_what_mlx_lm_takes_of_a_larger_model_is_changed_in_its_text_config() -> None:
    config = wrapped("qwen3_5", full_attention_interval=None, layer_types=["linear_attention", "full_attention"] * 2)
    del config["text_config"]["tie_word_embeddings"]
    assert change_of(config) == {
        "text_config": config["text_config"] | {"full_attention_interval": 2, "tie_word_embeddings": True},
        "torch_dtype": "bfloat16",
        "eos_token_id": 262,
    }
    assert read_spec(normalised(config, spec_of(config))) == spec_of(config)


def test_a_text_part_that_mlx_lm_would_not_look_for_stands_alone() -> None:
    text = config_of("qwen3_moe")
    config = {"model_type": "some_vl", "text_config": text, "vision_config": {}, "tie_word_embeddings": False}
    assert normalised(config, spec_of(config)) == {**text, "vision_config": {}}


def test_a_cast_is_said_in_both_places(tmp_path: Path) -> None:
    source = checkpoint("qwen3_5", tmp_path / "c", wrapped=True, dtype="bfloat16")
    convert(source, "fp16", tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (written["torch_dtype"], written["text_config"]["dtype"]) == ("float16", "float16")


# Refused


@pytest.mark.parametrize(
    ("model_type", "settings", "message"),
    [
        ("qwen2_moe", {"tie_word_embeddings": True}, "tie_word_embeddings is true, but mlx-lm takes false for"),
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob is true, but mlx-lm takes false for every qwen2_moe"),
        ("qwen2_moe", {"head_dim": 32}, "head_dim is 32, but mlx-lm takes hidden_size / num_attention_heads, 64 / 4"),
        ("qwen2_moe", {"rope_scaling": {"type": "yarn", **YARN}}, "rope scaling is yarn, but mlx-lm scales no rope"),
        ("qwen3_moe", {"rope_scaling": {"type": "linear", "factor": 2}}, "rope scaling is linear, but mlx-lm scales"),
        (
            "qwen3_next",
            {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]},
            r"layer_types: full attention in layers 0, 3, counted from 0, but mlx-lm has it in every n-th layer",
        ),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, r"full attention in layers \(none\), counted"),
        ("qwen3_5_moe", {"layer_types": ["linear_attention", "full_attention", *["linear_attention"] * 2]}, "in layer"),
    ],
)  # fmt: skip
def test_what_mlx_lm_cannot_hold_is_refused(
    model_type: str, settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    source = checkpoint(model_type, tmp_path / "c")
    config = json.loads((source / "config.json").read_text())
    parameters = {key: value for key, value in config.pop("rope_parameters").items() if "mrope" not in key}
    (source / "config.json").write_text(json.dumps(config | parameters | settings))
    with Checkpoint(source) as found, pytest.raises(CheckpointError, match=message) as raised:
        check(found, spec_of(found.config, found.shapes))
    assert str(raised.value).endswith("MLX cannot hold this checkpoint.")


# The way back


@pytest.mark.parametrize("model_type", FAMILY)
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"rope_theta": 5e5},
        {"rope_parameters": {"rope_theta": 5e5, "type": "default", "partial_rotary_factor": 0.75}},
        {"rope_parameters": None, "rope_theta": 5e5, "partial_rotary_factor": 0.75},
        {"norm_topk_prob": None},
        {"norm_topk_prob": False},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": None},
        {"full_attention_interval": 2},
        {"full_attention_interval": None, "layer_types": ["linear_attention", "full_attention"] * 2},
        {"head_dim": None},
        {"num_local_experts": 3},
        {"decoder_sparse_step": 2, "mlp_only_layers": [0]},
    ],
)
def test_settings_are_those_that_mlx_lm_takes(model_type: str, settings: dict[str, Any]) -> None:
    """null stands for a key that is absent."""
    merged = config_of(model_type) | {key: value for key, value in settings.items() if value is not None}
    config = {key: value for key, value in merged.items() if key not in settings or settings[key] is not None}
    if settings.get("rope_parameters", 0) is None and model_type.startswith("qwen3_5"):
        config["rope_parameters"] = None
    arguments = import_module(f"mlx_lm.models.{model_type}").ModelArgs
    try:
        args = arguments.from_dict(json.loads(json.dumps(config)))
    except TypeError:  # a key is missing
        with pytest.raises(ArtifactError, match="as mlx-lm reads it"):
            read_spec(config)
        return
    if model_type.startswith("qwen3_5"):
        args = import_module("mlx_lm.models.qwen3_5").TextModelArgs.from_dict(args.text_config)
    if untrained(config):
        with pytest.raises(
            ArtifactError, match=r"must have experts|norm_topk_prob: expected true|expected full_attention"
        ):
            read_spec(config)
    else:
        assert compared(read_spec(config)) == expected(args, model_type)


def untrained(config: dict[str, Any]) -> bool:
    """What mlx-lm runs, and no Qwen model is."""
    is_sparse = config["decoder_sparse_step"] != 1 and config["model_type"] in ("qwen3_moe", "qwen3_next")
    is_linear = "linear_attention" in config.get("layer_types", ()) and "linear_conv_kernel_dim" not in config
    return is_sparse or is_linear or (config["model_type"] == "qwen3_5_moe" and config.get("norm_topk_prob") is False)


def compared(spec: ModelSpec) -> tuple[Any, ...]:
    experts = spec.experts and (spec.experts.count, spec.experts.used, spec.experts.d_ff, spec.experts.norm_topk)
    return spec.rope.theta, spec.rope.dims, spec.tied, spec.head_dim, spec.linear, spec.norm_eps, experts


def expected(args: Any, model_type: str) -> tuple[Any, ...]:
    """By mlx-lm's own arguments, and what its modules do without any."""
    head_dim = getattr(args, "head_dim", args.hidden_size // args.num_attention_heads)
    is_hybrid = model_type in FAMILY[2:]
    dims = int(head_dim * args.partial_rotary_factor) if is_hybrid else None
    linear = tuple(i for i in range(4) if is_hybrid and (i + 1) % args.full_attention_interval)
    tied = bool(args.tie_word_embeddings) and model_type != "qwen2_moe"
    norm = getattr(args, "norm_topk_prob", False)
    experts = (args.num_experts, args.num_experts_per_tok, args.moe_intermediate_size, norm)
    shown = None if model_type == "qwen3_5" else experts
    return args.rope_theta, dims, tied, head_dim, linear, args.rms_norm_eps, shown


def test_defaults_of_mlx_lm_are_taken_where_a_rope_is_absent() -> None:
    config = config_of("qwen3_5", rope_theta=5e5)
    del config["rope_parameters"]
    assert (read_spec(config).rope.theta, read_spec(config).rope.dims) == (100_000.0, 8)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (config_of("qwen3_next", full_attention_interval=5), "full_attention_interval 5: it needs one layer of"),
        (config_of("qwen2_moe", rope_traditional=True), "rope_traditional: pairs of neighbours are rotated"),
        ({"model_type": "qwen3_5", "text_config": 3}, "text_config must be an object, found 3"),
        (config_of("qwen3_5", rope_parameters=[1]), "rope_scaling must be an object or null, found"),
        (config_of("qwen3_5", num_hidden_layers="x"), "num_hidden_layers: missing or not a positive integer"),
    ],
)  # fmt: skip
def test_what_mlx_lm_does_not_run_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ArtifactError, match=message):
        read_spec(config)


def test_a_scaling_where_mlx_lm_scales_nothing_is_none() -> None:
    yarn = {"rope_scaling": {"type": "yarn", **YARN}}
    assert read_spec(config_of("qwen3_moe", **yarn)) == read_spec(config_of("qwen3_moe"))
    spec = read_spec(config_of("qwen3_next", **yarn))
    assert spec == replace(read_spec(config_of("qwen3_next")), rope=spec.rope)
    assert spec.rope.scaling == "yarn"
