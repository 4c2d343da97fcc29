"""Weights per token, and what a runtime keeps of a conversation, of models whose sizes are known."""

from __future__ import annotations

from typing import Any

from support import Shape, config_of

from pipeline.models import spec_of
from pipeline.models.numbers import (
    Numbers,
    active_weights,
    attention_layers,
    cache_bytes,
    kv_bytes,
    numbers,
    state_bytes,
)
from pipeline.types import Encoding, ModelSpec

GIB = 1 << 30
Q8_0 = Encoding("Q8_0", 32, 34)

COMMON = {"max_position_embeddings": 262144, "rms_norm_eps": 1e-6, "hidden_act": "silu", "tie_word_embeddings": False}
LINEAR = {"linear_conv_kernel_dim": 4, "linear_key_head_dim": 128, "linear_value_head_dim": 128}

QWEN3_30B_A3B: dict[str, Any] = COMMON | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "vocab_size": 151936,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
}
QWEN3_NEXT_80B_A3B: dict[str, Any] = (
    COMMON
    | LINEAR
    | {
        "model_type": "qwen3_next",
        "hidden_size": 2048,
        "intermediate_size": 5120,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "vocab_size": 151936,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "norm_topk_prob": True,
        "rope_theta": 1e7,
    }
)
QWEN3_5_27B: dict[str, Any] = (
    COMMON
    | LINEAR
    | {
        "model_type": "qwen3_5_text",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 64,
        "num_attention_heads": 24,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 248320,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "mrope_section": [11, 11, 10]},
    }
)


def with_mtp(config: dict[str, Any]) -> ModelSpec:
    """Its spec where the checkpoint has a layer that guesses the token after the next."""
    mtp = [f"mtp.layers.0.{part}.weight" for part in ("input_layernorm", "self_attn.q_proj")]
    return spec_of(config, {tensor.name: tensor.shape for tensor in spec_of(config).tensors} | dict.fromkeys(mtp, (1,)))


def test_a_27b_keeps_keys_and_values_of_16_of_its_64_layers() -> None:
    """Counted over all layers they would be 64 GiB (CASES 27)."""
    spec = spec_of(QWEN3_5_27B)
    assert attention_layers(spec) == 16
    assert kv_bytes(spec, 1) == 64 * 1024  # 2 x 16 layers x 4 heads x 256 x 2 bytes
    assert kv_bytes(spec, 262144) == 16 * GIB
    assert kv_bytes(spec, 1, Q8_0) == 64 * 1024 // 64 * 34


def test_a_27b_keeps_a_state_in_the_other_48() -> None:
    """As large as llama.cpp makes both for one sequence (llama-hparams.cpp: n_embd_r, n_embd_s)."""
    spec = spec_of(QWEN3_5_27B)
    inputs, state = 48 * 3 * (2 * 2048 + 6144), 48 * 48 * 128 * 128
    assert (inputs * 4 / (1 << 20), state * 4 / (1 << 20)) == (5.625, 144.0)
    assert state_bytes(spec) == inputs * 4 + state * 4
    assert state_bytes(spec, conv_bytes=2) == inputs * 2 + state * 4
    assert cache_bytes(spec, 262144) == 16 * GIB + state_bytes(spec)
    assert cache_bytes(spec, 1000, Q8_0, 2) == kv_bytes(spec, 1000, Q8_0) + state_bytes(spec, 2)


def test_the_numbers_of_a_27b() -> None:
    spec = with_mtp(QWEN3_5_27B)
    mtp = (2 * 24 * 256 + 2 * 4 * 256) * 5120 + 24 * 256 * 5120 + 3 * 17408 * 5120 + 2 * 5120**2 + 5 * 5120 + 2 * 256
    assert numbers(spec) == Numbers(
        weights=spec.weights,
        active_weights=spec.weights,
        mtp_weights=mtp,
        layers=64,
        attention_layers=16,
        kv_bytes_per_token=65536,
        state_bytes=156893184,
    )


def test_mtp_layers_keep_nothing() -> None:
    spec = with_mtp(QWEN3_5_27B)
    assert spec.mtp_layers == 1
    assert (kv_bytes(spec, 1), state_bytes(spec)) == (64 * 1024, state_bytes(spec_of(QWEN3_5_27B)))
    assert active_weights(spec) == spec.weights == spec_of(QWEN3_5_27B).weights


def test_a_dense_model_takes_all_its_weights_and_keeps_no_state() -> None:
    spec = spec_of(config_of(Shape("qwen3", layers=3, kv_heads=2, head_dim=16)))
    assert active_weights(spec) == spec.weights
    assert kv_bytes(spec, 10) == 2 * 3 * 2 * 16 * 10 * 2
    assert state_bytes(spec) == 0
    assert cache_bytes(spec, 10) == kv_bytes(spec, 10)


def test_experts_that_are_not_used_are_not_active() -> None:
    """30.5B and 3.3B by the model's card, which says 3.3 of 3.35."""
    spec = spec_of(QWEN3_30B_A3B)
    assert spec.weights == 30_532_122_624
    assert active_weights(spec) == spec.weights - 48 * 120 * 3 * 2048 * 768 == 3_353_032_704
    assert kv_bytes(spec, 1) == 96 * 1024


def test_the_expert_of_all_tokens_is_active() -> None:
    """80B and 3B by the model's card, whose 3 leave out the embedding and the head."""
    spec = spec_of(QWEN3_NEXT_80B_A3B)
    assert round(spec.weights / 1e9, 1) == 79.7
    assert active_weights(spec) == spec.weights - 48 * 502 * 3 * 2048 * 512
    assert round(active_weights(spec) / 1e9, 2) == 3.87
    assert round((active_weights(spec) - 2 * 151936 * 2048) / 1e9, 1) == 3.3
    assert attention_layers(spec) == 12
    assert kv_bytes(spec, 1) == 24 * 1024
