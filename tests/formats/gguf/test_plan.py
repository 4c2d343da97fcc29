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


class Everything:
    """An importance matrix that lacks nothing."""

    def __contains__(self, name: object) -> bool:
        return True


def planned(config: dict[str, Any], scheme: str) -> list[Planned]:
    """With an importance matrix only where there is no plan without."""
    imatrix = Everything() if scheme in {"iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m"} else None
    return plan(spec_of(config), SCHEMES[scheme], imatrix)


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
    assert [p.tensor for p in planned(QWEN25_05B, scheme)] == list(spec_of(QWEN25_05B).tensors)


# The other schemes: for each role the encoding of the first layers, how many of 24 and of 32, and that of the rest.
# llama-quant.cpp, llama_tensor_get_type_impl; `grouped` from 4 heads per KV head on.
SAME: dict[str, Any] = {"q4_1": "Q4_1", "q5_1": "Q5_1", "q5_k_s": "Q5_K", "q3_k_s": "Q3_K", "q3_k_l": "Q5_K"}
MIXED = {
    **{name: dict.fromkeys(("attn_v", "ffn_down", "attn_output"), (kind, 0, 0, kind)) for name, kind in SAME.items()},
    "q4_k_s": {
        "attn_v": ("Q5_K", 4, 4, "Q4_K"),
        "ffn_down": ("Q5_K", 3, 4, "Q4_K"),
        "attn_output": ("", 0, 0, "Q4_K"),
    },
    "q3_k_m": {
        "attn_v": ("Q5_K", 2, 2, "Q4_K"),
        "ffn_down": ("Q5_K", 1, 2, "Q4_K"),
        "attn_output": ("", 0, 0, "Q4_K"),
    },
    "q2_k": {"attn_v": ("", 0, 0, "Q3_K"), "ffn_down": ("", 0, 0, "Q3_K"), "attn_output": ("", 0, 0, "Q3_K")},
    "iq4_nl": {
        "attn_v": ("", 0, 0, "IQ4_NL"),
        "ffn_down": ("Q5_K", 3, 4, "IQ4_NL"),
        "attn_output": ("", 0, 0, "IQ4_NL"),
    },
    "iq4_xs": {
        "attn_v": ("", 0, 0, "IQ4_XS"),
        "ffn_down": ("Q5_K", 3, 4, "IQ4_XS"),
        "attn_output": ("", 0, 0, "IQ4_XS"),
    },
}
GROUPED_V = {"q2_k": "Q4_K", "iq4_nl": "Q5_K", "iq4_xs": "Q5_K"}
"""attn_v of all layers where 4 heads or more share it."""


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("layers", [24, 32])
@pytest.mark.parametrize("scheme", MIXED)
def test_what_the_other_schemes_give_by_role_and_layer(scheme: str, layers: int, kv_heads: int) -> None:
    config = thin("qwen3", layers, head_dim=32, kv_heads=kv_heads)
    expected = {role: [more] * (a if layers == 24 else b) for role, (more, a, b, _) in MIXED[scheme].items()}
    for role, (*_, rest) in MIXED[scheme].items():
        expected[role] += [rest] * (layers - len(expected[role]))
    if kv_heads <= 2 and scheme in GROUPED_V:  # 8 heads
        expected["attn_v"] = [GROUPED_V[scheme]] * layers
    base = SCHEMES[scheme].base.name
    expected |= dict.fromkeys(("attn_q", "attn_k", "ffn_gate", "ffn_up"), [base] * layers)
    expected |= {"embed": [base], "head": ["Q6_K"]}
    found: dict[str, list[str]] = {}
    for p in planned(config, scheme):
        if len(p.tensor.shape) == 2:
            found.setdefault(p.tensor.role, []).append(p.encoding.name)
    assert found == expected


