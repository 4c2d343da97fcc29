"""The keys of a GGUF file that say which model it is of, and what llama.cpp would compute otherwise whatever they say.

Keys: src/llama-arch.cpp of llama.cpp 0c1e57098; which of them an architecture reads: src/models/qwen*.cpp.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from pipeline.errors import CheckpointError, listed
from pipeline.formats.gguf import arrange
from pipeline.formats.gguf.header import Pair, booleans, float32, int32s, text, uint32
from pipeline.models import MODEL_TYPES
from pipeline.types import DeltaNet, ModelSpec, Rope

SECTIONS = 4  # time, height, width and another that texts have at 0


def architecture(spec: ModelSpec) -> str:
    """llama.cpp's name of a model_type."""
    return spec.model_type.replace("_", "")


def pairs(spec: ModelSpec) -> list[Pair]:
    """Every key of the architecture that llama.cpp reads.

    Raises:
        CheckpointError: what it would compute otherwise than the checkpoint means, all listed.
    """
    problems = [*_problems(spec)]
    if problems:
        raise CheckpointError(
            f"config.json: llama.cpp would compute another function:\n{listed(problems)}\n"
            "The artifact would run wrong. GGUF cannot hold this checkpoint."
        )
    arch = architecture(spec)
    return [(f"{arch}.{key}", value) for key, value in _pairs(spec)]


def _pairs(spec: ModelSpec) -> Iterator[Pair]:
    guessing = len({tensor.layer for tensor in arrange.mtp(spec)})
    yield "block_count", uint32(spec.n_layers + guessing)
    yield "context_length", uint32(spec.context_length)
    yield "embedding_length", uint32(spec.d_model)
    if spec.d_ff:  # a model of experts alone may have none
        yield "feed_forward_length", uint32(spec.d_ff)
    yield "attention.head_count", uint32(spec.n_heads)
    yield "attention.head_count_kv", uint32(spec.n_kv_heads)
    yield "attention.key_length", uint32(spec.head_dim)
    yield "attention.value_length", uint32(spec.head_dim)
    yield "attention.layer_norm_rms_epsilon", float32(spec.norm_eps)
    yield from ((f"rope.{key}", value) for key, value in _rope(spec.rope))
    if spec.experts is not None:
        yield "expert_count", uint32(spec.experts.count)
        yield "expert_used_count", uint32(spec.experts.used)
        yield "expert_feed_forward_length", uint32(spec.experts.d_ff)
        if spec.experts.shared_d_ff:
            yield "expert_shared_feed_forward_length", uint32(spec.experts.shared_d_ff)
    if spec.delta is not None:
        yield from _delta(spec.delta)
        yield from _linear(spec, guessing)
    if guessing:
        yield "nextn_predict_layers", uint32(guessing)


def _delta(delta: DeltaNet) -> Iterator[Pair]:
    yield "ssm.conv_kernel", uint32(delta.conv)
    yield "ssm.state_size", uint32(delta.k_dim)
    yield "ssm.group_count", uint32(delta.k_heads)
    yield "ssm.time_step_rank", uint32(delta.v_heads)
    yield "ssm.inner_size", uint32(delta.values)


def _linear(spec: ModelSpec, guessing: int) -> Iterator[Pair]:
    """Which layers have a DeltaNet: each of them, and for readers without that key their interval where they have one.

    MTP layers have attention.
    """
    linear = [layer in spec.linear for layer in range(spec.n_layers)]
    interval = linear.index(False) + 1 if False in linear else spec.n_layers + 1
    if linear == [bool((layer + 1) % interval) for layer in range(spec.n_layers)]:
        yield "full_attention_interval", uint32(interval)
    yield "attention.recurrent_layers", booleans([*linear, *[False] * guessing])


def _rope(rope: Rope) -> Iterator[Pair]:
    """Rope keys; the attention factor is relative to YaRN's own 0.1 ln(factor) + 1, in config.json it is whole."""
    yield "freq_base", float32(rope.theta)
    if rope.dims is not None:
        yield "dimension_count", uint32(rope.dims)
    if rope.sections:
        yield "dimension_sections", int32s(_sections(rope))
    if rope.scaling is None:
        return
    yield "scaling.type", text(rope.scaling)
    yield "scaling.factor", float32(rope.factor)
    if rope.scaling == "yarn" and rope.original_context is not None:
        yield "scaling.original_context_length", uint32(rope.original_context)
    if rope.attention_factor is not None:
        yield "scaling.attn_factor", float32(rope.attention_factor / (0.1 * math.log(rope.factor) + 1))


def _sections(rope: Rope) -> list[int]:
    return [*rope.sections, *[0] * (SECTIONS - len(rope.sections))]


def _problems(spec: ModelSpec) -> Iterator[str]:
    rope, arch, reader = spec.rope, architecture(spec), MODEL_TYPES[spec.model_type].llama_cpp
    for key, value, fixed in (("beta_fast", rope.beta_fast, 32.0), ("beta_slow", rope.beta_slow, 1.0)):
        if rope.scaling is not None and value not in {None, fixed}:
            yield f"rope scaling {key} is {value}, llama.cpp takes {fixed:g} for every Qwen"
    if rope.sections and not _covered(rope):
        yield f"mrope_section {list(rope.sections)} leaves pairs of a head unrotated in llama.cpp"
    if sum(rope.sections) > spec.head_dim:
        yield f"mrope_section {list(rope.sections)} sums to more than head_dim {spec.head_dim}, which llama.cpp refuses"
    if spec.experts is not None and spec.experts.norm_topk != reader.scales_experts:
        yield f"norm_topk_prob is {spec.experts.norm_topk}, llama.cpp takes {reader.scales_experts} for {arch}"
    if reader.splits_width and spec.n_heads * spec.head_dim != spec.d_model:
        yield f"head_dim is {spec.head_dim}, llama.cpp takes hidden_size / num_attention_heads for {arch}"
    if spec.delta is not None and len(spec.linear) in {0, spec.n_layers}:  # it would end the process, or does not load
        kind = "full" if not spec.linear else "linear"
        yield f"layer_types: every layer has {kind} attention, llama.cpp runs {arch} with layers of both kinds only"
    if spec.delta is not None and spec.delta.k_dim != spec.delta.v_dim:
        yield (
            f"linear_key_head_dim is {spec.delta.k_dim} and linear_value_head_dim {spec.delta.v_dim}, "
            "llama.cpp has one size for both"
        )


def _covered(rope: Rope) -> bool:
    """Whether each pair turns with time, height or width, which are one in a text: llama.cpp gives the others the
    fourth position (ggml_mrope_cache_init in ggml/src/ggml-cpu/ops.cpp, the interleaved case).
    """
    sections, period = _sections(rope), sum(rope.sections)
    pairs = range((rope.dims or 0) // 2)
    return period > 0 and all(pair % period < 3 * sections[pair % period % 3] for pair in pairs)
