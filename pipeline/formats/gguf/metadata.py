"""The key-value part of a GGUF file: what it is, its architecture (architecture.py) and its tokenizer.

Keys: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from pipeline.errors import PipelineError, TokenizerError, gathered
from pipeline.formats.gguf import architecture
from pipeline.formats.gguf.header import Pair, boolean, int32s, text, texts, uint32
from pipeline.formats.gguf.schemes import Scheme
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import ModelSpec

DEFAULT_EOS = 11  # of llama.cpp for a byte-level BPE (llama-vocab.cpp)
QUANTIZATION_VERSION = 2  # GGML_QNT_VERSION

PRE_TOKENIZERS = {
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+|\p{N}| ?[^\s\p{L}\p{M}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen35",
}
"""llama.cpp's name of a split regex (llama-vocab.cpp). The regex identifies it: a hash of a text's ids would fail
each fine-tune.
"""

ENDS = {"<|im_end|>", "<|endoftext|>"}  # of the texts that end a reply for llama.cpp without a key, Qwen's


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


def metadata(spec: ModelSpec, tokenizer: Tokenizer, config: dict[str, Any], scheme: Scheme, name: str) -> list[Pair]:
    """Every key llama.cpp reads.

    Raises:
        TokenizerError: a vocabulary or pre-tokenizer that the file cannot carry.
        CheckpointError: an architecture that llama.cpp would not compute as it is meant.
    """
    return [
        ("general.architecture", text(architecture.architecture(spec))),
        ("general.type", text("model")),
        ("general.name", text(name)),
        ("general.file_type", uint32(scheme.ftype)),
        ("general.quantization_version", uint32(QUANTIZATION_VERSION)),
        *architecture.pairs(spec),
        *((f"tokenizer.{key}", value) for key, value in _tokenizer(spec, tokenizer, config)),
    ]


def check_metadata(spec: ModelSpec, checkpoint: Checkpoint, problems: list[PipelineError] | None = None) -> None:
    """Refuse what `metadata` refuses, all of it where there are `problems` to gather it in.

    Raises:
        TokenizerError, CheckpointError: as metadata.
    """
    with gathered(problems):
        architecture.pairs(spec)
    with gathered(problems):
        tokenizer = checkpoint.tokenizer
        with gathered(problems):
            pre_tokenizer(tokenizer)
        with gathered(problems):
            _ = tokenizer.chat_template
        with gathered(problems):
            tokens, _ = tokenizer.vocabulary(spec.vocab_size)
            [*_special(tokenizer, tokens, checkpoint.config)]


def _tokenizer(spec: ModelSpec, tokenizer: Tokenizer, config: dict[str, Any]) -> list[Pair]:
    tokens, kinds = tokenizer.vocabulary(spec.vocab_size)
    template = tokenizer.chat_template
    return [
        ("ggml.model", text("gpt2")),  # byte-level BPE
        ("ggml.pre", text(pre_tokenizer(tokenizer))),
        ("ggml.tokens", texts(tokens)),
        ("ggml.token_type", int32s(kinds)),
        ("ggml.merges", texts(tokenizer.merges)),
        *((f"ggml.{name}_token_id", uint32(value)) for name, value in _special(tokenizer, tokens, config)),
        ("ggml.add_bos_token", boolean(tokenizer.adds_bos)),  # llama.cpp would add one by default
        *([("chat_template", text(template))] if template is not None else []),
    ]


def _special(tokenizer: Tokenizer, tokens: Sequence[str], config: dict[str, Any]) -> Iterator[tuple[str, int]]:
    """Special tokens by their names in the file; ends of a reply that llama.cpp does not know by text go into the two
    keys that it has besides eos.
    """
    special, stops = tokenizer.special_ids(config), tokenizer.stop_ids(config)
    eos = next(iter(stops), None) if special.eos is None else special.eos
    if eos is None:
        raise TokenizerError(
            f"{tokenizer.folder}: no end token is named, and llama.cpp would take id {DEFAULT_EOS}, "
            f"{tokens[DEFAULT_EOS]!r}: name one as eos_token_id in generation_config.json."
        )
    others = [i for i in stops if i != eos and not (0 <= i < len(tokens) and tokens[i] in ENDS)]
    named = (("bos", special.bos), ("eos", eos), ("padding", special.pad))
    yield from ((name, value) for name, value in named if value is not None)
    yield from zip(("eot", "eom"), others, strict=False)
