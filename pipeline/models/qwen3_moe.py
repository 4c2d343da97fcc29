"""Qwen3 with experts and none that all tokens take."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.dense import dense_spec
from pipeline.models.experts import read_experts
from pipeline.models.qwen3 import KEYS
from pipeline.models.readers import EVERY_LAYER, EXPERTS, SIZES, Architecture, LlamaCpp, MlxLm
from pipeline.types import ModelSpec


def _read(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    experts, problems = read_experts(config, norm_topk=False, shared=False)
    if config.get("attention_bias"):
        problems.append("attention_bias: expected false; no released checkpoint has biases and none are written")
    return dense_spec(config, stored, qkv_bias=False, qk_norm=True, experts=experts, problems=problems)


ARCHITECTURE = Architecture(
    _read,
    LlamaCpp(scales_experts=True),
    MlxLm(required=(*SIZES, *KEYS, *EXPERTS, *EVERY_LAYER, "norm_topk_prob"), rope="nowhere"),
)
