"""What a GGUF file holds of experts and hybrids: by the rules of llama.cpp's own converter (conversion/qwen.py)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from family import FAMILY
from family_files import convert, maker, spec
from numpy.typing import NDArray
from safetensors.numpy import load_file

from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.plan import plan
from pipeline.formats.gguf.schemes import SCHEMES

HEADS = {"linear_num_key_heads": 3, "linear_num_value_heads": 6}
K, V, DIM = 3, 6, 16


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return maker(tmp_path_factory.mktemp("arrange"))


def floats(file: Path) -> dict[str, NDArray[np.float32]]:
    return {name: np.frombuffer(data, np.float32) for name, (_, data) in oracle.tensors(file).items()}


def tiled(rows: NDArray[np.float32], dim: int = 1) -> NDArray[np.float32]:
    """V heads, each `dim` long on the first axis, from [K, each] to [each, K]."""
    return rows.reshape(K, V // K, dim, *rows.shape[1:]).swapaxes(0, 1).reshape(rows.shape)


def test_v_heads_of_split_projections_are_tiled(make: Callable[..., Path]) -> None:
    source = make("qwen3_5", **HEADS)
    found, stored = floats(convert(source, "f32")[0]), load_file(source / "model.safetensors")
    for layer in range(3):
        at, blk = f"model.layers.{layer}.linear_attn", f"blk.{layer}"
        qkv, conv = stored[f"{at}.in_proj_qkv.weight"], stored[f"{at}.conv1d.weight"][:, 0]
        first = 2 * K * DIM
        expected = {
            "attn_qkv.weight": np.concatenate([qkv[:first], tiled(qkv[first:], DIM)]),
            "attn_gate.weight": tiled(stored[f"{at}.in_proj_z.weight"], DIM),
            "ssm_beta.weight": tiled(stored[f"{at}.in_proj_b.weight"]),
            "ssm_alpha.weight": tiled(stored[f"{at}.in_proj_a.weight"]),
            "ssm_conv1d.weight": np.concatenate([conv[:first], tiled(conv[first:], DIM)]),
            "ssm_dt.bias": tiled(stored[f"{at}.dt_bias"]),
            "ssm_norm.weight": stored[f"{at}.norm.weight"],
            "ssm_out.weight": tiled(stored[f"{at}.out_proj.weight"].T, DIM).T,
        }
        for name, values in expected.items():
            np.testing.assert_array_equal(found[f"{blk}.{name}"], values.ravel(), err_msg=name)
        np.testing.assert_allclose(found[f"{blk}.ssm_a"], -np.exp(tiled(stored[f"{at}.A_log"])), rtol=1e-6)


def test_fused_projections_are_split_and_keep_their_heads(make: Callable[..., Path]) -> None:
    source = make("qwen3_next", **HEADS)
    found, stored = floats(convert(source, "f32")[0]), load_file(source / "model.safetensors")
    at = "model.layers.1.linear_attn"
    each = V // K * DIM
    groups = stored[f"{at}.in_proj_qkvz.weight"].reshape(K, 2 * DIM + 2 * each, 64)
    q, k, v, z = np.split(groups, [DIM, 2 * DIM, 2 * DIM + each], axis=1)
    expected = {
        "attn_qkv.weight": np.concatenate([part.reshape(-1, 64) for part in (q, k, v)]),
        "attn_gate.weight": z,
        "ssm_ba.weight": stored[f"{at}.in_proj_ba.weight"],
        "ssm_conv1d.weight": stored[f"{at}.conv1d.weight"],
        "ssm_dt.bias": stored[f"{at}.dt_bias"],
        "ssm_out.weight": stored[f"{at}.out_proj.weight"],
    }
    for name, values in expected.items():
        np.testing.assert_array_equal(found[f"blk.1.{name}"], values.ravel(), err_msg=name)
    np.testing.assert_allclose(found["blk.1.ssm_a"], -np.exp(stored[f"{at}.A_log"]), rtol=1e-6)


@pytest.mark.parametrize("model_type", FAMILY)
def test_norms_are_what_they_do_once(model_type: str, make: Callable[..., Path]) -> None:
    """CASES 19: hybrids store them less 1, but the DeltaNet's."""
    source = make(model_type, mtp=int(model_type in FAMILY[2:]))
    found, stored = floats(convert(source, "f32")[0]), load_file(source / "model.safetensors")
    add = np.float32(model_type in FAMILY[2:])
    norms = {
        "output_norm": "model.norm",
        "blk.3.attn_norm": "model.layers.3.input_layernorm",
        "blk.3.attn_q_norm": "model.layers.3.self_attn.q_norm",
        "blk.3.attn_k_norm": "model.layers.3.self_attn.k_norm",
    }
    norms["blk.3.post_attention_norm" if add else "blk.3.ffn_norm"] = "model.layers.3.post_attention_layernorm"
    if add:
        norms |= {
            "blk.4.attn_norm": "mtp.layers.0.input_layernorm",
            "blk.4.nextn.enorm": "mtp.pre_fc_norm_embedding",
            "blk.4.nextn.hnorm": "mtp.pre_fc_norm_hidden",
            "blk.4.nextn.shared_head_norm": "mtp.norm",
        }
        delta = stored["model.layers.0.linear_attn.norm.weight"]
        np.testing.assert_array_equal(found["blk.0.ssm_norm.weight"], delta)
    for name, own in norms.items():
        if f"{own}.weight" in stored:  # Qwen2 has none on q and k
            np.testing.assert_array_equal(found[f"{name}.weight"], stored[f"{own}.weight"] + add, err_msg=name)


