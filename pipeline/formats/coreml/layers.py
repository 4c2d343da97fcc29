"""The layers of each model_type as ops of a MIL function, and what they are made of.

Activations are float16; norms are computed in float32, where 9e3 squared does not overflow. Shapes: Q tokens of a call,
S positions that are attended to, C d_model, F d_ff, H heads of D, K of them for keys and values, G = H / K.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from pipeline.errors import QuantizationError, listed
from pipeline.formats.coreml import tables
from pipeline.formats.coreml.mil import Body, Var, unknown
from pipeline.formats.coreml.names import Piece
from pipeline.types import ModelSpec

STATES = ("k_cache", "v_cache")

Pieces = Mapping[tuple[str, int | None], Sequence[Piece]]
"""Of each tensor, by its role and layer."""


@dataclass(frozen=True)
class Caches:
    """The state of a function. `states` are its inputs, `current` what each was last updated to, by their names.

    start, end: int32 [1], the positions that the call's tokens begin at and end before. length: S.
    """

    states: Mapping[str, Var]
    current: dict[str, Var]
    start: Var
    end: Var
    length: int


@dataclass(frozen=True)
class Model:
    """What the layers of a function share. `caches` is None where it has no state.

    cos, sin: float16 [Q, D], as `_rotated` takes them. mask: float16 [1, 1, G·Q, S], added to scores.
    """

    spec: ModelSpec
    pieces: Pieces
    body: Body
    tokens: int  # Q
    cos: Var
    sin: Var
    mask: Var
    caches: Caches | None


def dense(model: Model, x: Var, layer: int) -> Var:
    """A layer of qwen2 or qwen3: attention with biases, or with norms of each head of q and k, then SwiGLU."""
    spec, op, at = model.spec, model.body.op, f"l{layer}"
    h = norm(model, x, "attn_norm", layer)  # (1, Q, C)
    q = _heads(model, _linear(model, h, "attn_q", layer), f"{at}_q", spec.n_heads)  # (1, H, Q, D)
    k = _heads(model, _linear(model, h, "attn_k", layer), f"{at}_k", spec.n_kv_heads)  # (1, K, Q, D)
    v = _heads(model, _linear(model, h, "attn_v", layer), f"{at}_v", spec.n_kv_heads)
    if spec.qk_norm:
        q, k = norm(model, q, "attn_q_norm", layer), norm(model, k, "attn_k_norm", layer)
    q, k = _rotated(model, q, f"{at}_q"), _rotated(model, k, f"{at}_k")
    attended = _attention(model, q, k, v, layer)  # (1, Q, H·D)
    x = op("add", f"{at}_mid", x=x, y=_linear(model, attended, "attn_output", layer))
    h = norm(model, x, "ffn_norm", layer)
    gate = op("silu", f"{at}_silu", x=_linear(model, h, "ffn_gate", layer))  # (1, Q, F)
    product = op("mul", f"{at}_ffn", x=gate, y=_linear(model, h, "ffn_up", layer))
    return op("add", f"{at}_out", x=x, y=_linear(model, product, "ffn_down", layer))


BLOCKS: Mapping[str, Callable[[Model, Var, int], Var]] = {"qwen2": dense, "qwen3": dense}
"""A layer of each model_type: (model, x [1, Q, C], layer) -> [1, Q, C]."""


def refuse_unknown(spec: ModelSpec) -> None:
    """Refuse a model whose layers have no block here.

    Raises:
        QuantizationError: naming what is missing, by what the layers are made of.
    """
    if spec.model_type not in BLOCKS:
        raise QuantizationError(
            f"Core ML cannot hold a {spec.model_type} yet:\n{listed([*_missing(spec)])}\nTake gguf or mlx.",
            spec.weights,
        )


def _missing(spec: ModelSpec) -> Iterator[str]:
    if spec.experts is not None:
        count, used = spec.experts.count, spec.experts.used
        yield (
            f"experts: no function here gathers the {used} of {count} quantized matrices that a router chooses, and "
            "without that every token would be multiplied by all"
        )
    if spec.delta is not None:
        yield (
            f"Gated DeltaNet in {len(spec.linear)} of {spec.n_layers} layers: no function here carries its recurrent "
            "state and the inputs of its convolution from chunk to chunk, nor runs through a window token by token"
        )
    if spec.experts is None and spec.delta is None:
        yield "its layers"


def norm(model: Model, x: Var, role: str, layer: int | None) -> Var:
    """RMSNorm over the last dimension, in float32."""
    op, name = model.body.op, _name(role, layer)
    (weight,) = model.pieces[role, layer]
    wide = op("cast", f"{name}_wide", x=x, dtype="fp32")
    square = op("mul", f"{name}_square", x=wide, y=wide)
    mean = op("reduce_mean", f"{name}_mean", x=square, axes=[-1], keep_dims=True)
    scale = op("rsqrt", f"{name}_rsqrt", x=mean, epsilon=np.float32(model.spec.norm_eps))
    unit = op("mul", f"{name}_unit", x=wide, y=scale)
    return op("cast", name, x=op("mul", f"{name}_scaled", x=unit, y=model.body.weight(weight)), dtype="fp16")


def _heads(model: Model, x: Var, name: str, heads: int) -> Var:
    """[1, Q, heads·D] -> [1, heads, Q, D]."""
    op, d = model.body.op, model.spec.head_dim
    if model.tokens == 1:
        return op("reshape", f"{name}_heads", x=x, shape=[1, heads, 1, d])
    split = op("reshape", f"{name}_split", x=x, shape=[1, model.tokens, heads, d])
    return op("transpose", f"{name}_heads", x=split, perm=[0, 2, 1, 3])


def _rotated(model: Model, x: Var, name: str) -> Var:
    """Rotary embedding of [1, heads, Q, D]: x · cos + (second half, first half) · sin, whose first half is negative."""
    op = model.body.op
    first, second = op("split", f"{name}_halves", x=x, num_splits=2, axis=-1)
    swapped = op("concat", f"{name}_swapped", values=[second, first], axis=-1, interleave=False)
    straight = op("mul", f"{name}_cos", x=x, y=model.cos)
    return op("add", f"{name}_rope", x=straight, y=op("mul", f"{name}_sin", x=swapped, y=model.sin))


def _attention(model: Model, q: Var, k: Var, v: Var, layer: int) -> Var:
    """[1, Q, H·D] of q [1, H, Q, D] and k, v [1, K, Q, D].

    The queries of heads that share keys stand below each other as if they were one head's: no key is copied.
    """
    spec, op, at, tokens = model.spec, model.body.op, f"l{layer}", model.tokens
    group = spec.n_heads // spec.n_kv_heads
    if model.caches is not None:
        k, v = _cached(model, model.caches, k, v, layer)  # (1, K, S, D)
    if group > 1:
        q = op("reshape", f"{at}_q_groups", x=q, shape=[1, spec.n_kv_heads, group * tokens, spec.head_dim])
    x = op("scaled_dot_product_attention", f"{at}_attn", query=q, key=k, value=v, attn_mask=model.mask)
    if tokens > 1:
        if group > 1:
            x = op("reshape", f"{at}_attn_heads", x=x, shape=[1, spec.n_heads, tokens, spec.head_dim])
        x = op("transpose", f"{at}_attn_tokens", x=x, perm=[0, 2, 1, 3])  # (1, Q, H, D)
    return op("reshape", f"{at}_attn_flat", x=x, shape=[1, tokens, spec.n_heads * spec.head_dim])


def _cached(model: Model, caches: Caches, k: Var, v: Var, layer: int) -> list[Var]:
    """Keys and values [1, K, S, D] of a layer, once those of the call's tokens [1, K, Q, D] are in the caches.

    Each update follows on the one before it: were a state read a second time, a pass would take both for one value.
    """
    spec, op, at = model.spec, model.body.op, f"l{layer}"
    first, last = [[layer], [0], caches.start, [0]], [[layer + 1], [spec.n_kv_heads], caches.end, [spec.head_dim]]
    begin = op("concat", f"{at}_begin", values=first, axis=0, interleave=False)
    end = op("concat", f"{at}_end", values=last, axis=0, interleave=False)
    size = [1, spec.n_kv_heads, caches.length, spec.head_dim]
    found = []
    for state, new in zip(STATES, (k, v), strict=True):
        name = f"{at}_{state}"
        whole = op("slice_update", f"{name}_new", x=caches.current[state], update=new, begin=begin, end=end)
        whole = op("coreml_update_state", f"{name}_all", state=caches.states[state], value=whole)
        caches.current[state] = whole
        found.append(op("slice_by_size", name, x=whole, begin=[layer, 0, 0, 0], size=size))
    return found


def product(model: Model, x: Var, piece: Piece, name: str, bias: Piece | None = None) -> Var:
    """[1, Q, in] -> [1, Q, rows of the piece]."""
    body = model.body
    added = None if bias is None else body.weight(bias)
    if tables.is_linear(piece):
        if added is None:
            added = body.constant(tables.zeros(piece.count))
        return body.op("linear", name, x=x, weight=body.weight(piece), bias=added)
    codes, scales = (body.constant(blob) for blob in piece.blobs)
    with unknown(codes):
        weight = scaled(body, f"{name}_weight", codes, scales)
    y = body.op("matmul", f"{name}_product" if bias else name, x=x, y=weight, transpose_x=False, transpose_y=True)
    return body.op("add", name, x=y, y=added) if bias else y


def scaled(body: Body, name: str, codes: Var, scales: Var) -> Var:
    """Codes of 16 bits times float32 scales, as float16."""
    wide = body.op("cast", f"{name}_wide", x=codes, dtype="fp32")
    return body.op("cast", name, x=body.op("mul", f"{name}_scaled", x=wide, y=scales), dtype="fp16")


def _linear(model: Model, x: Var, role: str, layer: int) -> Var:
    """[1, Q, in] -> [1, Q, out] by the matrix of a role, and its bias where it has one."""
    (piece,), biases = model.pieces[role, layer], model.pieces.get((f"{role}_bias", layer))
    return product(model, x, piece, _name(role, layer), biases[0] if biases else None)


def _name(role: str, layer: int | None) -> str:
    return role if layer is None else f"l{layer}_{role}"
