"""The tensors that decoder layers are made of, by transformers' names: attention, feed-forward, experts, DeltaNet."""

from __future__ import annotations

from collections.abc import Container, Iterator

from pipeline.types import DeltaNet, Experts, Span, TensorSpec


def embedding(vocab_size: int, d_model: int) -> TensorSpec:
    return TensorSpec("model.embed_tokens.weight", "embed", None, (vocab_size, d_model))


def output(vocab_size: int, d_model: int, tied: bool) -> Iterator[TensorSpec]:
    """The last norm, and the head unless it is the embedding."""
    yield TensorSpec("model.norm.weight", "output_norm", None, (d_model,))
    if not tied:
        yield TensorSpec("lm_head.weight", "head", None, (vocab_size, d_model))


def attention(
    at: str,
    layer: int,
    *,
    d_model: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    qkv_bias: bool = False,
    qk_norm: bool = False,
    gated: bool = False,
) -> Iterator[TensorSpec]:
    """`at` is the layer's own name, as 'model.layers.3'. Where it is `gated`, each head's rows of q are followed by its
    gate's.
    """
    q, kv, name = n_heads * head_dim, n_kv_heads * head_dim, f"{at}.self_attn"
    for part, rows in (("q", 2 * q if gated else q), ("k", kv), ("v", kv)):
        yield TensorSpec(f"{name}.{part}_proj.weight", f"attn_{part}", layer, (rows, d_model))
        if qkv_bias:
            yield TensorSpec(f"{name}.{part}_proj.bias", f"attn_{part}_bias", layer, (rows,))
    if qk_norm:
        for part in ("q", "k"):
            yield TensorSpec(f"{name}.{part}_norm.weight", f"attn_{part}_norm", layer, (head_dim,))
    yield TensorSpec(f"{name}.o_proj.weight", "attn_output", layer, (d_model, q))


def delta_net(at: str, layer: int, d_model: int, delta: DeltaNet, fused: bool) -> Iterator[TensorSpec]:
    """`fused` projections hold, for each k-head in turn, its rows of q, k, v and z, or of b and a."""
    name = f"{at}.linear_attn"
    if fused:
        yield TensorSpec(f"{name}.in_proj_qkvz.weight", "delta_qkvz", layer, (delta.channels + delta.values, d_model))
        yield TensorSpec(f"{name}.in_proj_ba.weight", "delta_ba", layer, (2 * delta.v_heads, d_model))
    else:
        yield TensorSpec(f"{name}.in_proj_qkv.weight", "delta_qkv", layer, (delta.channels, d_model))
        yield TensorSpec(f"{name}.in_proj_z.weight", "delta_z", layer, (delta.values, d_model))
        yield TensorSpec(f"{name}.in_proj_b.weight", "delta_b", layer, (delta.v_heads, d_model))
        yield TensorSpec(f"{name}.in_proj_a.weight", "delta_a", layer, (delta.v_heads, d_model))
    yield TensorSpec(f"{name}.conv1d.weight", "delta_conv", layer, (delta.channels, 1, delta.conv))
    yield TensorSpec(f"{name}.A_log", "delta_a_log", layer, (delta.v_heads,))
    yield TensorSpec(f"{name}.dt_bias", "delta_dt_bias", layer, (delta.v_heads,))
    yield TensorSpec(f"{name}.norm.weight", "delta_norm", layer, (delta.v_dim,))
    yield TensorSpec(f"{name}.out_proj.weight", "delta_out", layer, (d_model, delta.values))


def feed_forward(at: str, layer: int, d_model: int, d_ff: int) -> Iterator[TensorSpec]:
    yield from _swiglu(f"{at}.mlp", "ffn", layer, d_model, d_ff)


def mixture(at: str, layer: int, d_model: int, experts: Experts, stored: Container[str]) -> Iterator[TensorSpec]:
    """The router, all experts, and the shared one with its own gate. `stored` tells by its names whether a checkpoint
    holds each expert alone or all of a layer fused.
    """
    name, n, d_ff = f"{at}.mlp", experts.count, experts.d_ff
    yield TensorSpec(f"{name}.gate.weight", "router", layer, (n, d_model))
    fused = f"{name}.experts.gate_up_proj" in stored
    for part, shape, projections in (
        ("gate_up", (n, 2 * d_ff, d_model), (("gate", (d_ff, d_model)), ("up", (d_ff, d_model)))),
        ("down", (n, d_model, d_ff), (("down", (d_model, d_ff)),)),
    ):
        alone = (
            Span(f"{name}.experts.{expert}.{projection}_proj.weight", rows, 0, rows[0])
            for expert in range(n)
            for projection, rows in projections
        )
        spans = () if fused else tuple(alone)
        yield TensorSpec(f"{name}.experts.{part}_proj", f"expert_{part}", layer, shape, spans=spans)
    if experts.shared_d_ff:
        yield from _swiglu(f"{name}.shared_expert", "shared", layer, d_model, experts.shared_d_ff)
        yield TensorSpec(f"{name}.shared_expert_gate.weight", "shared_router", layer, (1, d_model))


def norms(at: str, layer: int, d_model: int, second: str = "ffn_norm") -> tuple[TensorSpec, TensorSpec]:
    """Before attention, and before the feed-forward part; `second` is that one's role."""
    return (
        TensorSpec(f"{at}.input_layernorm.weight", "attn_norm", layer, (d_model,)),
        TensorSpec(f"{at}.post_attention_layernorm.weight", second, layer, (d_model,)),
    )


def _swiglu(name: str, role: str, layer: int, d_model: int, d_ff: int) -> Iterator[TensorSpec]:
    yield TensorSpec(f"{name}.gate_proj.weight", f"{role}_gate", layer, (d_ff, d_model))
    yield TensorSpec(f"{name}.up_proj.weight", f"{role}_up", layer, (d_ff, d_model))
    yield TensorSpec(f"{name}.down_proj.weight", f"{role}_down", layer, (d_model, d_ff))
