"""The tokenizer of a checkpoint, from tokenizer.json alone: vocabulary, ids of a text, special tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import TokenizerError
from pipeline.files import read_object, sha256


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
        TokenizerError: no tokenizer.json, or another kind of tokenizer.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.path = folder / "tokenizer.json"
        self.json: dict[str, Any] = read_object(self.path, TokenizerError)
        self._settings: dict[str, Any] = self._side("tokenizer_config.json")
        match self.json:
            case {"model": {"vocab": dict(), "merges": list(), **model}, "decoder": {"type": "ByteLevel"}}:
                kind = model.get("type", "BPE")
            case _:
                kind = "another kind of tokenizer"
        if kind != "BPE":
            raise TokenizerError(f"{self.path}: a byte-level BPE is expected, found {kind}. Qwen checkpoints have one.")

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
        steps = self.json.get("pre_tokenizer") or {}
        steps = steps.get("pretokenizers", [steps])
        match steps:
            case [
                {"type": "Split", "pattern": {"Regex": str(regex)}, "behavior": "Isolated"},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ] if not steps[0].get("invert"):
                return regex
        raise TokenizerError(f"{self.path}: the pre-tokenizer is not a regex split followed by bytes: {steps!r}.")

    def vocabulary(self, size: int) -> tuple[list[str], list[Kind]]:
        """Text and kind of each id in [0, size).

        Ids without a token, as Qwen's embedding has behind its vocabulary, are UNUSED. Special tokens keep their
        text.

        Raises:
            TokenizerError: a token's id is not below `size`.
        """
        tokens = [f"[PAD{i}]" for i in range(size)]
        kinds = [Kind.UNUSED] * size
        for token, i in self.json["model"]["vocab"].items():
            self._check(token, i, size)
            tokens[i], kinds[i] = token, Kind.NORMAL
        for added in self.json.get("added_tokens") or []:
            self._check(added["content"], added["id"], size)
            tokens[added["id"]] = added["content"]
            kinds[added["id"]] = Kind.CONTROL if added.get("special") else Kind.USER_DEFINED
        return tokens, kinds

    def _check(self, token: str, i: int, size: int) -> None:
        if not 0 <= i < size:
            raise TokenizerError(
                f"{self.path}: token {token!r} has id {i}, but the embedding has {size} rows. "
                "The tokenizer belongs to another checkpoint, or the embedding was not resized."
            )

    def byte_lengths(self, size: int) -> NDArray[np.int64]:
        """UTF-8 bytes that each id stands for, int64 [size]: a byte-level token has one character per byte."""
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
            tokenizer = tokenizers.Tokenizer.from_file(str(self.path))
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
        """The default chat template, from chat_template.jinja or tokenizer_config.json."""
        file = self.folder / "chat_template.jinja"
        if file.exists():
            try:
                return file.read_text(encoding="utf-8")
            except UnicodeDecodeError as error:
                raise TokenizerError(f"{file} is not UTF-8 at byte {error.start}. Fetch it again.") from error
        template = self._settings.get("chat_template")
        if isinstance(template, list):  # several, by name
            return next((entry["template"] for entry in template if entry["name"] == "default"), None)
        return template

    def special_ids(self, config: dict[str, Any]) -> SpecialIds:
        """bos, eos and pad: tokenizer_config.json by name, else config.json by id (the first of a list)."""
        return SpecialIds(*(self._special(name, config) for name in ("bos", "eos", "pad")))

    def stop_ids(self, config: dict[str, Any]) -> tuple[int, ...]:
        """Where a reply of transformers ends: generation_config.json says, config.json where there is no such file."""
        given = self._generation if self._generation is not None else config
        value = given.get("eos_token_id")
        return tuple(value) if isinstance(value, list) else () if value is None else (int(value),)

    @cached_property
    def _generation(self) -> dict[str, Any] | None:
        path = self.folder / "generation_config.json"
        return read_object(path, TokenizerError) if path.exists() else None

    def _special(self, name: str, config: dict[str, Any]) -> int | None:
        token = self._settings.get(f"{name}_token")
        content = token.get("content") if isinstance(token, dict) else token
        if content is not None:
            ids = {added["content"]: added["id"] for added in self.json.get("added_tokens") or []}
            found = ids.get(content, self.json["model"]["vocab"].get(content))
            if found is None:
                raise TokenizerError(
                    f"{self.folder}/tokenizer_config.json: {name}_token {content!r} is not in tokenizer.json. "
                    "The two files belong to different checkpoints."
                )
            return int(found)
        value = config.get(f"{name}_token_id")
        value = value[0] if isinstance(value, list) else value
        return None if value is None else int(value)

    def _side(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        return read_object(path, TokenizerError) if path.exists() else {}
