"""Core ML folders as runtimes: by the reference executor, and as on a Mac with the executor in place of MLModel."""

from __future__ import annotations

import json
import shutil
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from coreml_fakes import CPU, NE, FakeMLModel, pretend_mac
from support import Shape, write_checkpoint

from pipeline import artifact
from pipeline import chat as chats
from pipeline.errors import ArtifactError, MeasurementError, ParamsError, PipelineError
from pipeline.formats.coreml import manifest, native
from pipeline.formats.coreml.package import PACKAGE, Package
from pipeline.formats.coreml.run import (
    CoremlRuntime,
    Executed,
    check_lengths,
    check_settings,
    context_length,
    open_runtime,
    unmeasurable,
    unrepresentative,
)
from pipeline.torch_runtime import instruction_set
from pipeline.types import Options

SHAPE = Shape("qwen3", 2, hidden=64, ff=96, heads=4, kv_heads=2, head_dim=32)
CHUNK, MAX_CONTEXT, SCORE_WINDOW = 64, 150, 90
CACHE = 224  # 150 + 64 - 1, in steps of 32
TEMPLATE = "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
IM_START, IM_END = 261, 262
CLOSE = 2e-2  # float16 on the way


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An fp16 package with a chat template."""
    root = tmp_path_factory.mktemp("coreml")
    source = write_checkpoint(root / "source", SHAPE, "F32")
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    sizes = {"chunk": CHUNK, "max_context": MAX_CONTEXT, "score_window": SCORE_WINDOW}
    artifact.convert(source, "coreml", "fp16", root / "made", Options(sizes=sizes))
    return root / "made"


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 272, SCORE_WINDOW).astype(np.int32)


def opened(folder: Path, **settings: Any) -> CoremlRuntime:
    return CoremlRuntime(folder, **{"context": 90, "threads": 2} | settings)


def score(runtime: Any, ids: np.ndarray, start: int = 0) -> np.ndarray:
    return np.concatenate([*runtime.score(ids, start)])


@pytest.fixture
def executed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Executed:
    """A Mac whose Core ML computes as the executor does."""
    model = Executed(Package(folder / PACKAGE), 2)
    pretend_mac(monkeypatch, model, {"prefill": [NE, NE, NE, CPU], "decode": [CPU, None]})
    return model


# By the executor


@pytest.mark.parametrize("tokens", [90, 70])
def test_rows_are_those_behind_the_start(tokens: int, folder: Path, ids: np.ndarray) -> None:
    """What fills a window changes nothing."""
    with closing(opened(folder)) as runtime:
        every = score(runtime, ids)
        assert every.shape == (90, 272)
        assert every.std() > 0.1
        found = score(runtime, ids[:tokens], 40)
        assert found.shape == (tokens - 40, 272)
        assert found.dtype == np.float32
        assert np.abs(found - every[40:tokens]).max() < 1e-5


def test_a_reply_is_what_score_says(folder: Path, ids: np.ndarray) -> None:
    with closing(opened(folder)) as runtime:
        prompt = ids[:70]  # a chunk and a part of one
        said = runtime.reply(prompt.tolist(), 12)
        assert len(said.ids) == 12
        rows = score(runtime, np.array([*prompt, *said.ids], np.int32)[:-1], 69)
        for i, row in enumerate(rows):
            assert row[said.ids[i]] >= row.max() - CLOSE
        assert said.text == runtime._tokenizer.decode(said.ids)
        assert said.stopped is None
        assert runtime.reply(prompt.tolist(), 12) == said  # a new state


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_a_reply_ends_where_the_folder_says(file: str, folder: Path, ids: np.ndarray, tmp_path: Path) -> None:
    with closing(opened(folder)) as runtime:
        said = runtime.reply(ids[:5].tolist(), 12).ids
    end = max(set(said), key=said.index)  # first comes late
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / file
    raw = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(raw | {"eos_token_id": [end]}))
    with closing(opened(tmp_path / "copy")) as runtime:
        found = runtime.reply(ids[:5].tolist(), 12)
        assert found.ids == said[: said.index(end) + 1]
        assert found.stopped == runtime._tokenizer.decode([end])
        assert found.text == runtime._tokenizer.decode(found.ids[:-1])


def test_the_prompt_is_the_templates(folder: Path, tmp_path: Path) -> None:
    with closing(opened(folder)) as runtime:
        found = runtime.prompt(chats.MESSAGES)
        assert found is not None
        assert found.text == "<|im_start|>Repeat after me: one, two, three.<|im_end|>"
        assert (found.ids[0], found.ids[-1]) == (IM_START, IM_END)
    shutil.copytree(folder, tmp_path / "copy")
    (tmp_path / "copy" / "tokenizer_config.json").unlink()
    with closing(opened(tmp_path / "copy")) as runtime:
        assert runtime.prompt(chats.MESSAGES) is None


def test_the_executor_says_what_it_is(folder: Path) -> None:
    with closing(open_runtime(folder, artifact.load(folder), context=90, threads=1)) as runtime:
        engine = runtime.engine
        assert (engine.name, engine.device, engine.kv_type, engine.threads) == ("reference executor", "cpu", "f16", 1)
        assert engine.version.startswith("torch 2.13.0")
        assert engine.instruction_set == instruction_set() != ""
        assert runtime.native is None
        assert runtime.placement() is None
        assert runtime.peak_memory() is None
        assert runtime.vocab_size == 272
        assert runtime.kv_bytes == 2 * 2 * 2 * CACHE * 32 * 2


def test_the_executor_has_no_speed(folder: Path, ids: np.ndarray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert unmeasurable() == "needs macOS"
    with closing(opened(folder)) as runtime:
        for call in (lambda: runtime.prefill(ids), lambda: runtime.decode(1)):
            with pytest.raises(MeasurementError, match="cannot be timed here: Core ML needs macOS"):
                call()


# On a Mac


def test_on_a_mac_core_ml_scores_and_replies(folder: Path, ids: np.ndarray, executed: Executed) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "missing", lambda: "needs macOS")
        with closing(opened(folder)) as runtime:
            rows, said = score(runtime, ids, 40), runtime.reply(ids[:70].tolist(), 12)
    assert not FakeMLModel.loaded
    with closing(opened(folder, device="ne")) as runtime:
        assert [model.function for model in FakeMLModel.loaded] == ["prefill", "decode"]  # a cold start times it
        assert (runtime.engine.name, runtime.engine.device) == ("Core ML", "cpu+ne")
        assert (runtime.native, runtime.kv_bytes) == (None, 2 * 2 * 2 * CACHE * 32 * 2)
        assert score(runtime, ids, 40).tobytes() == rows.tobytes()
        assert runtime.reply(ids[:70].tolist(), 12) == said
        assert {model.path for model in FakeMLModel.loaded} == {str(folder / PACKAGE)}
        assert runtime.prefill(ids) > 0
        assert runtime.decode(3) > 0
        assert runtime.placement() == {
            "prefill": {"cpu": 0.25, "gpu": 0.0, "neural_engine": 0.75},
            "decode": {"cpu": 1.0, "gpu": 0.0, "neural_engine": 0.0},
        }
    assert unrepresentative("cpu") is None


@pytest.mark.usefixtures("executed")
def test_what_was_decoded_is_in_the_state(folder: Path, ids: np.ndarray) -> None:
    """Logits behind a prompt and tokens are those of `score`."""
    from pipeline.formats.coreml.calls import Conversation

    with closing(opened(folder)) as runtime:
        rows = score(runtime, ids)
        conversation = Conversation(runtime._model, runtime._sizes)
        found = [conversation.take_in(ids[:70]), *(conversation.step(int(token)) for token in ids[70:])]
        assert np.abs(np.stack(found) - rows[69:]).max() < CLOSE


# Refused


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_type": "q8_0"}, "kv_type q8_0 is a setting of GGUF: .* the `evaluate` of the GGUF variants"),
        ({"flash_attention": True}, "flash_attention is a setting of GGUF"),
        ({"device": "gpus"}, r"device 'gpus' does not exist; did you mean 'gpu'\?"),
        ({"device": "cuda"}, r"device 'cuda' does not exist; known: auto, cpu, gpu, ne, all\."),
    ],
)
def test_settings_that_core_ml_does_not_have(settings: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ParamsError, match=message):
        opened(folder, **settings)


def test_the_defaults_are_taken() -> None:
    check_settings("f16", False)
    for device in ("auto", "all", "cpu", "gpu", "ne"):
        check_settings("f16", None, device)


def test_lengths_are_those_of_the_package(folder: Path, ids: np.ndarray) -> None:
    made = artifact.load(folder)
    assert context_length(folder, made) == MAX_CONTEXT
    check_lengths(folder, made, SCORE_WINDOW, MAX_CONTEXT)
    with pytest.raises(ParamsError, match=rf"{folder}: a window of 91 tokens is longer than the 90 .*--score-window"):
        check_lengths(folder, made, SCORE_WINDOW + 1)
    with pytest.raises(ParamsError, match=r"a conversation of 151 tokens is longer than the 150 .*--max-context 151"):
        check_lengths(folder, made, SCORE_WINDOW, MAX_CONTEXT + 1)
    with closing(opened(folder)) as runtime:
        with pytest.raises(MeasurementError, match="--score-window 91"):
            score(runtime, np.append(ids, np.int32(1)))
        with pytest.raises(MeasurementError, match="--max-context 151"):
            runtime.reply([1] * 140, 11)


def test_a_package_without_its_lengths_is_refused(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    package = Package(tmp_path / "copy" / PACKAGE)
    del package.model.description.metadata.userDefined[manifest.MAX_CONTEXT]
    package.model_path.write_bytes(package.model.SerializeToString())
    with pytest.raises(ArtifactError, match=r"metadata quantgate\.max_context, found ''\. Convert again"):
        opened(tmp_path / "copy")


def test_a_machine_without_torch_is_told_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(PipelineError, match=r"the reference executor needs torch .* Run: make setup"):
        opened(folder)
