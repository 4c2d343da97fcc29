"""Custom mixes, by hand: which pattern decides, what it is called, and mixes that say nothing are refused."""

from __future__ import annotations

from typing import Any

import pytest
from support import Shape, config_of

from pipeline.errors import ParamsError, QuantizationError
from pipeline.formats.gguf.plan import plan
from pipeline.formats.gguf.schemes import scheme
from pipeline.models import spec_of
from pipeline.types import Options

WIDE = config_of(Shape("qwen2", layers=8, hidden=256, ff=256, heads=8, kv_heads=1, tied=False))
TIED = config_of(Shape("qwen2", layers=8, hidden=256, ff=256, heads=8, kv_heads=1, tied=True))
NARROW = config_of(Shape("qwen2", layers=2, hidden=224, ff=256, heads=7, kv_heads=1, tied=True))

Types = dict[str, str]


def planned(config: dict[str, Any], base: str, types: Types) -> dict[tuple[str, int | None], tuple[str, str]]:
    """(role, layer) -> encoding and reason of every matrix."""
    return {
        (p.tensor.role, p.tensor.layer): (p.encoding.name, p.reason)
        for p in plan(spec_of(config), scheme(base, Options(types)))
        if len(p.tensor.shape) == 2
    }


def changed(config: dict[str, Any], base: str, types: Types) -> dict[tuple[str, int | None], tuple[str, str]]:
    """What a mix makes other than its base."""
    plain = planned(config, base, {})
    return {key: choice for key, choice in planned(config, base, types).items() if choice != plain[key]}


def refused(config: dict[str, Any], base: str, types: Types) -> str:
    with pytest.raises((ParamsError, QuantizationError)) as caught:
        planned(config, base, types)
    return str(caught.value)


def test_a_mix_is_called_by_its_base_and_types() -> None:
    assert scheme("q4_k_m").label == scheme("q4_k_m", Options()).label == "q4_k_m"
    assert scheme("q4_k_m", Options({"ATTN_V": "Q8_0", "output": "q6_k"})).label == "q4_k_m+attn_v=q8_0,output=q6_k"
    assert scheme("q4_k_m", Options({"attn_v": "q8_0"})).name == "q4_k_m"


def test_a_pattern_decides_all_layers_of_a_role() -> None:
    found = changed(WIDE, "q4_0", {"attn_v": "q8_0"})
    assert found == {("attn_v", layer): ("Q8_0", "asked for: attn_v=Q8_0") for layer in range(8)}


def test_a_pattern_decides_some_layers() -> None:
    found = changed(WIDE, "q4_0", {r"blk\.[0-2]\.ffn_(up|gate)": "q5_1"})
    assert found.keys() == {(role, layer) for role in ("ffn_up", "ffn_gate") for layer in range(3)}
    assert set(found.values()) == {("Q5_1", r"asked for: blk\.[0-2]\.ffn_(up|gate)=Q5_1")}


def test_the_first_pattern_that_matches_wins() -> None:
    kinds = {key: kind for key, (kind, _) in changed(WIDE, "q4_0", {r"blk\.1\.ffn": "q6_k", "ffn": "q4_1"}).items()}
    parts = ("ffn_up", "ffn_gate", "ffn_down")
    assert kinds == {(part, layer): "Q6_K" if layer == 1 else "Q4_1" for part in parts for layer in range(8)}


def test_layers_with_a_type_of_their_own_are_not_counted() -> None:
    """q4_k_s gives attn_v of the first four that it decides on Q5_K."""
    plain = [planned(WIDE, "q4_k_s", {})["attn_v", layer][0] for layer in range(8)]
    assert plain == ["Q5_K"] * 4 + ["Q4_K"] * 4
    found = [planned(WIDE, "q4_k_s", {r"blk\.[01]\.attn_v": "q8_0"})["attn_v", layer][0] for layer in range(8)]
    assert found == ["Q8_0"] * 2 + ["Q5_K"] * 4 + ["Q4_K"] * 2


def test_vectors_stay_in_float32_under_a_pattern_of_all() -> None:
    blocks = [p for p in plan(spec_of(WIDE), scheme("q4_k_m", Options({"blk": "q8_0"}))) if p.tensor.layer is not None]
    assert len(blocks) == 8 * (7 + 5)
    for p in blocks:
        assert p.encoding.name == ("F32" if len(p.tensor.shape) == 1 else "Q8_0")


def test_output_and_token_embd_are_the_head_and_the_embedding_alone() -> None:
    found = changed(WIDE, "q4_k_m", {"output": "q8_0", "token_embd": "bf16"})
    assert found == {
        ("head", None): ("Q8_0", "asked for: output=Q8_0"),  # not attn_output
        ("embed", None): ("BF16", "asked for: token_embd=BF16"),
    }


@pytest.mark.parametrize("pattern", ["attn_output", "_output", r"output\.weight"])
def test_other_texts_with_output_are_patterns(pattern: str) -> None:
    found = changed(WIDE, "q4_0", {pattern: "q8_0"})
    heads = {("head", None)} if pattern == r"output\.weight" else set()
    assert found.keys() == {("attn_output", layer) for layer in range(8)} | heads


def test_a_tied_head_is_the_embedding() -> None:
    assert changed(TIED, "q4_k_m", {"output": "q8_0"}) == {
        ("embed", None): ("Q8_0", "asked for: output=Q8_0, tied to the embedding")
    }
    assert changed(TIED, "q4_k_m", {"token_embd": "q5_k"}) == {("embed", None): ("Q5_K", "asked for: token_embd=Q5_K")}


