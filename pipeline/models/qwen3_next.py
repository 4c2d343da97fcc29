"""Qwen3-Next: a hybrid with experts, whose DeltaNets' projections are fused."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.experts import read_experts
from pipeline.models.hybrid import hybrid_spec
from pipeline.models.readers import DELTA, EVERY_LAYER, EXPERTS, SHARED_EXPERT, SIZES, Architecture, LlamaCpp, MlxLm
from pipeline.types import ModelSpec

KEYS = ("max_position_embeddings", "head_dim", "rope_theta", "partial_rotary_factor")
"""What mlx-lm needs beside SIZES and those of the experts and the DeltaNets."""


def _read(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    experts, problems = read_experts(config, norm_topk=True, shared=True)
    return hybrid_spec({"head_dim": 256, **config}, stored, fused=True, experts=experts, problems=problems)


ARCHITECTURE = Architecture(
    _read,
    LlamaCpp(scales_experts=True),
    MlxLm(
        required=(*SIZES, *KEYS, *EXPERTS, *EVERY_LAYER, SHARED_EXPERT, *DELTA),
        defaults={"tie_word_embeddings": False, "norm_topk_prob": False, "full_attention_interval": 4},
    ),
)
