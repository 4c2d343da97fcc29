"""Models with experts and hybrids: what mlx-lm and we compute of their MLX folders is what transformers computes."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family import FAMILY, reference_logits
from family_folders import HYBRIDS, IDS, checkpoint, convert, in_bfloat16, loaded, logits
from mlx_oracle import tensors_of

from pipeline.formats.mlx.run import MlxRuntime
from pipeline.runtimes import Scorer

TOLERANCE = 1e-4


@pytest.mark.parametrize("model_type", FAMILY)
def test_mlx_lm_computes_what_transformers_does(model_type: str, tmp_path: Path) -> None:
    """Prefill, and then token by token behind what the cache holds."""
    from mlx_lm.models.cache import make_prompt_cache

    source = in_bfloat16(checkpoint(model_type, tmp_path / "c"))
    expected = reference_logits(source, IDS)
    convert(source, "bf16", tmp_path / "out")
    model = loaded(tmp_path / "out")
    assert expected.std() > 0.5
    np.testing.assert_allclose(logits(model, IDS), expected, rtol=0, atol=TOLERANCE)
    cache = make_prompt_cache(model)
    found = [logits(model, IDS[:20], cache)]
    found += [logits(model, IDS[at : at + 1], cache) for at in range(20, len(IDS))]
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=0, atol=TOLERANCE)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.mark.parametrize("model_type", HYBRIDS)
@pytest.mark.parametrize(
    "settings",
    [
        {"rope_parameters": {"rope_theta": 5000.0, "partial_rotary_factor": 0.25, **YARN}},
        {"rope_parameters": {"rope_theta": 300.0, "rope_type": "linear", "factor": 3.0, "partial_rotary_factor": 1.0}},
        {"layer_types": ["linear_attention", "full_attention"] * 2, "tie_word_embeddings": True},
    ],
    ids=["yarn", "linear", "every-second"],
)
def test_settings_of_hybrids_are_those_of_transformers(
    settings: dict[str, Any], model_type: str, tmp_path: Path
) -> None:
    source = in_bfloat16(checkpoint(model_type, tmp_path / "c", num_hidden_layers=4, **settings))
    convert(source, "bf16", tmp_path / "out")
    found = logits(loaded(tmp_path / "out"), IDS)
    np.testing.assert_allclose(found, reference_logits(source, IDS), rtol=0, atol=TOLERANCE)


def score(scorer: Scorer, ids: np.ndarray = IDS, start: int = 0) -> np.ndarray:
    return np.concatenate([*scorer.score(ids, start)])


@pytest.mark.parametrize("scheme", ["int4", "int8", "mxfp4", "mixed_3_6"])
@pytest.mark.parametrize("model_type", FAMILY)
def test_quantized_folders_load_and_both_engines_compute_the_same(model_type: str, scheme: str, tmp_path: Path) -> None:
    source = checkpoint(model_type, tmp_path / "c", dtype="bfloat16")
    convert(source, scheme, tmp_path / "out")
    expected = logits(loaded(tmp_path / "out"), IDS)
    assert np.isfinite(expected).all()
    assert (expected.std(axis=1) > 0.3).all()  # not uniform
    with closing(MlxRuntime(tmp_path / "out", context=64)) as runtime:
        by_torch = score(runtime)
        assert runtime.native is not None
        by_mlx = score(runtime.native)
    np.testing.assert_allclose(by_torch, expected, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(by_mlx, expected, rtol=0, atol=TOLERANCE)


def test_routers_that_stay_floats_are_loaded(tmp_path: Path) -> None:
    """config.json says of each that it is not packed."""
    settings = {"hidden_size": 96, "num_attention_heads": 3, "num_key_value_heads": 1, "moe_intermediate_size": 32}
    artifact = convert(checkpoint("qwen3_moe", tmp_path / "c", **settings), "mxfp4", tmp_path / "out")
    assert artifact.effective_types["F32"].tensors == 4 + 4 * 4 + 1
    with closing(MlxRuntime(tmp_path / "out", context=64)) as runtime:
        found = score(runtime)
    np.testing.assert_allclose(found, logits(loaded(tmp_path / "out"), IDS), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("model_type", FAMILY)
def test_the_bytes_of_the_cache_are_those_of_its_arrays(model_type: str, tmp_path: Path) -> None:
    """llama-toolchest#166: of a hybrid, keys and values of the attention layers alone, and the DeltaNets' states."""
    convert(checkpoint(model_type, tmp_path / "c"), "mxfp4", tmp_path / "out")
    with closing(MlxRuntime(tmp_path / "out", context=60)) as runtime:
        runtime.prefill(IDS)
        runtime.decode(60 - len(IDS))
        arrays = [array for layer in runtime._mlx._cache for array in _arrays(layer)]
        heads = 32 if model_type != "qwen2_moe" else 16
        attention = 1 if model_type in HYBRIDS else 4
        kv = 2 * attention * 256 * 2 * heads * 4
        state = 3 * (3 * 256 + 4 * 32 * 32) * 4 if model_type in HYBRIDS else 0
        assert runtime.kv_bytes == sum(array.nbytes for array in arrays) == kv + state


def _arrays(layer: Any) -> list[Any]:
    return [layer.keys, layer.values] if hasattr(layer, "keys") else [*layer.cache]


@pytest.mark.parametrize("model_type", FAMILY)
def test_replies_go_on_behind_the_cache(model_type: str, tmp_path: Path) -> None:
    convert(checkpoint(model_type, tmp_path / "c"), "int8", tmp_path / "out")
    with closing(MlxRuntime(tmp_path / "out", context=64)) as runtime:
        by_torch = runtime.reply([5, 6, 7], 6).ids
        assert runtime._mlx.greedy([5, 6, 7], 6, ()) == [*by_torch]
        assert len(by_torch) == 6


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_larger_model_is_converted(model_type: str, tmp_path: Path) -> None:
    """llama.cpp#22656: the same tensors as of the text model alone, and what was dropped is counted and named."""
    alone = in_bfloat16(checkpoint(model_type, tmp_path / "alone", mtp=0))
    convert(alone, "int8", tmp_path / "of-alone")
    settings: dict[str, Any] = {"wrapped": True, "mtp": 1, "layout": "fused"}
    whole = in_bfloat16(checkpoint(model_type, tmp_path / "whole", **settings))
    artifact = convert(whole, "int8", tmp_path / "of-whole")
    assert tensors_of(tmp_path / "of-whole") == tensors_of(tmp_path / "of-alone")
    vision, mtp = artifact.dropped
    assert (vision.part, vision.weights) == ("vision tower", 16 * 3 * 2 * 4 * 4 + 9 * 16 + 16)
    assert vision.tensors == (
        "model.visual.norm",
        "model.visual.patch_embed.proj.weight",
        "model.visual.pos_embed.weight",
    )
    assert (mtp.part, mtp.reason) == ("MTP layers", "mlx-lm has none of them")
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} < {*mtp.tensors}
    written = json.loads((tmp_path / "of-whole" / "config.json").read_text())
    assert (written["model_type"], written["text_config"]["model_type"]) == (model_type, f"{model_type}_text")
    assert "vision_config" not in written
    first, second = (logits(loaded(tmp_path / name), IDS) for name in ("of-alone", "of-whole"))
    np.testing.assert_array_equal(first, second)
