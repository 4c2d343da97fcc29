"""What the dense Qwen architectures share: reading config.json, and the tensors of a decoder layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, TypeGuard

from pipeline.errors import CheckpointError, listed
from pipeline.types import ModelSpec, Rope, TensorSpec

SIZES = {
    "num_hidden_layers": 512,  # LLAMA_MAX_LAYERS
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "max_position_embeddings": (1 << 31) - 1,
}
"""The most that each may be: a slip of the pen must not make a table of billions of tensors."""

AGAIN = "Fetch the checkpoint again, or correct its config.json."

DTYPES = ("bfloat16", "float16", "float32")

MOST_HEAD_DIM = 1 << 16
FLOAT32_MAX = 3.4e38

ROPE_KEYS = {
    *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow"),
}


def dense_spec(config: dict[str, Any], *, qkv_bias: bool, qk_norm: bool) -> ModelSpec:
    """ModelSpec of a decoder with RMSNorm, grouped-query attention and SwiGLU.

    Raises:
        CheckpointError: naming every key that is missing or has a value this function does not compute.
    """
    problems = [problem for key, most in SIZES.items() for problem in _size_problems(config, key, most)]
    eps, tied = config.get("rms_norm_eps", 1e-6), config.get("tie_word_embeddings") or False
    if not _number(eps):
        problems.append(f"rms_norm_eps: expected a number above 0, found {eps!r}")
    if not isinstance(tied, bool):
        problems.append(f"tie_word_embeddings: expected true or false, found {tied!r}")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act: expected 'silu', found {config['hidden_act']!r}")
    if _slides(config):
        problems.append("use_sliding_window: sliding-window attention is not supported; it must be false")
    kv_heads = config.get("num_key_value_heads") or config.get("num_attention_heads")
    if config.get("num_key_value_heads") == 0 or not _positive(kv_heads):
        problems.append("num_key_value_heads: not a positive integer")
    if problems:
        raise CheckpointError(f"config.json of {config['model_type']}:\n{listed(problems)}\n{AGAIN}")
    heads = config["num_attention_heads"]
    if heads % kv_heads:
        raise CheckpointError(
            f"config.json: num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}. {AGAIN}"
        )
    head_dim = config["hidden_size"] // heads if config.get("head_dim") is None else config["head_dim"]
    if not _positive(head_dim) or head_dim > MOST_HEAD_DIM:
        most = f" of at most {MOST_HEAD_DIM}" if _positive(head_dim) else ""
        raise CheckpointError(f"config.json: head_dim must be a positive integer{most}, found {head_dim!r}. {AGAIN}")
    sizes = {
        "n_layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "d_ff": config["intermediate_size"],
        "vocab_size": config["vocab_size"],
    }
    return ModelSpec(
        model_type=config["model_type"],
        **sizes,
        context_length=config["max_position_embeddings"],
        rope=rope(config),
        norm_eps=float(eps),
        tied=tied,
        qkv_bias=qkv_bias,
        qk_norm=qk_norm,
        tensors=tuple(_tensors(**sizes, tied=tied, qkv_bias=qkv_bias, qk_norm=qk_norm)),
        dtype=_dtype(config),
    )


def rope(config: dict[str, Any]) -> Rope:
    """Rotary settings from `rope_theta` with `rope_scaling.type` or `.rope_type`, or from transformers 5's
    `rope_parameters`.

    Raises:
        CheckpointError: a scaling, or a key or value of one, that this function does not compute.
    """
    parameters, scaling = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    for key, found in (("rope_parameters", parameters), ("rope_scaling", scaling)):
        if not isinstance(found, dict):
            raise CheckpointError(f"config.json: {key} must be an object or null, found {found!r}. {AGAIN}")
    scaling = scaling or parameters
    thetas = [found["rope_theta"] for found in (parameters, config) if found.get("rope_theta") is not None]
    theta = thetas[0] if thetas else 10_000.0
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in ("default", "yarn", "linear"):
        raise CheckpointError(f"config.json: rope scaling {kind!r} is not supported; known: default, linear, yarn.")
    problems = [] if _number(theta) else [f"rope_theta must be a number above 0, found {theta!r}"]
    problems += _scaling_problems(scaling, kind)
    if problems:
        raise CheckpointError(f"config.json: rope scaling {kind}:\n{listed(problems)}\n{AGAIN}")
    if kind == "default":
        return Rope(float(theta))
    return Rope(
        float(theta),
        scaling=kind,
        factor=float(scaling["factor"]),
        original_context=scaling.get("original_max_position_embeddings") or config["max_position_embeddings"],
        attention_factor=scaling.get("attention_factor"),
        beta_fast=scaling.get("beta_fast"),
        beta_slow=scaling.get("beta_slow"),
    )


def _scaling_problems(scaling: dict[str, Any], kind: str) -> Iterator[str]:
    given = {key: value for key, value in scaling.items() if value is not None}
    allowed = {*ROPE_KEYS, *(("mscale",) if "attention_factor" in given else ())}  # which transformers takes instead
    for key, value in given.items():
        if key not in allowed and (key, value) != ("partial_rotary_factor", 1.0):
            yield f"{key} is not supported"
    if kind == "default":
        return
    factor, original = given.get("factor"), given.get("original_max_position_embeddings", 1)
    if not _number(factor) or factor < 1:
        yield f"factor must be a number of at least 1, found {factor!r}"
    if not _positive(original) or original > SIZES["max_position_embeddings"]:
        yield f"original_max_position_embeddings must be a positive integer, found {original!r}"
    for key in ("attention_factor", "beta_fast", "beta_slow"):
        if key in given and not _number(given[key]):
            yield f"{key} must be a number above 0, found {given[key]!r}"


def _size_problems(config: dict[str, Any], key: str, most: int) -> Iterator[str]:
    value = config.get(key)
    if not _positive(value):
        yield f"{key}: missing or not a positive integer" + (f", found {value!r}" if key in config else "")
    elif value > most:
        yield f"{key}: expected at most {most}, found {value}"


def _positive(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _dtype(config: dict[str, Any]) -> str | None:
    """`torch_dtype`, which transformers 5 writes as `dtype`."""
    found = config.get("torch_dtype") or config.get("dtype")
    return found if found in DTYPES else None


def _number(value: Any) -> TypeGuard[float]:
    """A number above 0 that float32 holds; neither true nor NaN is one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= FLOAT32_MAX


def _slides(config: dict[str, Any]) -> bool:
    layers = config.get("layer_types") or []
    return bool(config.get("use_sliding_window")) or (isinstance(layers, list) and "sliding_attention" in layers)


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