@pytest.mark.parametrize(
    ("scheme", "role", "reasons"),
    [
        ("q4_k_s", "ffn_down", ["ffn_down of some layers gets more bits: Q5_K"] * 3 + ["the scheme's own"] * 21),
        (
            "q3_k_m",
            "ffn_down",
            [f"ffn_down gets more bits: {kind}" for kind in ["Q5_K"] + ["Q4_K"] * 23],
        ),
        ("q3_k_m", "attn_output", ["attn_output gets more bits: Q4_K"] * 24),
        ("q3_k_l", "attn_v", ["attn_v gets more bits: Q5_K"] * 24),
        ("q3_k_s", "attn_v", ["the scheme's own"] * 24),
        ("q2_k", "attn_v", ["attn_v gets more bits: Q4_K"] * 24),
        ("q2_k", "ffn_down", ["ffn_down gets more bits: Q3_K"] * 24),
        ("iq4_xs", "attn_v", ["attn_v gets more bits: Q5_K"] * 24),
        ("iq4_nl", "attn_output", ["the scheme's own"] * 24),
        ("q4_1", "head", ["the head gets more bits: Q6_K"]),
    ],
)
def test_the_reason_says_what_got_more_bits(scheme: str, role: str, reasons: list[str]) -> None:
    assert [p.reason for p in planned(thin("qwen2", 24), scheme) if p.tensor.role == role] == reasons


@pytest.mark.parametrize(
    ("scheme", "kv_heads", "kind"),
    [
        *[
            (scheme, kv_heads, "Q5_K")
            for scheme in ("q2_k", "q3_k_s", "q3_k_m", "q3_k_l", "q4_k_s")
            for kv_heads in (1, 4)
        ],
        *[("q5_k_s", 1, "Q5_K"), ("q4_1", 1, "Q4_1"), ("q5_1", 1, "Q5_1")],
        *[("iq4_xs", 1, "Q5_K"), ("iq4_xs", 4, "IQ4_XS"), ("iq4_nl", 4, "IQ4_NL")],
    ],
)
def test_attn_v_of_80_layers_of_qwen2_has_5_bits_in_all_k_schemes(scheme: str, kv_heads: int, kind: str) -> None:
    config = thin("qwen2", 80, kv_heads=kv_heads)
    assert of_role(config, scheme, "attn_v") == [kind] * 80
    reasons = {p.reason for p in planned(config, scheme) if p.tensor.role == "attn_v"}
    raised = "attn_v of an 80-layer model (70B) gets more bits: Q5_K"
    assert (raised in reasons) == (scheme in {"q2_k", "q3_k_s", "q3_k_m", "q4_k_s"})


def test_80_layers_of_qwen3_have_no_rule_of_their_own() -> None:
    assert of_role(thin("qwen3", 80), "q3_k_s", "attn_v") == ["Q3_K"] * 80
    assert of_role(thin("qwen3", 80), "q4_k_s", "attn_v") == ["Q5_K"] * 4 + ["Q4_K"] * 76


@pytest.mark.parametrize(
    ("scheme", "role", "kind", "wanted"),
    [
        ("iq4_xs", "attn_q", "IQ4_NL", "IQ4_XS"),
        ("iq4_xs", "attn_v", "Q5_1", "Q5_K"),
        ("q2_k", "attn_q", "Q4_0", "Q2_K"),
        ("q2_k", "attn_output", "Q4_0", "Q3_K"),
        ("q2_k", "attn_v", "Q5_0", "Q4_K"),
        ("q3_k_s", "attn_v", "Q4_0", "Q3_K"),
        ("q3_k_m", "attn_output", "Q5_0", "Q4_K"),
        ("q4_1", "embed", "Q8_0", "Q6_K"),
        ("iq4_nl", "embed", "Q8_0", "Q6_K"),
    ],
)
def test_rows_of_224_fall_back_with_the_reason(scheme: str, role: str, kind: str, wanted: str) -> None:
    config = thin("qwen2", 2, hidden=224, heads=7, tied=True)
    found = {(p.encoding.name, p.reason) for p in planned(config, scheme) if p.tensor.role == role}
    assert found == {(kind, f"row 224 not a multiple of 256: {kind} for {wanted}")}


@pytest.mark.parametrize("scheme", ["q2_k", "q3_k_l", "iq4_xs", "q5_k_s"])
def test_a_head_of_rows_of_224_is_q8_0(scheme: str) -> None:
    config = thin("qwen2", 2, hidden=224, heads=7)
    (head,) = [p for p in planned(config, scheme) if p.tensor.role == "head"]
    assert (head.encoding.name, head.reason) == ("Q8_0", "the head has rows of 224, not a multiple of 256: Q8_0")
