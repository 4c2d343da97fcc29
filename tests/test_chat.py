"""The short chat: prompts and replies of an artifact against transformers', and what makes one broken by name."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, adds, tokenizer_json, write_checkpoint

from pipeline import artifact
from pipeline import chat as chats
from pipeline.chat import Chat, compare, end_problem, load_chat, prompt_problem
from pipeline.errors import MeasurementError, TokenizerError
from pipeline.evaluation import evaluate
from pipeline.files import write_json
from pipeline.formats.gguf import header
from pipeline.formats.gguf import write as writing
from pipeline.formats.gguf.metadata import metadata
from pipeline.formats.gguf.run import GgufRuntime
from pipeline.runtimes import Messages, Prompt, Reply
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference, load_reference, reference_chat, write_reference
from pipeline.torch_runtime import of_checkpoint
from pipeline.types import Scores, Windows

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
RENDERED = "<|im_start|>user\nRepeat after me: one, two, three.<|im_end|>\n<|im_start|>assistant\n"
SETTINGS: dict[str, Any] = {"threads": 2, "flash_attention": False, "kv_type": "f32"}
IM_END = 262


def chatty(folder: Path, template: str = TEMPLATE, **generation: Any) -> Path:
    """A random checkpoint with a chat template; `generation` is its generation_config.json."""
    write_checkpoint(folder, Shape("qwen3", tied=False), "F32", seed=1)
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    if generation:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


def generated(folder: Path, prompt: str, limit: int = chats.LIMIT) -> tuple[list[int], float]:
    """What transformers' own generate says, greedily, and the smallest margin of a token over the next best."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([Tokenizer(folder).encode(prompt).tolist()])
    with torch.inference_mode():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=limit)
        best = model(out).logits[0, ids.shape[1] - 1 : -1].topk(2).values
    return out[0, ids.shape[1] :].tolist(), float((best[:, 0] - best[:, 1]).min())


def converted(source: Path, scheme: str = "f32") -> Path:
    out = source.parent / f"{source.name}-{scheme}"
    artifact.convert(source, "gguf", scheme, out)
    return out


@contextmanager
def opened(folder: Path, context: int = 256, **settings: Any) -> Iterator[GgufRuntime]:
    with closing(GgufRuntime(folder / "model.gguf", context=context, **SETTINGS | settings)) as runtime:
        yield runtime


