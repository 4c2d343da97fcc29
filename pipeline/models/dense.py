"""What the dense Qwen architectures share: reading config.json, and the tensors of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.errors import CheckpointError, listed
from pipeline.types import ModelSpec, Rope, TensorSpec

SIZES = (
    "num_hidden_layers",
    "hidden_size",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)

ROPE_KEYS = {
    *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow"),
}


def dense_spec(config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool) -> ModelSpec:
    """ModelSpec of a decoder with RMSNorm, grouped-query attention and SwiGLU.

    Raises:
        CheckpointError: naming every key that is missing or has a value this function does not compute.
    """
    problems = [f"{key}: missing or not a positive integer" for key in SIZES if not _positive(config.get(key))]
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act: expected 'silu', found {config['hidden_act']!r}")
    if _slides(config):
        problems.append("use_sliding_window: sliding-window attention is not supported; it must be false")
    kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if config.get("num_key_value_heads") == 0 or not _positive(kv_heads):
        problems.append("num_key_value_heads: not a positive integer")
    if problems:
        raise CheckpointError(f"config.json of {config['model_type']}:\n{listed(problems)}")
    heads = config["num_attention_heads"]
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}."
        )
    head_dim = config["hidden_size"] // heads if config.get("head_dim") is None else config["head_dim"]
    if not _positive(head_dim):
        raise CheckpointError(f"config.json: head_dim must be a positive integer, found {head_dim!r}.")
    sizes = {
        "n_layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "d_ff": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
    }
    tied = bool(config.get("tie_word_embeddings", False))
    return ModelSpec(
        model_type=config["model_type"],
        **sizes,
        context_length=config["max_position_embeddings"],
        rope=rope(config),
        norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        tied=tied,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tensors=tuple(_tensors(**sizes, tied=tied, qkv_bias=qkv_bias, qk_norm=qk_norm)),
    )


def rope(config: dict[str, Any]) -> Rope:
    """Rotary settings from `rope_theta` with `rope_scaling.type` or `.rope_type`, or from transformers 5's
    `rope_parameters`.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind == "default":
        return Rope(theta)
    if kind not in {"yarn", "linear"}:
        raise CheckpointError(f"config.json: rope scaling {kind!r} is not supported; known: default, linear, yarn.")
    given = {key: value for key, value in scaling.items() if value is not None}
    problems = [f"{key} is not supported" for key in given if key not in ROPE_KEYS]
    if not isinstance(scaling.get("factor"), int | float):
        problems.append(f"factor must be a number, found {scaling.get('factor')!r}")
    if problems:
        raise CheckpointError(f"config.json: rope scaling {kind}:\n{listed(problems)}")
    return Rope(
        theta,
        scaling=kind,
        factor=float(scaling["factor"]),
        original_context=scaling.get("original_max_position_embeddings") or config["max_position_embeddings"],
        attention_factor=scaling.get("attention_factor"),
        beta_fast=scaling.get("beta_fast"),
        beta_slow=scaling.get("beta_slow"),
    )


def _positive(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _slides(config: dict[str, Any]) -> bool:
    layers = config.get("layer_types") or []
    return bool(config.get("use_sliding_window")) or "sliding_attention" in layers


def _tensors(
    *,
    n_layers: int,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    d_ff: int,
    vocab_size: int,
    tied: bool,
    qkv_bias: bool,
    qk_norm: bool,
) -> Iterator[TensorSpec]:
    """Every tensor in the order of a forward pass."""
    q, kv = n_heads * head_dim, n_kv_heads * head_dim
    yield TensorSpec("model.embed_tokens.weight", "embed", None, (vocab_size, d_model))
    for layer in range(n_layers):
        name = f"model.layers.{layer}"
        yield TensorSpec(f"{name}.input_layernorm.weight", "attn_norm", layer, (d_model,))
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            yield TensorSpec(f"{name}.self_attn.{part}_proj.weight", f"attn_{part}", layer, (rows, d_model))
            if qkv_bias:
                yield TensorSpec(f"{name}.self_attn.{part}_proj.bias", f"attn_{part}_bias", layer, (rows,))
        if qk_norm:
            for part in ("q", "k"):
                yield TensorSpec(f"{name}.self_attn.{part}_norm.weight", f"attn_{part}_norm", layer, (head_dim,))
        yield TensorSpec(f"{name}.self_attn.o_proj.weight", "attn_output", layer, (d_model, q))
        yield TensorSpec(f"{name}.post_attention_layernorm.weight", "ffn_norm", layer, (d_model,))
        yield TensorSpec(f"{name}.mlp.gate_proj.weight", "ffn_gate", layer, (d_ff, d_model))
        yield TensorSpec(f"{name}.mlp.up_proj.weight", "ffn_up", layer, (d_ff, d_model))
        yield TensorSpec(f"{name}.mlp.down_proj.weight", "ffn_down", layer, (d_model, d_ff))
    yield TensorSpec("model.norm.weight", "output_norm", None, (d_model,))
    if not tied:
        yield TensorSpec("lm_head.weight", "head", None, (vocab_size, d_model))
