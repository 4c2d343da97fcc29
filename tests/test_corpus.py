"""Text -> windows of ids."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from support import Shape, config_of, tokenizer_json

from pipeline.corpus import cut, load, read_text, save, text_path
from pipeline.errors import CorpusError
from pipeline.models import spec_of
from pipeline.paths import SAMPLE_TEXT
from pipeline.source.tokenizer import Tokenizer

SPEC = spec_of(config_of(Shape()))  # 272 ids, as support.tokenizer_json has; context up to 2048


PRINTED = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
HIDDEN = [byte for byte in range(256) if byte not in PRINTED]
BYTE_OF = {chr(byte): byte for byte in PRINTED} | {chr(256 + i): byte for i, byte in enumerate(HIDDEN)}
"""The byte of each character of a byte-level token, as GPT-2 defined it."""


@pytest.fixture
def tokenizer(tmp_path: Path) -> Tokenizer:
    """A token a byte, but for he, the, in and ' the'."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer_json(SPEC.vocab_size)))
    return Tokenizer(tmp_path)


@pytest.fixture
def text(tmp_path: Path) -> Path:
    return tmp_path / "text.txt"


# Windows


def test_windows_are_consecutive_and_share_no_token(tokenizer: Tokenizer, text: Path) -> None:
    text.write_text("0123456789" * 3 + "x")  # 31 tokens
    windows = cut("file", text, tokenizer, SPEC, 8, None)
    assert windows.ids.shape == (3, 8)
    assert windows.ids.dtype == np.int32
    ids = tokenizer.encode("0123456789" * 3 + "x")
    assert len(ids) == 31
    assert windows.ids.ravel().tolist() == ids[:24].tolist()


def test_the_first_windows_are_taken(tokenizer: Tokenizer, text: Path) -> None:
    text.write_text("0123456789" * 4)
    every, two = (cut("file", text, tokenizer, SPEC, 8, n) for n in (None, 2))
    assert every.ids.shape == (5, 8)  # 40 tokens: no tail
    np.testing.assert_array_equal(two.ids, every.ids[:2])
    np.testing.assert_array_equal(two.span_bytes, every.span_bytes[:2])


@pytest.mark.parametrize(
    ("context", "start", "scored"), [(2048, 1024, 1023), (512, 256, 255), (128, 64, 63), (7, 3, 3), (4, 2, 1)]
)
def test_the_second_half_is_scored(context: int, start: int, scored: int, tokenizer: Tokenizer, text: Path) -> None:
    text.write_text("7" * context)
    windows = cut("file", text, tokenizer, SPEC, context, 1)
    assert (windows.context, windows.start, windows.stop, windows.scored) == (context, start, context - 1, scored)


@pytest.mark.parametrize("context", [3, 1, 0, -512, 2049])
def test_a_context_that_cannot_be_scored_is_refused(context: int, tokenizer: Tokenizer, text: Path) -> None:
    text.write_text("7" * 3000)
    with pytest.raises(CorpusError, match=rf"a context of {context} tokens .* at least 4 .* at most 2048"):
        cut("file", text, tokenizer, SPEC, context, 1)


@pytest.mark.parametrize(
    ("unit", "bytes_per_token"),
    [("7", 1), ("é", 1), ("日", 1), (" the", 4), ("<|im_end|>", 10)],
)
def test_span_bytes_of_known_tokens(unit: str, bytes_per_token: int, tokenizer: Tokenizer, text: Path) -> None:
    text.write_text(unit * 96, encoding="utf-8")
    windows = cut("file", text, tokenizer, SPEC, 16, 2)
    assert windows.span_bytes.tolist() == [7 * bytes_per_token] * 2


def test_span_bytes_are_those_of_the_scored_tokens_only(tokenizer: Tokenizer, text: Path) -> None:
    text.write_text(" the" * 5 + "7" * 3)  # the targets of positions 4, 5 and 6 are ids 5, 6 and 7
    assert cut("file", text, tokenizer, SPEC, 8, 1).span_bytes.tolist() == [3]
    text.write_text(" the" * 6 + "77")
    assert cut("file", text, tokenizer, SPEC, 8, 1).span_bytes.tolist() == [4 + 2]


def test_span_bytes_are_the_utf8_length_of_the_decoded_targets(tiny: Path) -> None:
    spec = spec_of(json.loads((tiny / "config.json").read_text()))
    windows = cut("sample", SAMPLE_TEXT, Tokenizer(tiny), spec, 512, 40)
    oracle = tokenizers.Tokenizer.from_file(str(tiny / "tokenizer.json"))
    for row, found in zip(windows.ids, windows.span_bytes, strict=True):
        targets = row[257:512].tolist()
        span = bytes(BYTE_OF[sign] for i in targets for sign in oracle.id_to_token(i))
        assert found == len(span)
        assert span.decode(errors="replace") == oracle.decode(targets)  # a span may begin or end within a character
    assert windows.ids.shape == (40, 512)
    assert windows.span_bytes.dtype == np.int64


