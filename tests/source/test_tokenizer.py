"""tokenizer.json alone decides: ids, kinds of tokens, specials, split regex."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from support import QWEN2_SPLIT, SPECIALS, adds, tokenizer_json

from pipeline.errors import TokenizerError
from pipeline.formats.gguf.metadata import pre_tokenizer
from pipeline.source.tokenizer import Kind, SpecialIds, Tokenizer

# of support.tokenizer_json: 256 bytes, he, the, in, Ġthe, then the specials
THE, SPACE_THE, ENDOFTEXT, IM_START, IM_END = 257, 259, 260, 261, 262
MIXED = (
    "Plain ASCII, naïve café Ünïcode; 日本語と中文, русский.\r\n\tTabs  and   runs\u00a0of spaces 👩🏽‍🚀🇫🇷 "
    "0123456789 3.14159 don't<|im_end|>\n<|im_start|>" + "verylongword" * 40 + "\u0000 end"
)


def write(folder: Path, content: dict[str, Any] | None = None, **settings: Any) -> Tokenizer:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(json.dumps(content or tokenizer_json()))
    if settings:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return Tokenizer(folder)


def added(i: int, content: str, special: bool) -> dict[str, Any]:
    flags = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    return {"id": i, "content": content, "special": special, **flags}


# tokenizer.json alone (llama.cpp#9673)


def test_tokenizer_json_alone_is_enough(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t")
    assert [file.name for file in tokenizer.folder.iterdir()] == ["tokenizer.json"]
    assert tokenizer.encode("the the<|im_end|>").tolist() == [THE, SPACE_THE, IM_END]
    assert tokenizer.encode("").tolist() == []
    assert tokenizer.chat_template is None
    assert tokenizer.merges == ["h e", "t he", "i n", "Ġ the"]


def test_no_tokenizer_json_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json cannot be read: No such file"):
        Tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": "1.0", "model": null}'])
def test_json_that_is_no_tokenizer_is_an_error(text: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(text)
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        Tokenizer(tmp_path)


def test_truncation_saved_by_training_does_not_cut_a_text(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["truncation"] = {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0}
    assert write(tmp_path / "t", content).encode("the" + " the" * 9).tolist() == [THE] + [SPACE_THE] * 9


def test_padding_saved_by_training_adds_no_token(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["padding"] = {
        "strategy": {"Fixed": 8},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": ENDOFTEXT,
        "pad_type_id": 0,
        "pad_token": "<|endoftext|>",
    }
    assert write(tmp_path / "t", content).encode("the").tolist() == [THE]


# The pre-tokenizer by its regex (llama.cpp#9927, #22700)


def test_one_more_added_token_is_still_qwen2(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["added_tokens"].append(added(263, "<|tool|>", True))
    tokenizer = write(tmp_path / "t", content)
    assert pre_tokenizer(tokenizer) == "qwen2"
    assert tokenizer.encode("<|tool|>").tolist() == [263]


def test_another_merge_list_is_still_qwen2(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t", tokenizer_json(merges=[("o", "n"), ("a", "b")]))
    assert pre_tokenizer(tokenizer) == "qwen2"
    assert tokenizer.encode("onab").tolist() == [256, 257]


def test_the_embedded_tokenizer_is_qwen2(tiny: Path) -> None:
    assert pre_tokenizer(Tokenizer(tiny)) == "qwen2"


@pytest.mark.parametrize("regex", [QWEN2_SPLIT.replace(r"|\p{N}|", r"|\p{N}{1,3}|"), r"\s+(?!\S)|\w+"])
def test_an_unknown_regex_is_shown(regex: str, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=re.escape(regex)):
        pre_tokenizer(write(tmp_path / "t", tokenizer_json(split=regex)))


@pytest.mark.parametrize(
    "steps",
    [
        None,
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Digits", "individual_digits": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
            ],
        },
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": True},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Removed", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
            ],
        },
        {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": QWEN2_SPLIT}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": True, "use_regex": False},
            ],
        },
    ],
)
def test_another_kind_of_split_is_refused(steps: dict[str, Any] | None, tmp_path: Path) -> None:
    content = tokenizer_json()
    content["pre_tokenizer"] = steps
    with pytest.raises(TokenizerError, match="not a regex split followed by bytes"):
        pre_tokenizer(write(tmp_path / "t", content))


# More embedding rows than tokens (llama.cpp#6938, #4331)


def test_kinds_and_texts_of_every_id(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["added_tokens"].append(added(265, "<tool_call>", False))
    tokens, kinds = write(tmp_path / "t", content).vocabulary(272)
    assert len(tokens) == len(kinds) == 272
    assert kinds[:260] == [Kind.NORMAL] * 260
    assert tokens[256:260] == ["he", "the", "in", "Ġthe"]
    assert tokens[260:263] == list(SPECIALS)
    assert kinds[260:263] == [Kind.CONTROL] * 3
    assert (tokens[265], kinds[265]) == ("<tool_call>", Kind.USER_DEFINED)
    unused = [263, 264, *range(266, 272)]
    assert [i for i, kind in enumerate(kinds) if kind is Kind.UNUSED] == unused
    assert len(set(tokens)) == 272  # llama.cpp needs each token to have a text of its own


def test_an_added_token_that_does_not_say_special_is_ordinary(tmp_path: Path) -> None:
    content = tokenizer_json()
    silent = added(265, "<tool_call>", False)
    del silent["special"]
    content["added_tokens"].append(silent)
    tokens, kinds = write(tmp_path / "t", content).vocabulary(272)
    assert (tokens[265], kinds[265]) == ("<tool_call>", Kind.USER_DEFINED)
    assert kinds[260:263] == [Kind.CONTROL] * 3


def test_the_vocabulary_may_end_at_the_last_row(tmp_path: Path) -> None:
    tokens, kinds = write(tmp_path / "t").vocabulary(263)
    assert (tokens[-1], kinds[-1]) == ("<|im_end|>", Kind.CONTROL)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (262, r"'<\|im_end\|>' has id 262, but the embedding has 262 rows"),
        (259, r"'Ġthe' has id 259, but the embedding has 259 rows"),
    ],
)
def test_a_token_beyond_the_embedding_is_an_error(rows: int, message: str, tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t")
    with pytest.raises(TokenizerError, match=message):
        tokenizer.vocabulary(rows)
    with pytest.raises(TokenizerError, match=message):
        tokenizer.byte_lengths(rows)


# No BOS (llama.cpp#7898)


def test_without_a_bos_none_is_made_up(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t", bos_token=None, eos_token="<|im_end|>", add_bos_token=False)
    assert tokenizer.special_ids({"eos_token_id": 1}) == SpecialIds(bos=None, eos=IM_END, pad=None)
    assert tokenizer.encode("the").tolist() == [THE]


def test_a_bos_that_is_only_named_is_not_added(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t", bos_token="<|endoftext|>")
    assert tokenizer.special_ids({}).bos == ENDOFTEXT
    assert tokenizer.encode("the").tolist() == [THE]
    assert not tokenizer.adds_bos


def test_a_bos_that_the_tokenizer_adds_is_kept(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["post_processor"] = adds("<|endoftext|>", ENDOFTEXT)
    tokenizer = write(tmp_path / "t", content)
    assert tokenizer.encode("the").tolist() == [ENDOFTEXT, THE]
    assert tokenizer.encode("the", add_special=False).tolist() == [THE]  # of a prompt, which holds its own
    assert tokenizer.adds_bos


# Special ids


def test_special_tokens_by_text_go_before_ids_of_the_config(tmp_path: Path) -> None:
    tokenizer = write(
        tmp_path / "t",
        eos_token={"__type": "AddedToken", "content": "<|im_end|>", "special": True},
        pad_token="<|endoftext|>",
    )
    config = {"bos_token_id": 7, "eos_token_id": 1, "pad_token_id": 2}
    assert tokenizer.special_ids(config) == SpecialIds(bos=7, eos=IM_END, pad=ENDOFTEXT)


def test_a_special_token_may_be_one_of_the_vocabulary(tmp_path: Path) -> None:
    assert write(tmp_path / "t", eos_token="the").special_ids({}).eos == THE


def test_of_several_ends_the_first_is_taken(tmp_path: Path) -> None:
    found = write(tmp_path / "t").special_ids({"eos_token_id": [IM_END, ENDOFTEXT]})
    assert found == SpecialIds(bos=None, eos=IM_END, pad=None)


@pytest.mark.parametrize("eos", ["<|eot_id|>", {"content": "<|eot_id|>"}])
def test_a_special_token_that_is_no_token_is_an_error(eos: object, tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t", eos_token=eos)
    with pytest.raises(TokenizerError, match=r"eos_token '<\|eot_id\|>' is not in tokenizer\.json"):
        tokenizer.special_ids({"eos_token_id": IM_END})


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        (None, (7,)),
        ({"eos_token_id": [IM_END, ENDOFTEXT]}, (IM_END, ENDOFTEXT)),
        ({"eos_token_id": 0}, (0,)),
        ({"eos_token_id": None}, ()),
        ({}, ()),
    ],
)
def test_a_reply_ends_where_generation_config_says(
    generation: dict[str, Any] | None, expected: tuple[int, ...], tmp_path: Path
) -> None:
    """As transformers takes it: config.json only where there is no such file."""
    tokenizer = write(tmp_path / "t", eos_token="the")
    if generation is not None:
        (tmp_path / "t" / "generation_config.json").write_text(json.dumps(generation))
    assert tokenizer.stop_ids({"eos_token_id": 7}) == expected
    assert tokenizer.stop_ids({}) == (() if generation is None else expected)


# Texts of ids


def test_ids_are_written_out(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t")
    assert tokenizer.decode([THE, SPACE_THE, IM_END]) == "the the<|im_end|>"
    cafe = tokenizer.encode("caf\u00e9").tolist()
    assert tokenizer.decode(cafe) == "caf\u00e9"
    assert tokenizer.decode(cafe[:-1]) == "caf\ufffd"  # half of a letter


def test_a_sample_reaches_from_the_last_token_down(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t")
    assert tokenizer.sample(1) == [" the"]
    assert tokenizer.sample(130)[:2] == [" the", "the"]  # every second
    every = tokenizer.sample(1000)
    assert every[:4] == [" the", "in", "the", "he"]
    assert len(every) == 4 + 128  # a byte above 127 is no text alone


# Bytes


def test_lengths_add_up_to_the_bytes_of_a_text(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["added_tokens"].append(added(263, "<日本>", False))
    tokenizer = write(tmp_path / "t", content)
    text = MIXED + "<日本>"
    ids = tokenizer.encode(text)
    assert {IM_END, IM_START, 263} < set(ids.tolist())
    assert tokenizer.byte_lengths(272)[ids].sum() == len(text.encode())


def test_lengths_of_the_embedded_tokenizer_add_up_to_the_bytes_of_a_text(tiny: Path) -> None:
    tokenizer = Tokenizer(tiny)
    assert tokenizer.byte_lengths(8192)[tokenizer.encode(MIXED)].sum() == len(MIXED.encode())


def test_a_length_is_in_bytes_not_characters(tmp_path: Path) -> None:
    lengths = write(tmp_path / "t").byte_lengths(272)
    assert lengths[:256].tolist() == [1] * 256
    assert lengths[256:263].tolist() == [2, 3, 2, 4, 13, 12, 10]


# Merges and templates


def test_merges_are_read_in_both_spellings(tmp_path: Path) -> None:
    pairs = tokenizer_json()
    spaced = tokenizer_json()
    spaced["model"]["merges"] = ["h e", "t he", "i n", "Ġ the"]
    assert pairs["model"]["merges"][0] == ["h", "e"]
    new, old = write(tmp_path / "new", pairs), write(tmp_path / "old", spaced)
    assert new.merges == old.merges == ["h e", "t he", "i n", "Ġ the"]
    assert new.encode("in the").tolist() == old.encode("in the").tolist() == [258, SPACE_THE]


def test_a_chat_template_as_text(tmp_path: Path) -> None:
    assert write(tmp_path / "t", chat_template="{{ messages }}").chat_template == "{{ messages }}"


def test_of_several_chat_templates_the_default_is_taken(tmp_path: Path) -> None:
    several = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "chat"}]
    assert write(tmp_path / "t", chat_template=several).chat_template == "chat"
    assert write(tmp_path / "u", chat_template=several[:1]).chat_template is None


def test_a_chat_template_in_its_own_file_goes_first(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t", chat_template="old")
    (tmp_path / "t" / "chat_template.jinja").write_text("{# é #}new", encoding="utf-8")
    assert tokenizer.chat_template == "{# é #}new"


def test_a_chat_template_that_is_not_utf8_is_refused(tmp_path: Path) -> None:
    tokenizer = write(tmp_path / "t")
    (tmp_path / "t" / "chat_template.jinja").write_bytes(b"{{ caf\xe9 }}")
    with pytest.raises(TokenizerError, match=r"chat_template\.jinja is not UTF-8 at byte 6\. Fetch it again"):
        _ = tokenizer.chat_template


# Other tokenizers


def test_what_the_library_cannot_read_is_refused(tmp_path: Path) -> None:
    content = tokenizer_json()
    content["normalizer"] = {"type": "Unheard"}
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: tokenizers cannot read it \(.*\)\. Fetch it again"):
        write(tmp_path / "t", content).encode("the")


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram", "WordLevel"])
def test_another_kind_of_tokenizer_is_refused(kind: str, tmp_path: Path) -> None:
    content = tokenizer_json()
    content["model"]["type"] = kind
    with pytest.raises(TokenizerError, match=f"a byte-level BPE is expected, found {kind}"):
        write(tmp_path / "t", content)


@pytest.mark.parametrize("decoder", [None, {"type": "Metaspace"}, {"type": "Sequence", "decoders": []}])
def test_a_bpe_that_is_not_of_bytes_is_refused(decoder: dict[str, Any] | None, tmp_path: Path) -> None:
    content = tokenizer_json()
    content["decoder"] = decoder
    with pytest.raises(TokenizerError, match="a byte-level BPE is expected"):
        write(tmp_path / "t", content)