def test_experts_lie_one_behind_another(make: Callable[..., Path]) -> None:
    source = make("qwen3_5_moe")
    found, stored = floats(convert(source, "f32")[0]), load_file(source / "model.safetensors")
    at = "model.layers.2.mlp"
    for part in ("gate", "up", "down"):
        experts = np.stack([stored[f"{at}.experts.{i}.{part}_proj.weight"] for i in range(6)])
        np.testing.assert_array_equal(found[f"blk.2.ffn_{part}_exps.weight"], experts.ravel())
        shared = stored[f"{at}.shared_expert.{part}_proj.weight"]
        np.testing.assert_array_equal(found[f"blk.2.ffn_{part}_shexp.weight"], shared.ravel())
    shapes = {gguf_name(p.tensor): p.tensor.shape for p in plan(spec(source), SCHEMES["f32"])}
    assert shapes["blk.2.ffn_gate_exps.weight"] == (6, 32, 64)
    assert shapes["blk.2.ffn_gate_inp_shexp.weight"] == (64,)
    np.testing.assert_array_equal(
        found["blk.2.ffn_gate_inp_shexp.weight"], stored[f"{at}.shared_expert_gate.weight"][0]
    )


@pytest.mark.parametrize(
    ("model_type", "expected"),
    [
        ("qwen2_moe", {"expert_shared_feed_forward_length": 64, "feed_forward_length": 128}),
        ("qwen3_moe", {"expert_used_count": 2, "attention.key_length": 32}),
        (
            "qwen3_next",
            {
                **{"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 2, "ssm.time_step_rank": 4},
                **{"ssm.inner_size": 64, "full_attention_interval": 4, "rope.dimension_count": 16, "block_count": 4},
                "attention.recurrent_layers": [True, True, True, False],
            },
        ),
        ("qwen3_5", {"rope.dimension_sections": [3, 3, 2, 0], "rope.freq_base": 10000.0}),
        ("qwen3_5_moe", {"expert_count": 6, "expert_feed_forward_length": 32, "ssm.inner_size": 64}),
    ],
)
def test_keys_of_the_architecture(model_type: str, expected: dict[str, Any], make: Callable[..., Path]) -> None:
    file, _ = convert(make(model_type), "f32")
    arch = model_type.replace("_", "")
    assert oracle.field(file, "general.architecture") == arch
    assert oracle.field(file, "tokenizer.ggml.pre") == ("qwen35" if model_type.startswith("qwen3_5") else "qwen2")
    assert {key: oracle.field(file, f"{arch}.{key}") for key in expected} == expected


def test_layers_without_an_interval_are_listed_alone(make: Callable[..., Path]) -> None:
    kinds = ["full_attention", "linear_attention", "linear_attention", "full_attention"]
    file, _ = convert(make("qwen3_5", layer_types=kinds), "f32")
    assert oracle.field(file, "qwen35.attention.recurrent_layers") == [False, True, True, False]
    with pytest.raises(AssertionError, match="full_attention_interval"):
        oracle.field(file, "qwen35.full_attention_interval")
