"""Qwen1.5-MoE and Qwen2-MoE: Qwen2 with experts, and one for all tokens with a gate of its own."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.dense import dense_spec
from pipeline.models.experts import read_experts
from pipeline.models.readers import EVERY_LAYER, EXPERTS, SHARED_EXPERT, SIZES, Architecture, LlamaCpp, MlxLm
from pipeline.types import ModelSpec


def _read(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    experts, problems = read_experts(config, norm_topk=False, shared=True)
    if config.get("qkv_bias", True) is not True:
        problems.append("qkv_bias: expected true; no released checkpoint is without biases")
    return dense_spec(config, stored, qkv_bias=True, qk_norm=False, experts=experts, problems=problems)


ARCHITECTURE = Architecture(
    _read,
    LlamaCpp(scales_experts=False, needs_head=True, splits_width=True),
    MlxLm(
        required=(*SIZES, *EXPERTS, SHARED_EXPERT, "rope_theta"),
        defaults={"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0},
        fixed={"head_dim": None, "tie_word_embeddings": False, "norm_topk_prob": False, **EVERY_LAYER},
        rope="nowhere",
        traditional=True,
        norms_first=False,
    ),
)
