"""A file is kept only if llama.cpp reads and ends text by it as the checkpoint does."""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import oracle
import pytest
from support import MERGES, SPECIALS, adds, tokenizer_json, write_checkpoint

from pipeline import artifact
from pipeline.errors import ArtifactError, TokenizerError
from pipeline.formats.gguf import engine, header
from pipeline.formats.gguf import write as writing
from pipeline.formats.gguf.metadata import metadata
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.formats.gguf.vocabulary import check_vocabulary
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hard_text import PARTS, hard_text
from pipeline.source.tokenizer import Tokenizer

HE, THE, IN, SPACE_THE, ENDOFTEXT, IM_START, IM_END = range(256, 263)
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} é{% endfor %}"

Pairs = dict[str, bytes]
Change = Callable[[Pairs, Tokenizer, int], object]


def check(source: Path, folder: Path, change: Change = lambda pairs, tokenizer, size: None) -> Path:
    """The check on a file of nothing but metadata, altered by `change`."""
    with Checkpoint(source) as checkpoint:
        spec, tokenizer, config = spec_of(checkpoint.config), Tokenizer(source), checkpoint.config
    pairs = dict(metadata(spec, tokenizer, config, SCHEMES["f32"], "name"))
    change(pairs, tokenizer, spec.vocab_size)
    path = folder / "vocabulary.gguf"
    path.write_bytes(header.pack([*pairs.items()], []))
    check_vocabulary(path, spec.vocab_size, tokenizer, config)
    return path


def other_split(name: str) -> Change:
    return lambda pairs, *_: pairs.update({"tokenizer.ggml.pre": header.text(name)})


def without_merge(at: int) -> Change:
    def change(pairs: Pairs, tokenizer: Tokenizer, size: int) -> None:
        merges = tokenizer.merges
        del merges[at]
        pairs["tokenizer.ggml.merges"] = header.texts(merges)

    return change


def swapped(a: int, b: int) -> Change:
    def change(pairs: Pairs, tokenizer: Tokenizer, size: int) -> None:
        tokens = [*tokenizer.vocabulary(size)[0]]
        tokens[a], tokens[b] = tokens[b], tokens[a]
        pairs["tokenizer.ggml.tokens"] = header.texts(tokens)

    return change


def ordinary(special: str) -> Change:
    def change(pairs: Pairs, tokenizer: Tokenizer, size: int) -> None:
        tokens, kinds = ([*part] for part in tokenizer.vocabulary(size))
        kinds[tokens.index(special)] = 1
        pairs["tokenizer.ggml.token_type"] = header.int32s(kinds)

    return change


def with_bos(pairs: Pairs, *_: object) -> None:
    pairs["tokenizer.ggml.add_bos_token"] = header.boolean(True)


DEFECTS = {
    "split-gpt-2": other_split("gpt-2"),
    "split-qwen35": other_split("qwen35"),
    "split-unknown": other_split("default"),
    "first-merge-lost": without_merge(0),
    "last-merge-lost": without_merge(-1),
    "special-ordinary": ordinary("<|im_start|>"),
    "bos-added": with_bos,
}


# The same ids


def test_a_correct_file_passes(tiny: Path, tmp_path: Path) -> None:
    check(tiny, tmp_path)


@pytest.mark.parametrize("defect", DEFECTS)
def test_a_defect_is_refused_and_shown(defect: str, tiny: Path, tmp_path: Path) -> None:
    with pytest.raises(TokenizerError) as raised:
        check(tiny, tmp_path, DEFECTS[defect])
    said = str(raised.value)
    assert said.startswith(f"{tiny}/tokenizer.json: llama.cpp reads the same text as other tokens. Behind ")
    lines = [line.split(" has ")[1].strip() for line in said.splitlines() if " has " in line]
    expected, found = lines
    assert expected != found
    assert expected[0].isdigit()


def test_a_split_that_keeps_digits_together_is_refused(tmp_path: Path) -> None:
    """Seen only where the vocabulary has such a token; Qwen's has none."""
    source = write_checkpoint(tmp_path / "c")
    (source / "tokenizer.json").write_text(json.dumps(tokenizer_json(merges=[*MERGES, ("1", "2")])))
    check(source, tmp_path)
    with pytest.raises(TokenizerError, match=r"tokenizer.json has 16 '1', 17 '2', .*\n +llama.cpp has +260 '12', "):
        check(source, tmp_path, other_split("llama-bpe"))


