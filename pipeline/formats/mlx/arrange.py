"""The tensors of a model as mlx-lm names, shapes and orders them; and the way back to transformers' parameters.

Source: mlx-lm 0.32.2 (each model file's modules and `sanitize`; models/switch_layers.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from pipeline.models import MODEL_TYPES
from pipeline.models.experts import gates_and_ups
from pipeline.types import Dropped, ModelSpec, TensorSpec

ROUTERS = ("router", "shared_router")
"""Roles of the matrices that choose experts, or weigh the one that all tokens take."""

CONVOLUTION = "delta_conv"
DECAY = "delta_a_log"

ATTENTION = (
    *("attn_q", "attn_q_bias", "attn_k", "attn_k_bias", "attn_v", "attn_v_bias", "attn_output"),
    *("attn_q_norm", "attn_k_norm"),
)
DELTA_NET = (
    *("delta_conv", "delta_qkvz", "delta_ba", "delta_qkv", "delta_z", "delta_b", "delta_a"),
    *("delta_dt_bias", "delta_a_log", "delta_norm", "delta_out"),
)
FEED_FORWARD = (
    *("ffn_gate", "ffn_down", "ffn_up", "router", "expert_gate", "expert_up", "expert_down"),
    *("shared_gate", "shared_down", "shared_up", "shared_router"),
)
NORMS = ("attn_norm", "ffn_norm", "post_norm")
AROUND = {"embed": 0, "output_norm": 2, "head": 3}  # the layers, which are 1


def arranged(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The tensors of an MLX folder in the order of mlx-lm's parameters, which decides the shard of each. Experts are
    switch_mlp.gate_proj, .up_proj and .down_proj, [experts, out, in].

    Rows are the checkpoint's own: what is stored in another shape or with 1 added, stored_shape and is_offset say.
    """
    reader = MODEL_TYPES[spec.model_type].mlx_lm
    parts = (NORMS, FEED_FORWARD) if reader.norms_first else (FEED_FORWARD, NORMS)
    order = (*ATTENTION, *DELTA_NET, *(role for part in parts for role in part))

    def place(tensor: TensorSpec) -> tuple[int, int, int]:
        if tensor.layer is None:
            return AROUND[tensor.role], 0, 0
        return 1, tensor.layer, order.index(tensor.role)

    tensors = (part for tensor in spec.tensors for part in _split(tensor))
    named = (replace(t, name=reader.prefix + t.name, spans=t.stored) if reader.prefix else t for t in tensors)
    return tuple(sorted(named, key=place))


def _split(tensor: TensorSpec) -> Iterator[TensorSpec]:
    """A tensor, or what becomes of fused experts: the rows of all their gates, and of all their ups."""
    parts = gates_and_ups(tensor) if tensor.role == "expert_gate_up" else (tensor,)
    for part in parts:
        stem, experts, last = part.name.rpartition(".experts.")
        yield replace(part, name=f"{stem}.switch_mlp.{last}.weight", spans=part.stored) if experts else part


def restored(spec: ModelSpec, whole: Callable[[str], NDArray[np.float32]]) -> Iterator[tuple[str, NDArray[np.float32]]]:
    """transformers' parameters, by name and in their shapes; `whole` gives the weights of a tensor by its name here."""
    prefix = MODEL_TYPES[spec.model_type].mlx_lm.prefix
    for tensor in spec.tensors:
        parts = [whole(prefix + part.name) for part in _split(tensor)]
        weights = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)
        yield tensor.name, weights - np.float32(1) if is_offset(tensor, spec) else weights.reshape(tensor.shape)


def is_packable(tensor: TensorSpec) -> bool:
    """Whether it is matrices; the others stay floats."""
    return len(tensor.shape) > 1 and tensor.role != CONVOLUTION


def is_offset(tensor: TensorSpec, spec: ModelSpec) -> bool:
    """Whether a checkpoint stores it less 1, and an MLX folder as it is."""
    return spec.offset_norms and tensor.is_offset_norm


def stored_shape(tensor: TensorSpec) -> tuple[int, ...]:
    """The shape in an MLX folder: convolutions have their one input channel last. Rows lie as in the tensor's own."""
    if tensor.role != CONVOLUTION:
        return tensor.shape
    channels, one, width = tensor.shape
    return channels, width, one


def renamed(name: str, spec: ModelSpec) -> str:
    """The name that mlx-lm gives a tensor of a file where its file of a model_type reads larger models."""
    prefix = MODEL_TYPES[spec.model_type].mlx_lm.prefix
    if name.startswith(f"model.{prefix}"):
        return f"{prefix}model." + name.removeprefix(f"model.{prefix}")
    return name if name.startswith(prefix) else prefix + name


def is_left_out(name: str, spec: ModelSpec) -> bool:
    """What mlx-lm takes out of a file before it looks; a quantized head of a tied model it does not."""
    reader = MODEL_TYPES[spec.model_type].mlx_lm
    is_head = name.removeprefix(reader.prefix) == "lm_head.weight"
    return (spec.tied and is_head) or (reader.left_out is not None and reader.left_out.search(name) is not None)


def dropped(spec: ModelSpec) -> tuple[Dropped, ...]:
    """What a checkpoint holds and an MLX folder does not."""
    return (*spec.dropped, spec.dropped_mtp("mlx-lm has none of them")) if spec.mtp else spec.dropped
