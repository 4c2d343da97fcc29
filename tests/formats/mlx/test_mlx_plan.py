"""The policy of mlx_lm.convert, and matrices that it would leave out."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from family import COMMON, FAMILY, OWN
from support import Shape, config_of

from pipeline.errors import QuantizationError
from pipeline.formats import bits_per_weight
from pipeline.formats.mlx.arrange import ROUTERS
from pipeline.formats.mlx.config import config_text
from pipeline.formats.mlx.names import parts
from pipeline.formats.mlx.plan import plan
from pipeline.formats.mlx.schemes import PACKINGS, SCHEMES
from pipeline.models import spec_of
from pipeline.types import ModelSpec


def spec(shape: Shape, dtype: str | None = None) -> ModelSpec:
    return spec_of(config_of(shape) | ({"torch_dtype": dtype} if dtype else {}))


@pytest.mark.parametrize(
    ("scheme", "bits"),
    [
        *(("bf16", 16), ("fp16", 16), ("int8", 8.5), ("int6", 6.5), ("int4", 4.5), ("int3", 3.5), ("int4-g32", 5)),
        *(("int4-g128", 4.25), ("mxfp8", 8.25), ("mxfp4", 4.25), ("nvfp4", 4.5)),
    ],
)
def test_bits_per_weight_of_matrices(scheme: str, bits: float) -> None:
    planned = plan(spec(Shape(hidden=128, ff=256)), SCHEMES[scheme])
    matrices = [p for p in planned if len(p.tensor.shape) == 2]
    assert bits_per_weight(matrices) == bits
    assert {p.encoding.name for p in planned if len(p.tensor.shape) == 1} == {"F16" if scheme == "fp16" else "BF16"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_parts_weigh_what_the_plan_says(scheme: str) -> None:
    for dtype in (None, "float32", "float16"):
        for p in plan(spec(Shape(hidden=128, ff=256, tied=False), dtype), SCHEMES[scheme]):
            assert sum(part.size for part in parts(p)) == p.bytes


def test_a_dtype_decides_vectors_and_scales() -> None:
    found = Counter(p.encoding.name for p in plan(spec(Shape(layers=1), "float16"), SCHEMES["int4"]))
    assert found == {"int4-g64-F16": 8, "F16": 6}
    typed = replace(spec(Shape(layers=1)), tensors=tuple(replace(t, dtype="F32") for t in spec(Shape()).tensors))
    assert {p.encoding.name for p in plan(typed, SCHEMES["int4"])} == {"int4-g64-F32", "F32"}
    assert {p.encoding.name for p in plan(typed, SCHEMES["mxfp4"])} == {"mxfp4", "F32"}


def test_a_mixed_recipe_gives_more_bits_to_the_head_and_some_layers() -> None:
    planned = plan(spec(Shape(layers=24, tied=False)), SCHEMES["mixed_3_6"])
    high = {(p.tensor.role, p.tensor.layer) for p in planned if p.encoding.name == "int6-g64"}
    layers = {0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23}
    assert high == {("head", None), *((role, i) for role in ("attn_v", "ffn_down") for i in layers)}
    assert {p.encoding.name for p in planned} == {"int3-g64", "int6-g64", "BF16"}


@pytest.mark.parametrize(
    ("hidden", "ff", "scheme", "step"),
    [
        (96, 192, "int4", "Groups of 32 would divide them all: take int8-g32,"),
        (192, 320, "int8-g128", "Groups of 64 would divide them all: take int8, int6, int4, int3, mixed_4_6,"),
        (80, 160, "int4-g32", "Groups of 16 would divide them all: take nvfp4."),
        (72, 144, "mixed_4_6", "No group of MLX divides them all: take bf16 or fp16"),
    ],
)
def test_rows_that_do_not_divide_are_refused_with_a_group_that_would(
    hidden: int, ff: int, scheme: str, step: str
) -> None:
    with pytest.raises(QuantizationError) as raised:
        plan(spec(Shape(hidden=hidden, ff=ff, heads=4, kv_heads=4)), SCHEMES[scheme])
    assert step in str(raised.value)
    assert f"rows of {hidden} weights do not divide into groups of" in str(raised.value)
    plan(spec(Shape(hidden=hidden, ff=ff, heads=4, kv_heads=4)), SCHEMES["bf16"])


def test_the_order_is_that_of_mlx_lms_parameters() -> None:
    names = [p.tensor.name for p in plan(spec(Shape(layers=1, tied=False)), SCHEMES["bf16"])]
    at = "model.layers.0."
    assert names == [
        "model.embed_tokens.weight",
        *(f"{at}self_attn.{part}_proj.{kind}" for part in "qkv" for kind in ("weight", "bias")),
        f"{at}self_attn.o_proj.weight",
        *(f"{at}mlp.{part}_proj.weight" for part in ("gate", "down", "up")),
        *(f"{at}{part}_layernorm.weight" for part in ("input", "post_attention")),
        *("model.norm.weight", "lm_head.weight"),
    ]


def test_every_encoding_that_packs_has_whole_words() -> None:
    for encoding, packing in PACKINGS.items():
        assert packing.group * packing.bits % 32 == 0
        assert encoding.block == packing.group


# Models with experts, and hybrids


def family(model_type: str, **settings: object) -> ModelSpec:
    wide = {"moe_intermediate_size": 64, "num_experts": 6, "num_hidden_layers": 8}
    return spec_of({"model_type": model_type, **COMMON, **OWN[model_type], **wide, **settings})


def kinds(spec: ModelSpec, scheme: str) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for p in plan(spec, SCHEMES[scheme]):
        found.setdefault(p.tensor.role, set()).add(p.encoding.name)
    return found


@pytest.mark.parametrize(
    "scheme", [name for name, scheme in SCHEMES.items() if scheme.quantized and "g128" not in name]
)
def test_routers_are_kept_in_high_precision_and_said_so(scheme: str) -> None:
    for model_type in ("qwen2_moe", "qwen3_next"):
        routers = [p for p in plan(family(model_type), SCHEMES[scheme]) if p.tensor.role in ROUTERS]
        assert len(routers) == 2 * 8
        assert {p.encoding.name for p in routers} == {"int8-g64"}
        assert {p.reason for p in routers} == {"routers are kept in high precision: int8-g64"}


def test_routers_whose_rows_do_not_divide_stay_floats() -> None:
    spec = family("qwen2_moe", hidden_size=96, intermediate_size=192)
    routers = [p for p in plan(spec, SCHEMES["mxfp4"]) if p.tensor.role in ROUTERS]
    why = "routers are kept in high precision: BF16, since rows of 96 do not divide into groups of 64"
    assert {(p.encoding.name, p.reason) for p in routers} == {("BF16", why)}
    text = json.loads(
        config_text({"model_type": "qwen2_moe"}, {}, spec, SCHEMES["mxfp4"], plan(spec, SCHEMES["mxfp4"]))
    )
    paths = {p.tensor.name.removesuffix(".weight") for p in routers}
    assert {key for key, value in text["quantization"].items() if value is False} == paths


def test_float_schemes_keep_routers_as_all_else_and_no_scheme_casts_decays() -> None:
    spec = family("qwen3_next")
    spec = replace(spec, tensors=tuple(replace(tensor, dtype="F32") for tensor in spec.tensors))
    for scheme, kind in (("bf16", "BF16"), ("fp16", "F16")):
        found = kinds(spec, scheme)
        assert found.pop("delta_a_log") == {"F32"}
        assert all(encodings == {kind} for encodings in found.values())
    assert kinds(spec, "int4")["delta_a_log"] == {"F32"}


def test_what_is_no_matrix_stays_as_it_is() -> None:
    found = kinds(family("qwen3_5_moe"), "int4")
    floats = {role for role, encodings in found.items() if encodings == {"BF16"}}
    assert floats == {
        *("attn_norm", "post_norm", "output_norm", "attn_q_norm", "attn_k_norm"),
        *("delta_conv", "delta_a_log", "delta_dt_bias", "delta_norm"),
    }
    assert {role for role, encodings in found.items() if encodings == {"int8-g64"}} == {*ROUTERS}
    assert found["expert_gate"] == found["delta_b"] == found["embed"] == {"int4-g64"}


def test_a_mixed_recipe_gives_more_bits_to_the_downs_of_experts() -> None:
    spec = family("qwen3_next")  # layers of attention: 3 and 7
    high = {(p.tensor.role, p.tensor.layer) for p in plan(spec, SCHEMES["mixed_3_6"]) if p.encoding.name == "int6-g64"}
    downs = {(role, i) for role in ("expert_down", "shared_down") for i in (0, 3, 6, 7)}
    assert high == {("head", None), ("attn_v", 3), ("attn_v", 7), *downs}


def test_experts_whose_rows_do_not_divide_are_refused() -> None:
    """mlx#1033."""
    with pytest.raises(QuantizationError) as raised:
        plan(family("qwen3_5_moe", moe_intermediate_size=96, hidden_size=96), SCHEMES["int4"])
    name = "language_model.model.layers.0.mlp.switch_mlp.down_proj.weight"
    said = str(raised.value)
    assert "rows of 96 weights do not divide into groups of 64: language_model.model.embed_tokens.weight, " in said
    assert "Groups of 32 would divide them all: take int8-g32, int6-g32, int4-g32, int3-g32, mxfp8, mxfp4." in said
    with pytest.raises(QuantizationError, match=rf"rows of 96 weights do not divide into groups of 64: {name}"):
        plan(family("qwen3_5_moe", moe_intermediate_size=96), SCHEMES["int4"])
    assert kinds(family("qwen3_5_moe", moe_intermediate_size=96), "int4-g32")["expert_down"] == {"int4-g32"}


@pytest.mark.parametrize("model_type", FAMILY)
def test_the_parts_of_experts_weigh_what_the_plan_says(model_type: str) -> None:
    spec = family(model_type)
    planned = plan(spec, SCHEMES["int4"])
    assert sum(p.tensor.weights for p in planned) == spec.weights
    for p in planned:
        assert sum(part.size for part in parts(p)) == p.bytes
    shapes = {part.name: (part.dtype, part.shape) for p in planned for part in parts(p)}
    if spec.experts:
        at = planned[0].tensor.name.removesuffix("embed_tokens.weight") + "layers.0.mlp.switch_mlp.down_proj"
        assert shapes[f"{at}.weight"] == ("U32", (6, 64, 8))
        assert shapes[f"{at}.scales"] == ("BF16", (6, 64, 1))
    if spec.delta:
        assert {shape for name, shape in shapes.items() if "conv1d" in name} == {("BF16", (128, 4, 1))}
