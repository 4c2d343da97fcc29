"""Qwen3.5, 3.6 and 3.8 with experts, their probabilities always scaled to a sum of 1."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Any

from pipeline.models.experts import read_experts
from pipeline.models.hybrid import hybrid_spec
from pipeline.models.qwen3_5 import MLX_LM, SECTIONS
from pipeline.models.readers import EVERY_LAYER, EXPERTS, SHARED_EXPERT, Architecture, LlamaCpp
from pipeline.types import ModelSpec


def _read(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    experts, problems = read_experts(config, norm_topk=True, shared=True)
    if config.get("norm_topk_prob") is False:
        problems.append("norm_topk_prob: expected true, which every reader of this model_type takes")
    config = {"head_dim": 256, **config}
    return hybrid_spec(config, stored, fused=False, sections=SECTIONS, experts=experts, problems=problems)


ARCHITECTURE = Architecture(
    _read,
    LlamaCpp(scales_experts=True),
    replace(
        MLX_LM,
        required=(*EXPERTS, SHARED_EXPERT),
        defaults={**MLX_LM.defaults, "norm_topk_prob": True},
        fixed=EVERY_LAYER,
    ),
    text_part="qwen3_5_moe_text",
)
