"""mlx-lm's file of each model_type: which keys of config.json it takes, and what it calls and how it orders parameters.

Source: mlx-lm 0.32.2 (models/qwen2.py, qwen2_moe.py, qwen3.py, qwen3_moe.py, qwen3_next.py, qwen3_5.py, qwen3_5_moe.py:
ModelArgs, and the modules' own attributes; models/rope_utils.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

SIZES = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "vocab_size"),
)
QWEN3 = ("max_position_embeddings", "head_dim", "tie_word_embeddings", "rope_theta")
QWEN3_NEXT = ("max_position_embeddings", "head_dim", "rope_theta", "partial_rotary_factor")
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
EVERY_LAYER: dict[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""What says that every layer has experts."""

DELTA = (
    *("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)


@dataclass(frozen=True)
class ModelFile:
    """How mlx-lm reads one model_type.

    required: keys that config.json must have. defaults: others that it reads, and what it takes where they are absent.
    fixed: keys that it does not read, and what it takes whatever they say; head_dim None is hidden_size over heads.
    rope: where it looks for a scaling: in "rope_scaling", "either" that or rope_parameters, in "rope_parameters", where
    theta lies as well, or nowhere. nested: a config.json may have all of it in text_config. traditional: it takes
    rope_traditional. prefix: what names of parameters begin with. norms_first: a layer's norms are ordered before its
    feed-forward part.
    """

    required: tuple[str, ...]
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rope: Literal["rope_scaling", "either", "rope_parameters", "nowhere"] = "rope_scaling"
    nested: bool = False
    traditional: bool = False
    prefix: str = ""
    norms_first: bool = True


_QWEN3_5 = {
    **{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32},
    **{"num_key_value_heads": 8, "rms_norm_eps": 1e-6, "vocab_size": 151_936, "max_position_embeddings": 131_072},
    **{"head_dim": None, "tie_word_embeddings": False, "full_attention_interval": 4, "linear_conv_kernel_dim": 4},
    **{"linear_num_key_heads": 16, "linear_num_value_heads": 64},
    **{"linear_key_head_dim": 192, "linear_value_head_dim": 128},
}

MODEL_FILES = {
    "qwen2": ModelFile(
        (*SIZES, "rope_theta"),
        {"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "tie_word_embeddings": True},
        {"head_dim": None},
        traditional=True,
        norms_first=False,
    ),
    "qwen2_moe": ModelFile(
        (*SIZES, *EXPERTS, "shared_expert_intermediate_size", "rope_theta"),
        {"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0},
        {"head_dim": None, "tie_word_embeddings": False, "norm_topk_prob": False, **EVERY_LAYER},
        rope="nowhere",
        traditional=True,
        norms_first=False,
    ),
    "qwen3": ModelFile(
        (*SIZES, *QWEN3),
        rope="either",
        norms_first=False,
    ),
    "qwen3_moe": ModelFile(
        (*SIZES, *QWEN3, *EXPERTS, *EVERY_LAYER, "norm_topk_prob"),
        rope="nowhere",
    ),
    "qwen3_next": ModelFile(
        (*SIZES, *QWEN3_NEXT, *EXPERTS, *EVERY_LAYER, "shared_expert_intermediate_size", *DELTA),
        {"tie_word_embeddings": False, "norm_topk_prob": False, "full_attention_interval": 4},
    ),
    "qwen3_5": ModelFile((), _QWEN3_5, rope="rope_parameters", nested=True, prefix="language_model."),
    "qwen3_5_moe": ModelFile(
        (*EXPERTS, "shared_expert_intermediate_size"),
        {**_QWEN3_5, "norm_topk_prob": True},
        EVERY_LAYER,
        rope="rope_parameters",
        nested=True,
        prefix="language_model.",
    ),
}

ROPE_PARAMETERS = {"rope_theta": 100_000.0, "partial_rotary_factor": 0.25}
"""What they are where a file looks there and finds none."""

YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0}
"""What YarnRoPE takes, and its defaults."""
