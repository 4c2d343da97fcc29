"""The tokenizer of a checkpoint, from tokenizer.json alone: vocabulary, ids of a text, special tokens."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TokenizerError, listed
from pipeline.files import read_object, reading, sha256

SHOWN = 5  # problems of a file: a broken one may have as many as tokens


class Kind(IntEnum):
    """What a token is; the values are GGUF's token types."""

    NORMAL = 1
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5


@dataclass(frozen=True)
class SpecialIds:
    bos: int | None
    eos: int | None
    pad: int | None


class Tokenizer:
    """Byte-level BPE as Qwen has it.

    Raises:
        TokenizerError: no tokenizer.json, another kind of tokenizer, or one that contradicts itself.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tokenizer.json"
        self.json: dict[str, Any] = read_object(self.path, TokenizerError)
        self._settings: dict[str, Any] = self._side("tokenizer_config.json")
        self._vocabularies: dict[int, tuple[list[str], list[Kind]]] = {}
        match self.json:
            case {"model": {"vocab": dict(), "merges": list(), **model}, "decoder": {"type": "ByteLevel"}}:
                kind = model.get("type", "BPE")
            case _:
                kind = "another kind of tokenizer"
        if kind != "BPE":
            raise TokenizerError(f"{self.path}: a byte-level BPE is expected, found {kind}. Qwen checkpoints have one.")
        if problems := [*_problems(self.json)]:
            raise TokenizerError(
                f"{self.path} is broken:\n{listed(problems[:SHOWN])}\nFetch it from the checkpoint's own repository."
            )

    @cached_property
    def sha256(self) -> str:
        return sha256(self.path)

    @property
    def merges(self) -> list[str]:
        """'left right' in order of rank; newer files write pairs, older ones this."""
        return [merge if isinstance(merge, str) else " ".join(merge) for merge in self.json["model"]["merges"]]

    @property
    def split(self) -> str:
        """The regex by which text is split before BPE.

        Raises:
            TokenizerError: the pre-tokenizer is not one isolating split by a regex, then bytes.
        """
        steps = self.json.get("pre_tokenizer")
        steps = steps.get("pretokenizers", [steps]) if isinstance(steps, dict) else [steps]
        match steps:
            case [
                {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ] if not steps[0].get("invert"):
                return regex
        raise TokenizerError(
            f"{self.path}: the pre-tokenizer is not a regex split followed by bytes: {steps!r}. "
            "Only Qwen's kind is read: fetch the checkpoint's own tokenizer.json."
        )

    def vocabulary(self, size: int) -> tuple[list[str], list[Kind]]:
        """Text and kind of each id in [0, size); not to be changed, since it is made once.

        Ids without a token, as Qwen's embedding has behind its vocabulary, are UNUSED. Special tokens keep their
        text.

        Raises:
            TokenizerError: a token's id is not below `size`, or two tokens share an id or a text.
        """
        if size not in self._vocabularies:
            self._vocabularies[size] = self._vocabulary(size)
        return self._vocabularies[size]

    def differing(self, found: Sequence[str], size: int) -> list[str]:
        """Which of the tokens that others `found` are not this vocabulary's; what pads the embedding may differ.

        Raises:
            TokenizerError: as vocabulary.
        """
        return [
            f"token {i}: expected {expected!r}, found {token!r}"
            for i, (expected, kind, token) in enumerate(zip(*self.vocabulary(size), found, strict=False))
            if kind is not Kind.UNUSED and token != expected
        ]

    def _vocabulary(self, size: int) -> tuple[list[str], list[Kind]]:
        tokens = [f"[PAD{i}]" for i in range(size)]
        kinds = [Kind.UNUSED] * size
        for token, i in self.json["model"]["vocab"].items():
            self._check(token, i, size)
            tokens[i], kinds[i] = token, Kind.NORMAL
        for added in self.json.get("added_tokens") or []:
            i, text = added["id"], added["content"]
            self._check(text, i, size)
            if kinds[i] is not Kind.UNUSED and tokens[i] != text:
                self._twice(f"id {i} is that of {tokens[i]!r} and of {text!r}")
            tokens[i], kinds[i] = text, Kind.CONTROL if added.get("special") else Kind.USER_DEFINED
        owners = {text: i for i, text in enumerate(tokens)}
        if len(owners) < size:  # llama.cpp would abort the process
            i, text = next((i, text) for i, text in enumerate(tokens) if owners[text] != i)
            self._twice(f"token {text!r} has two ids, {i} and {owners[text]}")
        return tokens, kinds

    def _twice(self, what: str) -> NoReturn:
        raise TokenizerError(f"{self.path}: {what}. Each needs its own: fetch it from the checkpoint's own repository.")

    def _check(self, token: str, i: int, size: int) -> None:
        if not 0 <= i < size:
            raise TokenizerError(
                f"{self.path}: token {token!r} has id {i}, but the embedding has {size} rows. "
                "The tokenizer belongs to another checkpoint, or the embedding was not resized."
            )

    def byte_lengths(self, size: int) -> NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, int64 [size]: a byte-level token has one character per byte.

        Raises:
            TokenizerError: as vocabulary.
        """
        tokens, kinds = self.vocabulary(size)
        return np.array(
            [
                len(token) if kind is Kind.NORMAL else len(token.encode())
                for token, kind in zip(tokens, kinds, strict=True)
            ],
            dtype=np.int64,
        )

    @cached_property
    def _library(self) -> Any:
        import tokenizers

        try:
            tokenizer = tokenizers.Tokenizer.from_buffer(self.path.read_bytes())
        except Exception as error:  # the library has no class of its own
            raise TokenizerError(f"{self.path}: tokenizers cannot read it ({error}). Fetch it again.") from error
        tokenizer.no_truncation()  # a training run may have saved either
        tokenizer.no_padding()
        return tokenizer

    def encode(self, text: str, add_special: bool = True) -> NDArray[np.int32]:
        """Ids int32 [tokens] of a text, special tokens in it recognised; BOS only where the tokenizer adds one, and
        never without `add_special`: a rendered chat template holds its own.
        """
        return np.array(self._library.encode(text, add_special_tokens=add_special).ids, dtype=np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out; bytes that are no UTF-8 become U+FFFD."""
        return str(self._library.decode([*ids], skip_special_tokens=False))

    def sample(self, count: int) -> list[str]:
        """Texts of at most `count` tokens, evenly spaced from the last; those that are no UTF-8 alone are left out."""
        size = len(self.json["model"]["vocab"])
        ids = range(size - 1, -1, -max(1, -(-size // count)))
        texts = self._library.decode_batch([[i] for i in ids], skip_special_tokens=False)
        return [text for text in texts if "\ufffd" not in text]

    @property
    def adds_bos(self) -> bool:
        """Whether a text gets a token before its own."""
        return bool(self.json.get("post_processor")) and self.encode("").size > 0

    @property
    def added_tokens(self) -> list[str]:
        """Tokens that are taken out of a text before it is split, special or not."""
        return [added["content"] for added in self.json.get("added_tokens") or []]

    @property
    def chat_template(self) -> str | None:
        """The default chat template, from chat_template.jinja or tokenizer_config.json.

        Raises:
            TokenizerError: a file that is no UTF-8, or a template that is no text.
        """
        file = self.folder / "chat_template.jinja"
        if file.exists():
            try:
                with reading(file, TokenizerError):
                    return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{file} is not UTF-8 at byte {error.start}. Fetch it again.") from error
        match self._settings.get("chat_template"):
            case None | str() as template if _encodable(template or ""):
                return template
            case list(several) if all(_named_template(entry) for entry in several):
                return next((entry["template"] for entry in several if entry["name"] == "default"), None)
            case other:
                raise TokenizerError(
                    f"{self.folder}/tokenizer_config.json: chat_template must be text, or a list of objects with name "
                    f"and template, found {str(other)[:80]}. Fetch it again."
                )

    def special_ids(self, config: dict[str, Any]) -> SpecialIds:
        """bos, eos and pad: tokenizer_config.json by name, else config.json by id (the first of a list)."""
        return SpecialIds(*(self._special(name, config) for name in ("bos", "eos", "pad")))

    def stop_ids(self, config: dict[str, Any]) -> tuple[int, ...]:
        """Where a reply of transformers ends: generation_config.json says, config.json where there is no such file.

        Raises:
            TokenizerError: something else than ids.
        """
        given, file = (config, "config") if self.generation is None else (self.generation, "generation_config")
        value = _id_of("eos", given)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if wrong := [i for i in ids if not _is_id(i)]:
            raise TokenizerError(
                f"{self.folder}/{file}.json: eos_token_id must be an id, a list of them or null, found {wrong[0]!r}. "
                "Fetch it again."
            )
        return tuple(ids)

    @cached_property
    def generation(self) -> dict[str, Any] | None:
        """generation_config.json; None where there is no such file.

        Raises:
            TokenizerError: the file is broken.
        """
        path = self.folder / "generation_config.json"
        return read_object(path, TokenizerError) if path.exists() else None

    def _special(self, name: str, config: dict[str, Any]) -> int | None:
        token = self._settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None:
            ids = {added["content"]: added["id"] for added in self.json.get("added_tokens") or []}
            text = content if isinstance(content, str) else None  # anything else is no token
            found = ids.get(text, self.json["model"]["vocab"].get(text))
            if found is None:
                raise TokenizerError(
                    f"{self.folder}/tokenizer_config.json: {name}_token {content!r} is not in tokenizer.json. "
                    "The two files belong to different checkpoints."
                )
            return int(found)
        value = _id_of(name, config)
        value = next(iter(value), None) if isinstance(value, list) else value
        if value is None:
            return None
        size = config.get("vocab_size") or (config.get("text_config") or {}).get("vocab_size", math.inf)
        if not _is_id(value) or value >= size:
            raise TokenizerError(
                f"{self.folder}/config.json: {name}_token_id must be an id below the vocab_size of {size}, found "
                f"{value!r}. Correct it, or set it to null."
            )
        return int(value)

    def _side(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_object(path, TokenizerError) if path.exists() else {}


def _problems(tokenizer: dict[str, Any]) -> Iterator[str]:
    """What contradicts itself in the parts that are read here."""
    vocab, merges, added = (
        *(tokenizer["model"][key] for key in ("vocab", "merges")),
        tokenizer.get("added_tokens") or [],
    )
    if not {type(i) for i in vocab.values()} <= {int} or min(vocab.values(), default=0) < 0:
        wrong = [f"{token!r}: {i!r}" for token, i in vocab.items() if not _is_id(i)]
        yield from (f"model.vocab gives a token something else than an id: {entry}" for entry in wrong)
    elif len(set(vocab.values())) < len(vocab):
        owners: dict[int, str] = {}
        for token, i in vocab.items():
            if owners.setdefault(i, token) != token:
                yield f"model.vocab gives the id {i} to two tokens, {owners[i]!r} and {token!r}"
    for merge in merges:
        parts = merge.split(" ") if isinstance(merge, str) else merge
        if not (type(parts) is list and len(parts) == 2 and type(parts[0]) is type(parts[1]) is str):
            yield f"model.merges: expected two tokens, found {merge!r}"
        elif not (parts[0] in vocab and parts[1] in vocab and parts[0] + parts[1] in vocab):  # 150,000 of them
            absent = [text for text in (*parts, "".join(parts)) if text not in vocab]
            yield f"model.merges: {merge!r} needs {absent[0]!r}, which is not in model.vocab"
    if not _encodable("".join(vocab)):
        yield "model.vocab has a token with half a character, a lone surrogate"
    if not isinstance(added, list):
        yield f"added_tokens: expected a list, found {str(added)[:80]}"
        return
    for entry in added:
        match entry:
            case {"content": str(content), "id": i} if _is_id(i) and _encodable(content):
                continue
        yield f"added_tokens: expected an object with content and id, found {str(entry)[:80]}"


def _id_of(name: str, config: dict[str, Any]) -> Any:
    """What a config.json says of a special token; of a model that reads images as well, its text part may say it."""
    key = f"{name}_token_id"
    own = config.get("text_config")
    return own.get(key) if config.get(key) is None and isinstance(own, dict) else config.get(key)


def _is_id(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _encodable(text: str) -> bool:
    """Whether it has a UTF-8 form: JSON may hold half a surrogate pair."""
    return text.encode(errors="ignore").decode() == text


def _named_template(entry: object) -> bool:
    match entry:
        case {"name": str(), "template": str(template)}:
            return _encodable(template)
    return False
