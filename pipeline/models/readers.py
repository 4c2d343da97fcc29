"""An architecture: what is read of its config.json, and how llama.cpp and mlx-lm run it, whatever a file of it says.

Source: llama.cpp 0c1e57098 (src/models/qwen*.cpp, src/llama-quant.cpp); mlx-lm 0.32.2 (models/qwen*.py: ModelArgs, the
modules' own attributes, `sanitize`).
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from pipeline.types import ModelSpec

SIZES = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "vocab_size"),
)
EXPERTS = ("num_experts", "num_experts_per_tok", "moe_intermediate_size")
SHARED_EXPERT = "shared_expert_intermediate_size"
EVERY_LAYER: Mapping[str, Any] = {"decoder_sparse_step": 1, "mlp_only_layers": []}
"""What says that every layer has experts."""

DELTA = (
    *("linear_conv_kernel_dim", "linear_num_key_heads", "linear_num_value_heads"),
    *("linear_key_head_dim", "linear_value_head_dim"),
)
"""Keys of config.json in the order of DeltaNet's fields."""


class Reads(Protocol):
    """config.json, by the names of the stored tensors -> ModelSpec.

    Raises:
        CheckpointError: naming every key that is missing or has a value that would not be computed.
    """

    def __call__(self, config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec: ...


@dataclass(frozen=True)
class LlamaCpp:
    """How llama.cpp runs one model_type.

    scales_experts: whether it scales the used experts' probabilities to a sum of 1, which no key changes; None where
    there are no experts. needs_head: it loads no file without output.weight, even where the head is the embedding.
    splits_width: it takes hidden_size over heads for head_dim. layers_of_70b: the number of layers by which its mixes
    know a model of 70B, and give it more bits.
    """

    scales_experts: bool | None = None
    needs_head: bool = False
    splits_width: bool = False
    layers_of_70b: int | None = None


@dataclass(frozen=True)
class MlxLm:
    """How mlx-lm runs one model_type.

    required: keys that config.json must have. defaults: others that it reads, and what it takes where they are absent.
    fixed: keys that it does not read, and what it takes whatever they say; head_dim None is hidden_size over heads.
    rope: where it looks for a scaling: in "rope_scaling", "either" that or rope_parameters, in "rope_parameters", where
    theta lies as well, or nowhere. nested: a config.json may have all of it in text_config. traditional: it takes
    rope_traditional. prefix: what names of parameters begin with. norms_first: a layer's norms are ordered before its
    feed-forward part. left_out: what names of tensors hold that it takes out of a file before it looks.
    """

    required: tuple[str, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    rope: Literal["rope_scaling", "either", "rope_parameters", "nowhere"] = "rope_scaling"
    nested: bool = False
    traditional: bool = False
    prefix: str = ""
    norms_first: bool = True
    left_out: re.Pattern[str] | None = None


@dataclass(frozen=True)
class Architecture:
    """A model_type. text_part: what transformers calls it where it is the text part of a larger model."""

    read: Reads
    llama_cpp: LlamaCpp
    mlx_lm: MlxLm
    text_part: str | None = None
