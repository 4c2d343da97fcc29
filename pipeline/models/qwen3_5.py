"""Qwen3.5, 3.6 and 3.8, dense: a hybrid whose positions have three parts, and whose vision tower is not read."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Any

from pipeline.models.hybrid import hybrid_spec
from pipeline.models.readers import Architecture, LlamaCpp, MlxLm
from pipeline.types import ModelSpec

SECTIONS = (11, 11, 10)


def _read(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    return hybrid_spec({"head_dim": 256, **config}, stored, fused=False, sections=SECTIONS)


MLX_LM = MlxLm(
    defaults={
        **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
        **{"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "vocab_size": 151_936, "max_position_embeddings": 131_072},
        **{"head_dim": None, "tie_word_embeddings": False, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
        **{"linear_num_key_heads": 16, "linear_num_value_heads": 64},
        **{"linear_key_head_dim": 192, "linear_value_head_dim": 128},
    },
    rope="rope_parameters",
    nested=True,
    prefix="language_model.",
    left_out=re.compile(r"^vision_tower|^model\.visual|mtp\."),
)

ARCHITECTURE = Architecture(_read, LlamaCpp(), MLX_LM, text_part="qwen3_5_text")