def test_the_first_token_that_differs_is_shown(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    with pytest.raises(TokenizerError) as raised:
        check(source, tmp_path, without_merge(MERGES.index(("i", "n"))))
    _, *lines = str(raised.value).splitlines()
    assert lines[0].startswith(f"  tokenizer.json has {IN} 'in', ")
    assert lines[1].startswith("  llama.cpp has      72 'i', 77 'n', ")


def test_the_conversion_fails_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, made = write_checkpoint(tmp_path / "c"), tmp_path / "made"

    def altered(*arguments: Any) -> list[header.Pair]:
        pairs = dict(metadata(*arguments))
        with_bos(pairs)
        return [*pairs.items()]

    artifact.convert(source, "gguf", "q8_0", made / "right")
    monkeypatch.setattr(writing, "metadata", altered)
    with pytest.raises(TokenizerError, match="reads the same text as other tokens"):
        artifact.convert(source, "gguf", "q8_0", made / "wrong")
    assert [path.name for path in made.iterdir()] == ["right"]


def test_every_token_that_the_checkpoint_adds_is_in_the_text(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    add(source, "<think>", special=False)
    ids = Tokenizer(source).encode(hard_text(Tokenizer(source))).tolist()
    for token in (ENDOFTEXT, IM_START, IM_END, 263):
        assert ids.count(token) == 5
    assert {HE, THE, IN, SPACE_THE} < set(ids)
    check(source, tmp_path)


def add(source: Path, content: str, special: bool, **flags: bool) -> None:
    raw = json.loads((source / "tokenizer.json").read_text())
    defaults = dict.fromkeys(["single_word", "lstrip", "rstrip", "normalized"], False)
    raw["added_tokens"].append(
        {"id": 260 + len(raw["added_tokens"]), "content": content, "special": special} | defaults | flags
    )
    (source / "tokenizer.json").write_text(json.dumps(raw))


@pytest.mark.parametrize("flag", ["lstrip", "rstrip", "single_word"])
def test_an_added_token_that_takes_its_surroundings_is_refused(flag: str, tmp_path: Path) -> None:
    """llama.cpp has no such flags."""
    source = write_checkpoint(tmp_path / "c")
    add(source, "<mask>", special=True, **{flag: True})
    with pytest.raises(TokenizerError, match="reads the same text as other tokens"):
        check(source, tmp_path)


def alter(source: Path, **parts: Any) -> None:
    raw = json.loads((source / "tokenizer.json").read_text())
    (source / "tokenizer.json").write_text(json.dumps(raw | parts))


def test_the_text_is_composed() -> None:
    assert [part for part in PARTS if unicodedata.normalize("NFC", part) != part] == []


def test_decomposed_text_is_a_known_limit(tmp_path: Path) -> None:
    """Qwen's tokenizer.json composes, llama.cpp does not: that alone is no reason to refuse."""
    source = write_checkpoint(tmp_path / "c")
    alter(source, normalizer={"type": "NFC"})
    path, tokenizer = check(source, tmp_path), Tokenizer(source)
    model = engine.load_model(path, vocab_only=True)
    vocab = engine.llama().llama_model_get_vocab(model)
    composed, decomposed = "caf\u00e9", "cafe\u0301"
    assert tokenizer.encode(decomposed).tolist() == tokenizer.encode(composed).tolist()
    assert engine.token_ids(vocab, composed) == tokenizer.encode(composed).tolist()
    assert engine.token_ids(vocab, decomposed) != tokenizer.encode(decomposed).tolist()
    engine.llama().llama_model_free(model)


@pytest.mark.parametrize("normalizer", ["NFD", "NFKC", "Lowercase"])
def test_another_normalizer_is_refused(normalizer: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    alter(source, normalizer={"type": normalizer})
    with pytest.raises(TokenizerError, match="reads the same text as other tokens"):
        check(source, tmp_path)


def test_a_bos_that_the_tokenizer_adds_is_added(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", config={"bos_token_id": ENDOFTEXT})
    alter(source, post_processor=adds(SPECIALS[0], ENDOFTEXT))
    path = check(source, tmp_path)
    assert oracle.field(path, "tokenizer.ggml.add_bos_token") is True


def test_another_count_of_tokens_is_refused(tmp_path: Path) -> None:
    def longer(pairs: Pairs, tokenizer: Tokenizer, size: int) -> None:
        tokens, kinds = tokenizer.vocabulary(size + 1)
        pairs["tokenizer.ggml.tokens"], pairs["tokenizer.ggml.token_type"] = header.texts(tokens), header.int32s(kinds)

    with pytest.raises(ArtifactError, match=r"llama\.cpp reads 273 tokens, expected 272"):
        check(write_checkpoint(tmp_path / "c"), tmp_path, longer)


def test_swapped_entries_are_refused(tiny: Path, tmp_path: Path) -> None:
    a, b = (Tokenizer(tiny).vocabulary(8192)[0][i] for i in (5001, 5003))
    with pytest.raises(ArtifactError) as raised:
        check(tiny, tmp_path, swapped(5001, 5003))
    assert str(raised.value).endswith(f"llama.cpp reads token 5001 as {b!r}, not {a!r}.")


# The chat template


def test_a_chat_template_that_reads_back_otherwise_is_refused(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    (source / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")
    check(source, tmp_path)
    altered = header.text(TEMPLATE.replace("im_start", "im_begin"))
    with pytest.raises(ArtifactError) as raised:
        check(source, tmp_path, lambda pairs, *_: pairs.update({"tokenizer.chat_template": altered}))
    at = TEMPLATE.index("start")
    assert f"from character {at} on: expected " in str(raised.value)
    with pytest.raises(ArtifactError, match=r"from character 0 on: .* found ''"):
        check(source, tmp_path, lambda pairs, *_: pairs.pop("tokenizer.chat_template"))


# Stop tokens


def generation(source: Path, **settings: Any) -> Path:
    (source / "generation_config.json").write_text(json.dumps(settings))
    return source


def test_every_stop_token_of_the_checkpoint_ends_a_reply(tmp_path: Path) -> None:
    """Those that llama.cpp knows by their text need no key."""
    ends = [IM_END, ENDOFTEXT, THE, IN]
    path = check(generation(write_checkpoint(tmp_path / "c"), eos_token_id=ends), tmp_path)
    ids = {name: oracle.field(path, f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")}
    assert ids == {"eos": IM_END, "eot": THE, "eom": IN}


@pytest.mark.parametrize("ends", [THE, [THE], [IM_END, THE]])
def test_a_stop_token_that_the_file_does_not_name_is_refused(ends: int | list[int], tmp_path: Path) -> None:
    source = generation(write_checkpoint(tmp_path / "c"), eos_token_id=ends)
    with pytest.raises(TokenizerError, match=f"ends a reply at {THE} 'the', but llama.cpp would go on behind it"):
        check(source, tmp_path, lambda pairs, *_: pairs.pop("tokenizer.ggml.eot_token_id"))


def test_more_stop_tokens_than_the_file_can_name_are_refused(tmp_path: Path) -> None:
    source = generation(write_checkpoint(tmp_path / "c"), eos_token_id=[IM_END, HE, THE, IN, SPACE_THE])
    with pytest.raises(TokenizerError, match=f"ends a reply at {IN} 'in', {SPACE_THE} ' the', but"):
        check(source, tmp_path)


def test_a_checkpoint_without_an_end_is_refused(tmp_path: Path) -> None:
    """llama.cpp would end replies at token 11, a comma or so."""
    source = write_checkpoint(tmp_path / "c", config={"eos_token_id": None})
    with pytest.raises(TokenizerError, match=r"no end token is named, and llama\.cpp would take id 11, ','"):
        check(source, tmp_path)
    path = check(generation(source, eos_token_id=[THE]), tmp_path)
    assert oracle.field(path, "tokenizer.ggml.eos_token_id") == THE


@pytest.mark.shared
def test_a_real_vocabulary_passes(smollm: Path, tmp_path: Path) -> None:
    check(smollm, tmp_path)
