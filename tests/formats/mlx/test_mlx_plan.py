"""The policy of mlx_lm.convert, and matrices that it would leave out."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from support import Shape, config_of

from pipeline.errors import QuantizationError
from pipeline.formats import bits_per_weight
from pipeline.formats.mlx.names import ordered, parts
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
    names = [p.tensor.name for p in ordered(plan(spec(Shape(layers=1, tied=False)), SCHEMES["bf16"]))]
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
