"""The policy, by hand: what llama-quantize gives Qwen's own sizes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from support import Shape, config_of

from pipeline.formats.gguf.plan import plan
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.models import spec_of
from pipeline.types import Planned

QWEN25_05B: dict[str, Any] = config_of(
    Shape("qwen2", layers=24, hidden=896, ff=4864, heads=14, kv_heads=2, vocab=151936, tied=True)
)
MORE_BITS_OF_24 = [0, 1, 2, 5, 8, 11, 14, 17, 20, 21, 22, 23]
MORE_BITS_OF_80 = [*range(10), *range(12, 70, 3), *range(70, 80)]


def planned(config: dict[str, Any], scheme: str) -> list[Planned]:
    return plan(spec_of(config), SCHEMES[scheme])


def of_role(config: dict[str, Any], scheme: str, role: str) -> list[str]:
    """Encodings of a role, by layer."""
    return [p.encoding.name for p in planned(config, scheme) if p.tensor.role == role]


def layers_with(encoding: str, names: list[str]) -> list[int]:
    return [layer for layer, name in enumerate(names) if name == encoding]


def thin(model_type: str, layers: int, **sizes: Any) -> dict[str, Any]:
    return config_of(
        Shape(model_type, layers=layers, **{"hidden": 256, "ff": 256, "heads": 8, "kv_heads": 1, "tied": False} | sizes)
    )


def test_qwen25_05b_q4_k_m_falls_back_on_all_but_ffn_down() -> None:
    """llama.cpp#6614, #28474."""
    for p in planned(QWEN25_05B, "q4_k_m"):
        role, layer, kind = p.tensor.role, p.tensor.layer, p.encoding.name
        if len(p.tensor.shape) == 1:
            assert (kind, p.reason) == ("F32", "vectors stay in float32")
        elif role == "embed":
            assert kind == "Q8_0"
            assert p.reason == "the embedding, tied to the head, has rows of 896, not a multiple of 256: Q8_0"
        elif role == "ffn_down":
            assert kind == ("Q6_K" if layer in MORE_BITS_OF_24 else "Q4_K")
            more = "ffn_down of some layers gets more bits: Q6_K"
            assert p.reason == (more if layer in MORE_BITS_OF_24 else "the scheme's own")
        elif role == "attn_v" and layer in MORE_BITS_OF_24:
            assert (kind, p.reason) == ("Q8_0", "row 896 not a multiple of 256: Q8_0 for Q6_K")
        else:
            assert role in {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up"}
            assert (kind, p.reason) == ("Q5_0", "row 896 not a multiple of 256: Q5_0 for Q4_K")


def test_qwen25_05b_q4_k_m_counts_and_size() -> None:
    all_planned = planned(QWEN25_05B, "q4_k_m")
    assert Counter(p.encoding.name for p in all_planned) == {
        "F32": 121,  # 24 x (2 norms, 3 biases) and the last norm
        "Q5_0": 132,  # 24 x (q, k, output, gate, up) and v of 12 layers
        "Q8_0": 13,  # v of the other 12, and the embedding
        "Q4_K": 12,
        "Q6_K": 12,
    }
    assert sum(p.tensor.weights for p in all_planned) == 494_032_768
    embedding = all_planned[0]
    assert (embedding.tensor.name, embedding.bytes) == ("model.embed_tokens.weight", 151_936 * 896 // 32 * 34)


@pytest.mark.parametrize(("scheme", "fallback"), [("q5_k_m", "Q5_1"), ("q6_k", "Q8_0")])
def test_fallbacks_of_the_other_k_schemes(scheme: str, fallback: str) -> None:
    kinds = of_role(QWEN25_05B, scheme, "attn_q")
    assert kinds == [fallback] * 24
    assert of_role(QWEN25_05B, scheme, "embed") == ["Q8_0"]


@pytest.mark.parametrize("scheme", ["q8_0", "q5_0", "q4_0"])
def test_rows_of_896_divide_into_blocks_of_32(scheme: str) -> None:
    kinds = {p.encoding.name for p in planned(QWEN25_05B, scheme) if p.tensor.layer is not None}
    assert kinds == {"F32", scheme.upper()}


@pytest.mark.parametrize(("scheme", "base"), [("q4_k_m", "Q4_K"), ("q5_k_m", "Q5_K")])
@pytest.mark.parametrize("role", ["attn_v", "ffn_down"])
def test_layers_of_24_that_get_more_bits(scheme: str, base: str, role: str) -> None:
    names = of_role(thin("qwen3", 24), scheme, role)
    assert layers_with("Q6_K", names) == MORE_BITS_OF_24
    assert layers_with(base, names) == sorted(set(range(24)) - set(MORE_BITS_OF_24))


@pytest.mark.parametrize("role", ["attn_q", "attn_k", "attn_output", "ffn_gate", "ffn_up"])
def test_other_matrices_get_the_schemes_own(role: str) -> None:
    assert of_role(thin("qwen3", 24, head_dim=32), "q4_k_m", role) == ["Q4_K"] * 24


@pytest.mark.parametrize("scheme", ["q6_k", "q5_0", "q4_0", "q8_0"])
def test_schemes_without_a_mix_treat_all_layers_alike(scheme: str) -> None:
    base = SCHEMES[scheme].base.name
    config = thin("qwen2", 80)
    assert of_role(config, scheme, "attn_v") == of_role(config, scheme, "ffn_down") == [base] * 80


@pytest.mark.parametrize(
    ("model_type", "scheme", "others"),
    [
        ("qwen2", "q4_k_m", "Q5_K"),  # llama.cpp takes 80 layers of qwen2 for 70B
        ("qwen3", "q4_k_m", "Q4_K"),
        ("qwen2", "q5_k_m", "Q5_K"),
        ("qwen3", "q5_k_m", "Q5_K"),
    ],
)
def test_attn_v_of_80_layers(model_type: str, scheme: str, others: str) -> None:
    names = of_role(thin(model_type, 80), scheme, "attn_v")
    assert layers_with("Q6_K", names) == MORE_BITS_OF_80
    assert layers_with(others, names) == sorted(set(range(80)) - set(MORE_BITS_OF_80))


def test_ffn_down_of_80_layers_has_no_rule_of_its_own() -> None:
    names = of_role(thin("qwen2", 80), "q4_k_m", "ffn_down")
    assert layers_with("Q6_K", names) == MORE_BITS_OF_80
    assert layers_with("Q4_K", names) == sorted(set(range(80)) - set(MORE_BITS_OF_80))


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("scheme", "head"),
    [("q4_0", "Q6_K"), ("q4_k_m", "Q6_K"), ("q5_k_m", "Q6_K"), ("q6_k", "Q6_K"), ("q8_0", "Q8_0"), ("f16", "F16")],
)
def test_the_head_gets_more_bits_and_the_embedding_only_where_tied(scheme: str, head: str, tied: bool) -> None:
    config = thin("qwen2", 2, tied=tied)
    assert of_role(config, scheme, "head") == ([] if tied else [head])
    assert of_role(config, scheme, "embed") == [head if tied else SCHEMES[scheme].base.name]


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_vectors_stay_in_float32(model_type: str, scheme: str) -> None:
    config = thin(model_type, 2)
    vectors = [p for p in planned(config, scheme) if len(p.tensor.shape) == 1]
    assert len(vectors) == (2 * 5 + 1 if model_type == "qwen2" else 2 * 4 + 1)
    assert {p.encoding.name for p in vectors} == {"F32"}


@pytest.mark.parametrize(
    ("scheme", "wanted"), [("q4_k_m", ["Q4_K", "Q6_K"]), ("q4_0", ["Q4_0"] * 2), ("q8_0", ["Q8_0"] * 2)]
)
def test_rows_of_40_fall_to_f16_with_the_reason(scheme: str, wanted: list[str]) -> None:
    down = [p for p in planned(thin("qwen2", 2, ff=40), scheme) if p.tensor.role == "ffn_down"]
    assert [p.encoding.name for p in down] == ["F16", "F16"]
    assert [p.reason for p in down] == [f"row 40 not a multiple of 32: F16 for {name}" for name in wanted]


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_tensor_is_planned_once_in_file_order(scheme: str) -> None:
    spec = spec_of(QWEN25_05B)
    assert [p.tensor for p in plan(spec, SCHEMES[scheme])] == list(spec.tensors)