def test_a_type_that_rows_do_not_divide_into_falls_back() -> None:
    for key, kind, smaller in (
        ("ffn_up", "Q4_K", "Q5_0"),
        ("token_emb", "Q5_K", "Q5_1"),
        ("attn_q", "IQ4_XS", "IQ4_NL"),
    ):
        found = set(changed(NARROW, "q4_0", {key: kind.lower()}).values())
        assert found == {(smaller, f"row 224 not a multiple of 256: {smaller} for {kind}")}
    found = changed(NARROW, "q4_0", {"output": "q6_k", "ffn_down": "q6_k"})
    assert found["ffn_down", 1] == ("Q6_K", "asked for: ffn_down=Q6_K")  # 256 columns
    assert ("embed", None) not in found  # Q8_0, as without


def test_embedding_and_head_of_files_that_are_not_quantized() -> None:
    found = changed(WIDE, "bf16", {"token_embd": "q8_0", "output": "q6_k"})
    assert {key: kind for key, (kind, _) in found.items()} == {("embed", None): "Q8_0", ("head", None): "Q6_K"}


# refused


@pytest.mark.parametrize(
    ("base", "types", "message"),
    [
        ("q4_k_m", {"attn_v": "q4_k_m"}, "types: attn_v asks for the type 'q4_k_m'; did you mean 'q4_k'?"),
        ("q4_k_m", {"attn_v": "zzz"}, "types: attn_v asks for the type 'zzz'; known: f32, f16, bf16, q4_0,"),
        ("q4_k_m", {"attn_v": "tq1_0"}, "types: attn_v asks for the type 'tq1_0'; did you mean"),
        ("q4_k_m", {"attn_(v": "q8_0"}, "types: 'attn_(v' is not a regular expression: missing ), unterminated"),
        ("q4_k_m", {"*": "q8_0"}, "types: '*' is not a regular expression: nothing to repeat"),
        (
            "q4_k_m",
            {"ATTN_V": "q8_0", "attn_v": "q5_0"},
            "types: attn_v is given twice. Patterns are read in lower case, as llama-quantize does.",
        ),
        ("q4_k_m", {"output": "q8_0", "Output": "q6_k"}, "types: output is given twice"),
        (
            "bf16",
            {"attn_v": "q8_0"},
            "types: llama-quantize gives bf16 files no types by pattern (attn_v), only token_embd and output.",
        ),
        ("q4_k", {"attn_v": "q8_0"}, "gguf has no scheme 'q4_k'; did you mean 'q4_k_s'?"),
    ],
)
def test_types_that_cannot_be_are_refused(base: str, types: Types, message: str) -> None:
    assert refused(WIDE, base, types).startswith(message)


def test_a_pattern_that_matches_nothing_is_refused_with_the_names() -> None:
    said = refused(WIDE, "q4_0", {"attn_v": "q8_0", "atn_q": "q8_0"})
    assert said == (
        "types: no matrix is named like 'atn_q'. Names are token_embd.weight, output.weight, blk.0.attn_q.weight, "
        "blk.0.attn_k.weight, blk.0.attn_v.weight, blk.0.attn_output.weight, blk.0.ffn_gate.weight, "
        "blk.0.ffn_up.weight, blk.0.ffn_down.weight, … of each layer."
    )


@pytest.mark.parametrize("pattern", ["attn_norm", r"blk\.8\.", "attn_v.bias"])
def test_vectors_and_layers_that_are_not_there_are_no_matches(pattern: str) -> None:
    assert f"no matrix is named like {pattern!r}" in refused(WIDE, "q4_0", {pattern: "q8_0"})


@pytest.mark.parametrize(
    "types",
    [
        {"ffn": "q8_0", "ffn_up": "q6_k"},
        {"ffn_up": "q8_0", "ffn_(gate|down)": "q5_0", "ffn": "q6_k"},
        {"token_embd": "q8_0", "token_emb": "q6_k"},
        {"output": "q8_0", r"^output": "q6_k"},
    ],
)
def test_a_pattern_hidden_by_others_is_refused(types: Types) -> None:
    *_, last = types
    said = f"types: {last!r} decides nothing: what it matches, others before it take."
    assert refused(WIDE, "q4_0", types) == said


@pytest.mark.parametrize(
    ("base", "types", "alone"),
    [
        ("q4_k_m", {"output": "q8_0", "token_embd": "q6_k"}, "token_embd"),
        ("q4_k_m", {"output": "q8_0", "embd": "q6_k"}, "embd"),
        ("bf16", {"output": "q8_0"}, "token_embd"),
    ],
)
def test_a_tied_head_that_decides_nothing_is_refused(base: str, types: Types, alone: str) -> None:
    assert refused(TIED, base, types) == f"types: output is the embedding here (tied): give {alone} alone."


@pytest.mark.parametrize(
    ("config", "key"), [(NARROW, "token_embd"), (NARROW | {"tie_word_embeddings": False}, "output")]
)
def test_embedding_and_head_do_not_fall_back(config: dict[str, Any], key: str) -> None:
    assert refused(config, "q4_0", {key: "q4_k"}) == (
        f"types: {key} has rows of 224, not a multiple of 256: it cannot be Q4_K. Give it another type."
    )
    assert planned(config, "q4_0", {key: "q5_0"})  # of blocks of 32
