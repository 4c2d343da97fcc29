"""Qwen3-Next: a hybrid with experts, whose DeltaNets' projections are fused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.experts import read_experts
from pipeline.models.hybrid import hybrid_spec
from pipeline.types import ModelSpec


def spec(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    experts, problems = read_experts(config, norm_topk=True, shared=True)
    return hybrid_spec({"head_dim": 256, **config}, stored, fused=True, experts=experts, problems=problems)
