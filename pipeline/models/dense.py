"""Decoders of attention layers: RMSNorm, grouped-query attention, and SwiGLU or experts."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator
from typing import Any

from pipeline.models import layers
from pipeline.models.rope import read_rope
from pipeline.models.settings import checked, is_positive
from pipeline.types import Experts, ModelSpec, TensorSpec


def dense_spec(
    config: dict[str, Any],
    stored: Container[str] = (),
    *,
    qkv_bias: bool,
    qk_norm: bool,
    experts: Experts | None = None,
    problems: Iterable[str] = (),
) -> ModelSpec:
    """ModelSpec of a decoder whose layers all have attention, and `experts` or one feed-forward part.

    Raises:
        CheckpointError: naming every key that is missing or has a value this function does not compute, beside
            `problems`.
    """
    rope, wrong = read_rope(config)
    common = checked(config, [*problems, *wrong, *_kind_problems(config)], ("intermediate_size",) if experts else ())
    flags: dict[str, Any] = {"qkv_bias": qkv_bias, "qk_norm": qk_norm}
    tensors = tuple(_tensors(common, flags, experts, stored))
    return ModelSpec(**common, **flags, rope=rope, tensors=tensors, experts=experts)


def _kind_problems(config: dict[str, Any]) -> Iterator[str]:
    """layer_types that transformers would not build, or with which its forward pass fails."""
    count, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if kinds is None or not is_positive(count):
        return
    known = ("full_attention", "sliding_attention")  # settings.checked refuses the latter
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in known for kind in kinds):
        yield f"layer_types: expected full_attention for each of {count} layers, found {kinds!r:.80}"


def _tensors(
    common: dict[str, Any], flags: dict[str, Any], experts: Experts | None, stored: Container[str]
) -> Iterator[TensorSpec]:
    """Every tensor in the order of a forward pass."""
    d_model = common["d_model"]
    heads = {key: common[key] for key in ("d_model", "n_heads", "n_kv_heads", "head_dim")}
    yield layers.embedding(common["vocab_size"], d_model)
    for layer in range(common["n_layers"]):
        at = f"model.layers.{layer}"
        first, second = layers.norms(at, layer, d_model)
        yield first
        yield from layers.attention(at, layer, **heads, **flags)
        yield second
        if experts is None:
            yield from layers.feed_forward(at, layer, d_model, common["d_ff"])
        else:
            yield from layers.mixture(at, layer, d_model, experts, stored)
    yield from layers.output(common["vocab_size"], d_model, common["tied"])
