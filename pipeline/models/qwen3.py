"""Qwen3, dense: RMSNorm on each head of Q and K, no biases, head_dim of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.dense import dense_spec
from pipeline.models.readers import SIZES, Architecture, LlamaCpp, MlxLm
from pipeline.types import ModelSpec

KEYS = ("max_position_embeddings", "head_dim", "tie_word_embeddings", "rope_theta")
"""What mlx-lm needs beside SIZES."""


def _read(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    biased = ["attention_bias is true; no released Qwen3 has biases and none are written"]
    problems = biased if config.get("attention_bias") else []
    # transformers' Qwen3Config defaults head_dim to 128, not to hidden_size / heads
    return dense_spec({"head_dim": 128, **config}, qkv_bias=False, qk_norm=True, problems=problems)


ARCHITECTURE = Architecture(_read, LlamaCpp(), MlxLm(required=(*SIZES, *KEYS), rope="either", norms_first=False))
