"""Qwen2 and Qwen2.5: biases on Q, K and V, no norm on them."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from pipeline.models.dense import dense_spec
from pipeline.models.readers import SIZES, Architecture, LlamaCpp, MlxLm
from pipeline.types import ModelSpec

FREQUENCIES = re.compile(r"self_attn\.rotary_emb\.inv_freq")
"""What old checkpoints hold beside their weights."""


def _read(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    return dense_spec(config, qkv_bias=True, qk_norm=False)


ARCHITECTURE = Architecture(
    _read,
    LlamaCpp(layers_of_70b=80),
    MlxLm(
        required=(*SIZES, "rope_theta"),
        defaults={"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
        fixed={"head_dim": None},
        traditional=True,
        norms_first=False,
        left_out=FREQUENCIES,
    ),
)
