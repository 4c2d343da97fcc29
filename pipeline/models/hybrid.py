"""Hybrids: layers of Gated DeltaNet with one of gated attention behind every few of them, and MTP layers."""

from __future__ import annotations

import re
from collections.abc import Collection, Container, Iterable, Iterator
from typing import Any

from pipeline.models import layers
from pipeline.models.rope import read_rope
from pipeline.models.settings import checked, is_positive, size_problems
from pipeline.types import DeltaNet, Experts, ModelSpec, TensorSpec

SIZES = {
    "linear_conv_kernel_dim": 64,
    "linear_num_key_heads": 1 << 16,
    "linear_num_value_heads": 1 << 16,
    "linear_key_head_dim": 1 << 16,
    "linear_value_head_dim": 1 << 16,
}

PARTIAL = 0.25
"""The share of a head that is rotated where config.json does not say."""

MTP = "mtp_num_hidden_layers"
MTP_LAYER = re.compile(r"mtp\.layers\.\d{1,3}\.")
MTP_NORMS = {
    "mtp.pre_fc_norm_embedding.weight": "mtp_embed_norm",
    "mtp.pre_fc_norm_hidden.weight": "mtp_hidden_norm",
    "mtp.norm.weight": "mtp_output_norm",
}


def hybrid_spec(
    config: dict[str, Any],
    stored: Collection[str] = (),
    *,
    fused: bool,
    sections: tuple[int, ...] = (),
    experts: Experts | None = None,
    problems: Iterable[str] = (),
) -> ModelSpec:
    """ModelSpec of a hybrid. `fused` is how its DeltaNets' projections are stored, `sections` the rope's where
    config.json says none.

    Raises:
        CheckpointError: as dense_spec.
    """
    found = [*problems, *(p for key, most in SIZES.items() for p in size_problems(config, key, most))]
    k_heads, v_heads = config.get("linear_num_key_heads"), config.get("linear_num_value_heads")
    if is_positive(k_heads) and is_positive(v_heads) and v_heads % k_heads:
        found.append(f"linear_num_value_heads {v_heads} is not a multiple of linear_num_key_heads {k_heads}")
    if config.get("attention_bias"):
        found.append("attention_bias: expected false; no released checkpoint has biases and none are written")
    if config.get("mtp_use_dedicated_embeddings"):
        found.append(
            "mtp_use_dedicated_embeddings: expected false; MTP layers with embeddings of their own are not read"
        )
    kinds, wrong = _kinds(config)
    rope, other = read_rope(config, partial=PARTIAL, sections=sections)
    common = checked(config, found + wrong + other, ("intermediate_size",) if experts else ())
    delta = DeltaNet(*(config[key] for key in SIZES))
    build = _Builder(common, delta, experts, fused, stored)
    guessing = _mtp_layers(config, stored)
    return ModelSpec(
        **common,
        qkv_bias=False,
        qk_norm=True,
        rope=rope,
        tensors=tuple(build.tensors(kinds)),
        experts=experts,
        delta=delta,
        linear=tuple(layer for layer, kind in enumerate(kinds) if kind == "linear_attention"),
        gated=True,
        offset_norms=True,
        mtp=tuple(build.mtp(len(kinds), guessing)),
    )


def _kinds(config: dict[str, Any]) -> tuple[list[str], list[str]]:
    """Of each layer, and what is wrong."""
    count, kinds = config.get("num_hidden_layers"), config.get("layer_types")
    if not is_positive(count):
        return [], []  # said already
    if kinds is None:
        interval = config.get("full_attention_interval", 4)
        if not is_positive(interval):
            return [], [f"full_attention_interval: expected a positive integer, found {interval!r}"]
        return ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)], []
    known = ("linear_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != count or not all(kind in known for kind in kinds):
        return [], [f"layer_types: expected linear_attention or full_attention for each of {count} layers"]
    return kinds, []


def _mtp_layers(config: dict[str, Any], stored: Collection[str]) -> int:
    """Those of which anything is present: a number in config.json may promise layers that no file holds, or say nothing
    of some. But where it says 0, those that are present are not wanted.
    """
    if config.get(MTP) == 0:
        return 0
    numbers = [int(name.split(".")[2]) for name in stored if MTP_LAYER.match(name)]
    return max(numbers, default=-1) + 1


class _Builder:
    """The tensors of one architecture."""

    def __init__(
        self, common: dict[str, Any], delta: DeltaNet, experts: Experts | None, fused: bool, stored: Container[str]
    ) -> None:
        self._common, self._delta, self._experts, self._fused, self._stored = common, delta, experts, fused, stored

    def tensors(self, kinds: list[str]) -> Iterator[TensorSpec]:
        """In the order of a forward pass."""
        vocab_size, d_model = self._common["vocab_size"], self._common["d_model"]
        yield layers.embedding(vocab_size, d_model)
        for layer, kind in enumerate(kinds):
            yield from self._layer(f"model.layers.{layer}", layer, kind == "linear_attention")
        yield from layers.output(vocab_size, d_model, self._common["tied"])

    def mtp(self, first: int, count: int) -> Iterator[TensorSpec]:
        """Layers of attention, numbered from `first`, and what joins a token's embedding to the hidden state."""
        d_model = self._common["d_model"]
        for layer in range(count):
            yield from self._layer(f"mtp.layers.{layer}", first + layer, linear=False)
        if count:
            yield TensorSpec("mtp.fc.weight", "mtp_join", first, (d_model, 2 * d_model))
            for name, role in MTP_NORMS.items():
                yield TensorSpec(name, role, first, (d_model,))

    def _layer(self, at: str, layer: int, linear: bool) -> Iterator[TensorSpec]:
        d_model = self._common["d_model"]
        first, second = layers.norms(at, layer, d_model, "post_norm")
        yield first
        if linear:
            yield from layers.delta_net(at, layer, d_model, self._delta, self._fused)
        else:
            heads = {key: self._common[key] for key in ("d_model", "n_heads", "n_kv_heads", "head_dim")}
            yield from layers.attention(at, layer, **heads, qk_norm=True, gated=True)
        yield second
        if self._experts is None:
            yield from layers.feed_forward(at, layer, d_model, self._common["d_ff"])
        else:
            yield from layers.mixture(at, layer, d_model, self._experts, self._stored)
