"""Qwen3.5, 3.6 and 3.8 with experts, their probabilities always scaled to a sum of 1."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.experts import read_experts
from pipeline.models.hybrid import hybrid_spec
from pipeline.models.qwen3_5 import SECTIONS
from pipeline.types import ModelSpec


def spec(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    experts, problems = read_experts(config, norm_topk=True, shared=True)
    if config.get("norm_topk_prob") is False:
        problems.append("norm_topk_prob: expected true, which every reader of this model_type takes")
    config = {"head_dim": 256, **config}
    return hybrid_spec(config, stored, fused=False, sections=SECTIONS, experts=experts, problems=problems)
