"""The vocabulary of a written file, opened by llama.cpp without weights: it reads and ends text as the checkpoint does.

Perplexity sees none of this, since every runtime scores the same ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError, TokenizerError, common, difference
from pipeline.formats.gguf import engine
from pipeline.source.hard_text import hard_text
from pipeline.source.tokenizer import Tokenizer

CHECKED = 8192  # tokens whose text is compared, evenly spaced
SHOWN = 8  # tokens behind the first that differs


def check_vocabulary(path: Path, tokens: int, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    """llama.cpp reads the tokenizer's `tokens`, gives a hard text the ids that it does, has the checkpoint's chat
    template and ends a reply where the checkpoint says.

    Raises:
        ArtifactError: other tokens, another template.
        TokenizerError: other ids, or a stop token that llama.cpp would go on behind.
    """
    cpp = engine.llama()
    text = hard_text(tokenizer)
    expected = tokenizer.encode(text).tolist()
    model = engine.load_model(path, vocab_only=True)
    try:
        vocab = cpp.llama_model_get_vocab(model)
        _check_tokens(path, vocab, tokenizer.vocabulary(tokens)[0])
        _check_ids(tokenizer, expected, engine.token_ids(vocab, text))
        _check_template(path, cpp.llama_model_chat_template(model, None), tokenizer.chat_template)
        _check_stops(path, vocab, tokenizer, config)
    finally:
        cpp.llama_model_free(model)


def _check_tokens(path: Path, vocab: Any, expected: Sequence[str]) -> None:
    cpp = engine.llama()
    count = cpp.llama_vocab_n_tokens(vocab)
    if count != len(expected):
        raise ArtifactError(f"{path}: llama.cpp reads {count} tokens, expected {len(expected)}.")
    for i in range(0, count, max(1, count // CHECKED)):
        text = expected[i]
        if (found := cpp.llama_vocab_get_text(vocab, i)) != text.encode():
            raise ArtifactError(
                f"{path}: llama.cpp reads token {i} as {found.decode(errors='replace')!r}, not {text!r}."
            )


def _check_ids(tokenizer: Tokenizer, expected: Sequence[int], found: Sequence[int]) -> None:
    if expected == found:
        return
    at = common(expected, found)
    raise TokenizerError(
        f"{tokenizer.path}: llama.cpp reads the same text as other tokens. "
        f"Behind {tokenizer.decode(expected[max(0, at - SHOWN) : at])!r}\n"
        f"  tokenizer.json has {_shown(tokenizer, expected[at:])}\n"
        f"  llama.cpp has      {_shown(tokenizer, found[at:])}\n"
        "The artifact would answer to other tokens than the model was trained on, so none is kept. "
        "Is the tokenizer altered? If not, please report this."
    )


def _shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """'12 "the", 7 "x", …'."""
    shown = [f"{i} {tokenizer.decode([i])!r}" for i in ids[:SHOWN]]
    return ", ".join([*shown, "…"] if len(ids) > SHOWN else shown) or "nothing more"


def _check_template(path: Path, found: bytes | None, expected: str | None) -> None:
    read = None if found is None else found.decode(errors="replace")
    if read != expected:
        where = difference(expected or "", read or "")
        raise ArtifactError(f"{path}: the chat template reads back otherwise than it was written, {where}.")


def _check_stops(path: Path, vocab: Any, tokenizer: Tokenizer, config: dict[str, Any]) -> None:
    cpp = engine.llama()
    stops = tokenizer.stop_ids(config)
    ignored = [i for i in stops if not cpp.llama_vocab_is_eog(vocab, i)]
    if ignored:
        raise TokenizerError(
            f"{tokenizer.folder}: the checkpoint ends a reply at {_shown(tokenizer, ignored)}, but llama.cpp would go "
            "on behind it: GGUF has room for three such tokens that are not known by their text. "
            "Check eos_token_id in generation_config.json."
        )
