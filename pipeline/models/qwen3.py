"""Qwen3, dense: RMSNorm on each head of Q and K, no biases, head_dim of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.dense import dense_spec
from pipeline.types import ModelSpec


def spec(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    biased = ["attention_bias is true; no released Qwen3 has biases and none are written"]
    problems = biased if config.get("attention_bias") else []
    # transformers' Qwen3Config defaults head_dim to 128, not to hidden_size / heads
    return dense_spec({"head_dim": 128, **config}, qkv_bias=False, qk_norm=True, problems=problems)