# Texts that are too short


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        (None, "has 30 tokens: 0 windows of 512. 1 windows need 512 tokens"),
        (1, "has 30 tokens: 0 windows of 512. 1 windows need 512 tokens"),
        (40, "has 30 tokens: 0 windows of 512. 40 windows need 20480 tokens"),
    ],
)
def test_a_text_shorter_than_a_window_is_refused(
    windows: int | None, message: str, tokenizer: Tokenizer, text: Path
) -> None:
    text.write_text("0123456789" * 3)
    with pytest.raises(CorpusError, match=re.escape(f"text.txt {message}")):
        cut("file", text, tokenizer, SPEC, 512, windows)


def test_fewer_windows_than_asked_are_refused(tokenizer: Tokenizer, text: Path) -> None:
    text.write_text("0123456789" * 3)
    assert cut("file", text, tokenizer, SPEC, 10, 3).ids.shape == (3, 10)
    with pytest.raises(CorpusError, match=r"has 30 tokens: 3 windows of 10\. 4 windows need 40 tokens"):
        cut("file", text, tokenizer, SPEC, 10, 4)


def test_an_empty_text_is_refused(tokenizer: Tokenizer, text: Path) -> None:
    text.write_text("")
    with pytest.raises(CorpusError, match="has 0 tokens"):
        cut("file", text, tokenizer, SPEC, 8, None)


# Bytes and line ends


@pytest.mark.parametrize(
    ("data", "offset", "byte"),
    [(b"abc\xff def", 3, "0xff"), ("日本".encode() + b"\xe9t\xe9", 6, "0xe9"), ("日".encode()[:2], 0, "0xe6")],
)
def test_a_text_that_is_not_utf8_is_refused_with_the_offset(data: bytes, offset: int, byte: str, text: Path) -> None:
    text.write_bytes(data)
    with pytest.raises(CorpusError, match=rf"text\.txt is not UTF-8: byte {offset} is {byte}"):
        read_text(text)


def test_other_line_ends_are_another_corpus(tokenizer: Tokenizer, tmp_path: Path) -> None:
    unix, dos = tmp_path / "unix.txt", tmp_path / "dos.txt"
    unix.write_bytes(b"line of text\n" * 20)
    dos.write_bytes(b"line of text\r\n" * 20)
    assert read_text(dos)[0] == "line of text\r\n" * 20
    one, other = (cut("file", path, tokenizer, SPEC, 32, 2) for path in (unix, dos))
    assert one.text_sha256 == hashlib.sha256(b"line of text\n" * 20).hexdigest()
    assert other.text_sha256 == hashlib.sha256(b"line of text\r\n" * 20).hexdigest()
    assert one.ids.tolist() != other.ids.tolist()


# Files


def test_saved_windows_load_as_they_were(tokenizer: Tokenizer, text: Path, tmp_path: Path) -> None:
    text.write_text("the 0123456789 日本語<|im_end|>" * 8, encoding="utf-8")
    windows = cut("file", text, tokenizer, SPEC, 16, None)
    save(windows, tmp_path / "corpus")
    assert {file.name for file in (tmp_path / "corpus").iterdir()} == {"ids.npy", "meta.json"}
    found = load(tmp_path / "corpus")
    assert found.name == "file"
    assert found.text_sha256 == hashlib.sha256(text.read_bytes()).hexdigest()
    assert found.tokenizer_sha256 == hashlib.sha256((tmp_path / "tokenizer.json").read_bytes()).hexdigest()
    assert (found.ids.dtype, found.span_bytes.dtype) == (np.int32, np.int64)
    np.testing.assert_array_equal(found.ids, windows.ids)
    np.testing.assert_array_equal(found.span_bytes, windows.span_bytes)


def test_a_folder_without_a_corpus_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"meta\.json cannot be read"):
        load(tmp_path)


# Names


def test_the_sample_is_the_embedded_text() -> None:
    assert text_path("sample", None) == SAMPLE_TEXT
    assert SAMPLE_TEXT.is_file()


def test_a_file_is_the_users(text: Path) -> None:
    text.write_text("x")
    assert text_path("file", text) == text


@pytest.mark.parametrize(
    ("name", "message"), [("sampel", "did you mean 'sample'"), ("poems", "known: sample, wikitext-2, file")]
)
def test_an_unknown_name_is_refused_with_a_hint(name: str, message: str) -> None:
    with pytest.raises(CorpusError, match=f"corpus '{name}' does not exist; {message}"):
        text_path(name, None)


def test_file_needs_a_path_and_sample_takes_none(text: Path) -> None:
    with pytest.raises(CorpusError, match="`file` needs a path to a UTF-8 text"):
        text_path("file", None)
    text.write_text("x")
    with pytest.raises(CorpusError, match="`sample` and `wikitext-2` take none"):
        text_path("sample", text)


def test_a_path_that_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent.txt"):
        with pytest.raises(CorpusError, match=re.escape(f"{path} is not a file")):
            text_path("file", path)
