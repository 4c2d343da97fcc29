"""The key-value part of a GGUF file: architecture, rope, tokenizer.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md, written through gguf-py.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from pipeline.errors import CheckpointError, TokenizerError
from pipeline.formats.gguf.schemes import Scheme
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import ModelSpec, Rope

if TYPE_CHECKING:
    from gguf import GGUFWriter

QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION

PRE_TOKENIZERS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
"""llama.cpp's name of a split regex (llama-vocab.cpp). The regex identifies it: a hash of a text's ids would fail
each fine-tune.
"""


def pre_tokenizer(tokenizer: Tokenizer) -> str:
    """llama.cpp's name of the tokenizer's split.

    Raises:
        TokenizerError: an unknown regex, shown.
    """
    name = PRE_TOKENIZERS.get(tokenizer.split)
    if name is None:
        raise TokenizerError(
            f"{tokenizer.path}: the pre-tokenizer's regex is none that llama.cpp is known to have:\n"
            f"  {tokenizer.split}\n"
            f"Known: {', '.join(PRE_TOKENIZERS.values())}. With another split the artifact would read text differently."
        )
    return name


def add_metadata(
    writer: GGUFWriter, spec: ModelSpec, tokenizer: Tokenizer, config: dict[str, Any], scheme: Scheme, name: str
) -> None:
    """Every key llama.cpp reads for a dense Qwen."""
    writer.add_type("model")
    writer.add_name(name)
    writer.add_file_type(scheme.ftype)
    writer.add_quantization_version(QUANTIZATION_VERSION)
    writer.add_block_count(spec.n_layers)
    writer.add_context_length(spec.context_length)
    writer.add_embedding_length(spec.d_model)
    writer.add_feed_forward_length(spec.d_ff)
    writer.add_head_count(spec.n_heads)
    writer.add_head_count_kv(spec.n_kv_heads)
    writer.add_key_length(spec.head_dim)
    writer.add_value_length(spec.head_dim)
    writer.add_layer_norm_rms_eps(spec.norm_eps)
    _add_rope(writer, spec.rope)
    _add_tokenizer(writer, spec, tokenizer, config)


def _add_rope(writer: GGUFWriter, rope: Rope) -> None:
    """Rope keys; the file's attention factor is relative to YaRN's own 0.1 ln(factor) + 1, config.json's is the
    whole.

    Raises:
        CheckpointError: betas that llama.cpp would not read for a Qwen.
    """
    writer.add_rope_freq_base(rope.theta)
    if rope.scaling is None:
        return
    from gguf import RopeScalingType

    for key, value, fixed in (("beta_fast", rope.beta_fast, 32.0), ("beta_slow", rope.beta_slow, 1.0)):
        if value not in {None, fixed}:
            raise CheckpointError(
                f"config.json: rope scaling {key} is {value}, but llama.cpp takes {fixed:g} for every Qwen: "
                "the artifact would run wrong. GGUF cannot hold this checkpoint."
            )
    writer.add_rope_scaling_type(RopeScalingType(rope.scaling))
    writer.add_rope_scaling_factor(rope.factor)
    if rope.scaling == "yarn" and rope.original_context is not None:
        writer.add_rope_scaling_orig_ctx_len(rope.original_context)
    if rope.attention_factor is not None:
        writer.add_rope_scaling_attn_factors(rope.attention_factor / (0.1 * math.log(rope.factor) + 1))


def _add_tokenizer(writer: GGUFWriter, spec: ModelSpec, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    from gguf import GGUFValueType, Keys

    def add_array(key: str, values: list[Any], kind: GGUFValueType) -> None:
        """As the writer's own methods do, but without its asking each of 150,000 values for its type."""
        writer.add_key_value(key, values, GGUFValueType.ARRAY, sub_type=kind)

    tokens, kinds = tokenizer.vocabulary(spec.vocab_size)
    writer.add_tokenizer_model("gpt2")  # byte-level BPE
    writer.add_tokenizer_pre(pre_tokenizer(tokenizer))
    add_array(Keys.Tokenizer.LIST, tokens, GGUFValueType.STRING)
    add_array(Keys.Tokenizer.TOKEN_TYPE, [int(kind) for kind in kinds], GGUFValueType.INT32)
    add_array(Keys.Tokenizer.MERGES, tokenizer.merges, GGUFValueType.STRING)
    special = tokenizer.special_ids(config)
    for add, value in (
        (writer.add_bos_token_id, special.bos),
        (writer.add_eos_token_id, special.eos),
        (writer.add_pad_token_id, special.pad),
    ):
        if value is not None:
            add(value)
    writer.add_add_bos_token(False)  # Qwen has none; llama.cpp would add one by default
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template)
