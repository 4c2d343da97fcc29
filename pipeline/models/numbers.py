"""What follows from an architecture: the weights a token takes, and what a runtime has to keep of a conversation."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.types import Encoding, ModelSpec

F16 = Encoding("f16", 1, 2)
"""What the runtimes keep keys and values in unless told otherwise."""

BY_EXPERTS = ("expert_gate_up", "expert_down")
"""Roles of the tensors of which a token takes the used experts' part only."""


@dataclass(frozen=True)
class Numbers:
    """What a model weighs, and what a runtime keeps of a conversation beside it."""

    weights: int
    active_weights: int
    mtp_weights: int
    layers: int
    attention_layers: int
    kv_bytes_per_token: int  # in f16
    state_bytes: int  # in float32, as llama.cpp has it


def numbers(spec: ModelSpec) -> Numbers:
    return Numbers(
        weights=spec.weights,
        active_weights=active_weights(spec),
        mtp_weights=sum(tensor.weights for tensor in spec.mtp),
        layers=spec.n_layers,
        attention_layers=attention_layers(spec),
        kv_bytes_per_token=kv_bytes(spec, 1),
        state_bytes=state_bytes(spec),
    )


def active_weights(spec: ModelSpec) -> int:
    """Of `spec.weights`, those that a token takes part of: all but the experts that are not used.

    The embedding counts as a whole, as in the numbers that models are named by: 3.3B of Qwen3-30B-A3B.
    """
    if spec.experts is None:
        return spec.weights
    routed = sum(tensor.weights for tensor in spec.tensors if tensor.role in BY_EXPERTS)
    return spec.weights - routed // spec.experts.count * (spec.experts.count - spec.experts.used)


def attention_layers(spec: ModelSpec) -> int:
    """Layers that keep keys and values of every token; MTP layers are not part of a forward pass."""
    return spec.n_layers - len(spec.linear)


def kv_bytes(spec: ModelSpec, tokens: int, encoding: Encoding = F16) -> int:
    """Keys and values of `tokens`, in the type that the runtime keeps them in."""
    return encoding.row_bytes(2 * attention_layers(spec) * spec.n_kv_heads * spec.head_dim * tokens)


def state_bytes(spec: ModelSpec, conv_bytes: int = 4) -> int:
    """What the DeltaNet layers keep of a conversation, as large for one token as for many; 0 without such layers.

    The state itself is float32 in llama.cpp (llama-model.cpp: recurrent_type_s) and in mlx-lm (gated_delta.py).
    `conv_bytes` are those of a value of the convolution's last inputs: 4 in llama.cpp (recurrent_type_r); mlx-lm has
    them in the type it computes in (qwen3_next.py).
    """
    if spec.delta is None:
        return 0
    return len(spec.linear) * (spec.delta.held_inputs * conv_bytes + spec.delta.state * 4)


def cache_bytes(spec: ModelSpec, tokens: int, encoding: Encoding = F16, conv_bytes: int = 4) -> int:
    """All that a runtime keeps of a conversation of `tokens`."""
    return kv_bytes(spec, tokens, encoding) + state_bytes(spec, conv_bytes)