@pytest.fixture(scope="module")
def endless(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose reply does not end within the limit."""
    return chatty(tmp_path_factory.mktemp("endless") / "source")


@pytest.fixture(scope="module")
def said(endless: Path) -> list[int]:
    """What it says."""
    ids, margin = generated(endless, RENDERED)
    assert margin > 1e-3  # f32 differs by 3e-5: no near tie
    assert len(ids) == chats.LIMIT
    assert len(set(ids)) > 5
    return ids


@pytest.fixture(scope="module")
def end(said: list[int]) -> int:
    """A token that first comes late in the reply."""
    return max(set(said[:-1]), key=said.index)


@pytest.fixture(scope="module")
def ending(endless: Path, end: int) -> Path:
    """The same checkpoint, which ends replies at that token."""
    return chatty(endless.parent / "ending", eos_token_id=[IM_END, end])


def reference(source: Path, windows: Windows) -> Reference:
    folder = source.parent / f"{source.name}-reference"
    with Checkpoint(source) as checkpoint:
        if not folder.exists():
            write_reference(checkpoint, checkpoint.identity(), windows, folder)
        return load_reference(folder, checkpoint)


def scored(made: Path, windows: Windows, kept: Reference) -> tuple[dict[str, Any], Scores]:
    return evaluate(made, artifact.load(made), windows, kept, SETTINGS)


@pytest.fixture(scope="module")
def windows() -> Windows:
    ids = np.random.default_rng(0).integers(0, 272, (2, 40)).astype(np.int32)
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(2, 30))


# The reply is transformers'


@pytest.mark.parametrize("stops", [False, True])
def test_replies_are_those_of_transformers(stops: bool, endless: Path, ending: Path, said: list[int], end: int) -> None:
    source = ending if stops else endless
    expected = said[: said.index(end) + 1] if stops else said
    assert generated(source, RENDERED)[0] == expected
    prompt = Tokenizer(source).encode(RENDERED).tolist()
    with Checkpoint(source) as checkpoint:
        chat = reference_chat(checkpoint, of_checkpoint(checkpoint))
    with opened(converted(source)) as runtime:
        found = runtime.prompt(chats.MESSAGES)
        reply = runtime.reply(prompt, chats.LIMIT)
    assert chat is not None
    assert chat.prompt == found == Prompt(RENDERED, tuple(prompt))
    assert chat.reply.ids == reply.ids == tuple(expected)
    tokenizer = Tokenizer(source)
    assert chat.stop_ids == ((IM_END, end) if stops else (IM_END,))
    assert chat.reply.text == tokenizer.decode(expected[:-1] if stops else expected)
    assert chat.reply.stopped == reply.stopped == (tokenizer.decode([end]) if stops else None)
    assert reply.text == chat.reply.text


@pytest.fixture(scope="module")
def smollm_f32(smollm: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("smollm-f32") / "f32"
    artifact.convert(smollm, "gguf", "f32", out)
    return out


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize(
    ("question", "text", "stopped"),
    [
        ("Repeat after me: one, two, three.", "One, two, three.", "<|im_end|>"),
        ("What is two plus two?", "Two plus two is a classic math problem that has been debated for centuries. ", None),
    ],
)
def test_a_real_models_reply_is_that_of_transformers(
    question: str, text: str, stopped: str | None, smollm: Path, smollm_f32: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: Messages = [{"role": "user", "content": question}]
    monkeypatch.setattr(chats, "MESSAGES", messages)
    with Checkpoint(smollm) as checkpoint:
        chat = reference_chat(checkpoint, of_checkpoint(checkpoint))
    assert chat is not None
    assert chat.prompt.text.startswith("<|im_start|>system\nYou are a helpful AI assistant named SmolLM")
    expected, margin = generated(smollm, chat.prompt.text)
    assert margin > 0.05
    with opened(smollm_f32, context=512) as runtime:
        assert prompt_problem(runtime.prompt(messages), chat.prompt) is None
        reply = runtime.reply(chat.prompt.ids, chats.LIMIT)
    assert list(reply.ids) == list(chat.reply.ids) == expected
    assert reply == chat.reply
    assert reply.text.startswith(text)
    assert reply.stopped == stopped
    assert (len(expected) == chats.LIMIT) == (stopped is None)


@pytest.mark.parametrize(
    "generation", [None, {"eos_token_id": [IM_END, 260]}, {"eos_token_id": 260}, {"do_sample": False}]
)
def test_the_reference_stops_where_transformers_does(generation: dict[str, Any] | None, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    source = chatty(tmp_path / "c", **generation or {})
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    theirs = model.generation_config.eos_token_id
    theirs = theirs if isinstance(theirs, list) else [] if theirs is None else [theirs]
    with Checkpoint(source) as checkpoint:
        assert [*Tokenizer(source).stop_ids(checkpoint.config)] == theirs


# In quality.json


def test_a_reply_is_kept_with_the_figures(ending: Path, windows: Windows, said: list[int], end: int) -> None:
    kept = reference(ending, windows)
    quality, _ = scored(converted(ending, "q8_0"), windows, kept)
    assert kept.chat is not None
    assert quality["reply"].keys() == {"text", "tokens", "stopped", "same_tokens", "reference_tokens", "problem"}
    assert quality["reply"]["problem"] is None
    assert quality["reply"]["reference_tokens"] == said.index(end) + 1
    assert 0 <= quality["reply"]["same_tokens"] <= quality["reply"]["tokens"] <= chats.LIMIT
    shutil.rmtree(ending.parent / "ending-q8_0")


def test_without_a_template_there_is_no_reply(windows: Windows, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "plain", Shape("qwen3"))
    kept = reference(source, windows)
    assert kept.chat is None
    assert not (tmp_path / "plain-reference" / "reply.json").exists()
    quality, _ = scored(converted(source, "q8_0"), windows, kept)
    assert quality["reply"] is None


def test_a_chat_is_read_as_it_was_written(ending: Path, windows: Windows, tmp_path: Path) -> None:
    chat = reference(ending, windows).chat
    assert chat is not None
    assert chat.prompt.text == RENDERED
    write_json(tmp_path / "reply.json", chat)
    assert load_chat(tmp_path) == chat


def test_a_short_window_leaves_room_for_the_chat(windows: Windows, tmp_path: Path) -> None:
    """llama.cpp rounds a context of 40 tokens up to 256."""
    source = chatty(tmp_path / "c", TEMPLATE.replace("assistant", "assistant" * 40))
    kept = reference(source, windows)
    assert kept.chat is not None
    assert len(kept.chat.prompt.ids) > 256
    quality, _ = scored(converted(source), windows, kept)
    assert quality["reply"]["tokens"] == quality["reply"]["same_tokens"] == chats.LIMIT


@pytest.mark.parametrize("bos", ["<|endoftext|>", None])
def test_special_tokens_in_a_template_are_the_checkpoints(bos: str | None, tmp_path: Path) -> None:
    source = chatty(tmp_path / "c", ("[{{ bos_token }}]" if bos else "") + TEMPLATE + "{{ eos_token }}")
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(json.dumps(settings | {"bos_token": bos}))
    if bos:  # a tokenizer that adds it: not to a prompt, whose template writes it
        (source / "tokenizer.json").write_text(json.dumps(tokenizer_json() | {"post_processor": adds(bos, 260)}))
    with Checkpoint(source) as checkpoint:
        chat = reference_chat(checkpoint, of_checkpoint(checkpoint))
    assert chat is not None
    assert chat.prompt.text == (f"[{bos}]" if bos else "") + RENDERED + "<|im_end|>"
    assert chat.prompt.ids.count(260) == (bos is not None)
    with opened(converted(source)) as runtime:
        assert runtime.prompt(chats.MESSAGES) == chat.prompt


# What is broken is named


def alter_metadata(monkeypatch: pytest.MonkeyPatch, **changed: bytes | None) -> None:
    """Files of an older version: written otherwise, and not checked."""

    def altered(*arguments: Any) -> list[header.Pair]:
        pairs = dict(metadata(*arguments))
        for name, value in changed.items():
            key = f"tokenizer.{name.replace('__', '.')}"
            del pairs[key]
            if value is not None:
                pairs[key] = value
        return [*pairs.items()]

    monkeypatch.setattr(writing, "metadata", altered)
    monkeypatch.setattr(writing, "check_vocabulary", lambda *arguments: None)


def test_another_role_marker_is_an_error(
    ending: Path, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = reference(ending, windows)
    alter_metadata(monkeypatch, chat_template=header.text(TEMPLATE.replace("<|im_start|>assistant", "<|im_start|>bot")))
    artifact.convert(ending, "gguf", "q8_0", tmp_path / "made")
    at = RENDERED.index("assistant")
    with pytest.raises(MeasurementError) as raised:
        scored(tmp_path / "made", windows, kept)
    assert f"makes another prompt than the reference's, from character {at} on: expected " in str(raised.value)
    assert "<|im_start|>bot\\n'. Convert it again." in str(raised.value)
    theirs = artifact.load(tmp_path / "made" / "model.gguf", Checkpoint(ending))
    quality, _ = evaluate(tmp_path / "made" / "model.gguf", theirs, windows, kept, SETTINGS)
    assert f"makes another prompt than the reference's, from character {at} on" in quality["reply"]["problem"]


def test_a_lost_template_is_an_error(
    ending: Path, windows: Windows, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = reference(ending, windows)
    alter_metadata(monkeypatch, chat_template=None)
    artifact.convert(ending, "gguf", "q8_0", tmp_path / "made")
    with pytest.raises(MeasurementError, match="the artifact has no chat template, the reference has one"):
        scored(tmp_path / "made", windows, kept)


def test_a_reply_that_runs_on_is_an_error(
    ending: Path, windows: Windows, said: list[int], end: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = reference(ending, windows)
    alter_metadata(monkeypatch, ggml__eot_token_id=None)
    artifact.convert(ending, "gguf", "f32", tmp_path / "made")
    with pytest.raises(MeasurementError, match=f"goes on behind token {said.index(end) + 1}, id {end}, where the"):
        scored(tmp_path / "made", windows, kept)


def test_a_reference_without_a_reply_is_an_error(ending: Path, windows: Windows) -> None:
    """As one of an older version is."""
    kept = dataclasses.replace(reference(ending, windows), chat=None)
    made = converted(ending, "q8_0")
    with pytest.raises(MeasurementError, match=r"the reference has none\. Convert it again"):
        scored(made, windows, kept)
    shutil.rmtree(made)


def test_a_template_that_fails_is_an_error(tmp_path: Path) -> None:
    source = chatty(tmp_path / "c", "{{ raise_exception('a system message is needed') }}")
    with Checkpoint(source) as checkpoint, pytest.raises(TokenizerError, match="a system message is needed"):
        reference_chat(checkpoint, of_checkpoint(checkpoint))
    with opened(converted(source)) as runtime, pytest.raises(Exception, match="a system message is needed") as raised:
        runtime.prompt(chats.MESSAGES)
    assert type(raised.value).__name__ == "ArtifactError"


def test_a_reply_without_room_is_an_error(ending: Path) -> None:
    """llama.cpp would end the process."""
    with opened(converted(ending, "q8_0"), context=256) as runtime:
        assert len(runtime.reply([1] * 224, 32).ids) <= 32
        with pytest.raises(MeasurementError, match="a prompt of 225 tokens and a reply of 32 need a context of 257"):
            runtime.reply([1] * 225, 32)
    shutil.rmtree(ending.parent / "ending-q8_0")


CHAT = Chat(chats.MESSAGES, Prompt("ab", (1, 2)), (9,), Reply((3, 4, 9), "cd", "<end>"))


def test_prompts_of_other_ids_are_a_problem() -> None:
    assert prompt_problem(Prompt("ab", (1, 2)), CHAT.prompt) is None
    assert prompt_problem(None, None) is None
    problem = prompt_problem(Prompt("ab", (1, 5)), CHAT.prompt)
    assert problem is not None
    assert problem.endswith("from token 1 on: expected (2,), found (5,)")


@pytest.mark.parametrize(
    ("ids", "stopped", "same"),
    [((3, 4, 9), "<end>", 3), ((3, 5, 6), None, 1), ((3, 4, 8), "<other>", 2), ((9,), "<end>", 0), ((3, 4), None, 2)],
)
def test_tokens_at_the_beginning_are_counted(ids: tuple[int, ...], stopped: str | None, same: int) -> None:
    found = compare(Reply(ids, "text", stopped), CHAT)
    assert found == {
        "text": "text",
        "tokens": len(ids),
        "stopped": stopped,
        "same_tokens": same,
        "reference_tokens": 3,
    }


@pytest.mark.parametrize("ids", [(9, 3), (3, 9)])
def test_a_reply_goes_on_behind_a_stop_token(ids: tuple[int, ...]) -> None:
    problem = end_problem(Reply(ids, "text", None), CHAT)
    assert problem is not None
    assert f"goes on behind token {ids.index(9) + 1}, id 9," in problem
    assert end_problem(Reply((3, 9), "text", "<end>"), CHAT) is None
