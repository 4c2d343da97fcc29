"""The family's files against llama.cpp's quantizer: every tensor's type over all schemes, bytes for some."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from family_files import convert, importance, maker, of_oracle, spec, write_importance
from support import Shape, write_checkpoint

from pipeline.errors import QuantizationError
from pipeline.formats import streaming
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.plan import plan
from pipeline.formats.gguf.schemes import SCHEMES

EIGHT_LAYERS: dict[str, Any] = {"num_hidden_layers": 8, "hidden_size": 256, "intermediate_size": 32}
GROUPED = {"num_key_value_heads": 1}
NEED = {"IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}

# Together: each model_type; 8, 6 and 3 experts, since llama.cpp treats 8 apart, and 4 or more in the lowest schemes;
# rows of 256 and of 64 that fall back, and of experts both; 1 and 2 KV heads; tied or not; with MTP layers, which count
# as layers; 8, 9 and 17 layers.
SOURCES: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen2_moe-8": ("qwen2_moe", {**EIGHT_LAYERS, "experts": 8}),
    "qwen2_moe-rows-64": ("qwen2_moe", {"num_hidden_layers": 17, "tie_word_embeddings": True}),
    "qwen3_moe-8-grouped": ("qwen3_moe", {**EIGHT_LAYERS, **GROUPED, "experts": 8}),
    "qwen3_moe-3": ("qwen3_moe", {**EIGHT_LAYERS, "experts": 3, "moe_intermediate_size": 256}),
    "qwen3_moe-6-tied": ("qwen3_moe", {**EIGHT_LAYERS, "tie_word_embeddings": True}),
    "qwen3_next-6-mtp": ("qwen3_next", {**EIGHT_LAYERS, "mtp": 1}),
    "qwen3_next-8": ("qwen3_next", {**EIGHT_LAYERS, "experts": 8, "moe_intermediate_size": 256}),
    "qwen3_5": ("qwen3_5", {**EIGHT_LAYERS, "intermediate_size": 256}),
    "qwen3_5-grouped-mtp": ("qwen3_5", {**EIGHT_LAYERS, **GROUPED, "mtp": 1, "tie_word_embeddings": True}),
    "qwen3_5-rows-64": ("qwen3_5", {"num_hidden_layers": 17}),
    "qwen3_5_moe-6-grouped": ("qwen3_5_moe", {**EIGHT_LAYERS, **GROUPED, "mtp": 1}),
    "qwen3_5_moe-8-mtp": ("qwen3_5_moe", {"num_hidden_layers": 8, "experts": 8, "mtp": 1}),
}
DENSE = {  # and how many schemes are refused without importance: by rows of 64, iq3_xxs gives ffn_down Q3_K instead
    "qwen2": (Shape("qwen2", 8, 256, 256, heads=8, kv_heads=2, tied=False), 5),
    "qwen2-80-layers": (Shape("qwen2", 80, 256, 32, heads=8, kv_heads=4), 5),
    "qwen3-rows-64": (Shape("qwen3", 16, 64, 256, heads=4, kv_heads=4, head_dim=16), 4),
}


class Everything:
    """An importance matrix that lacks nothing."""

    def __contains__(self, name: object) -> bool:
        return True


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return maker(tmp_path_factory.mktemp("family"))


def check_types(source: Path) -> int:
    """All schemes, with an importance matrix or without; returns how many plans were refused."""
    base, model, refused = convert(source, "f32")[0], spec(source), 0
    for scheme in SCHEMES.values():
        for has_imatrix in (False, True):
            expected = oracle.kinds(base, scheme.ftype, {"": np.ones(1, np.float32)} if has_imatrix else None)
            needed = {name: kind for name, kind in expected.items() if name.startswith("blk") and kind in NEED}
            if needed and not has_imatrix:
                with pytest.raises(QuantizationError, match=f"for {len(needed)} tensors"):
                    plan(model, scheme)
                refused += 1
                continue
            found = {
                gguf_name(p.tensor): p.encoding.name for p in plan(model, scheme, Everything() if has_imatrix else None)
            }
            assert found == expected, f"{scheme.name}, {has_imatrix=}"
    return refused


@pytest.mark.parametrize("name", SOURCES)
def test_every_tensor_has_the_type_that_llama_quantize_gives(name: str, make: Callable[..., Path]) -> None:
    model_type, settings = SOURCES[name]
    assert check_types(make(model_type, **settings)) == (5 if settings.get("hidden_size") == 256 else 0)


@pytest.mark.parametrize("name", DENSE)
def test_dense_models_get_its_types_by_an_importance_matrix(name: str, tmp_path: Path) -> None:
    """test_oracle.py has those without, and their bytes."""
    shape, refused = DENSE[name]
    assert check_types(write_checkpoint(tmp_path / "source", shape)) == refused


def check_bytes(source: Path, scheme: str, importance_file: Path | None, sums: dict[str, Any] | None) -> None:
    base = convert(source, "f32")[0]
    given = {} if importance_file is None else {"imatrix": importance_file}
    ours, artifact = convert(source, scheme, **given)
    weighed = None if sums is None else of_oracle(sums)
    theirs = oracle.quantize(base, SCHEMES[scheme].ftype, ours.with_name("oracle.gguf"), importance=weighed)
    expected, found = oracle.tensors(theirs), oracle.tensors(ours)
    assert expected.keys() == found.keys()
    assert [name for name in expected if found[name] != expected[name]] == []
    assert artifact.scheme == scheme + "+imatrix" * (sums is not None)


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0", "q4_k_m", "q5_k_s", "q3_k_m", "q2_k", "iq4_xs"])
@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5"])
def test_tensors_equal_llama_quantizes(model_type: str, scheme: str, make: Callable[..., Path]) -> None:
    settings = {"experts": 8} if model_type == "qwen3_next" else {"intermediate_size": 256}
    source = make(model_type, hidden_size=256, num_hidden_layers=4, mtp=1, **settings)
    check_bytes(source, scheme, None, None)


@pytest.mark.parametrize(
    "scheme", ["q4_0", "q4_k_m", "iq4_xs", "iq3_xxs", "iq3_s", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m"]
)
def test_tensors_by_an_importance_matrix_equal_llama_quantizes(
    scheme: str, make: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of rows end inside of experts, each of which has inputs of its own importance."""
    monkeypatch.setattr(streaming, "BLOCK_WEIGHTS", 7 * 256)
    source = make("qwen3_5_moe", hidden_size=256, num_hidden_layers=2, full_attention_interval=2, experts=3)
    sums = importance(source)
    assert any(not s.tokens.all() for s in sums.values())
    check_bytes(source, scheme, write_importance(tmp_path / "imatrix.gguf", sums), sums)
