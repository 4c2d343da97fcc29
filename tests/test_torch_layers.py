"""The reference layer by layer: the plain one to the bit, with each layer read once and nothing left behind."""

from __future__ import annotations

import errno
import gc
import json
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from family import MODEL_TYPES
from family import tiny as made
from fp8_blocks import as_fp8
from support import write_checkpoint
from test_chat import chatty

from pipeline import artifact, console_tables, evaluation, torch_forward, torch_layers
from pipeline import chat as chats
from pipeline.errors import CheckpointError, MeasurementError, OutputError
from pipeline.evaluation import Question, Request, evaluate, evaluate_place
from pipeline.models import spec_of
from pipeline.report import markdown
from pipeline.report.measurements import _reference_reply
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_forward import FreshReference, Reference, load_reference, write_reference
from pipeline.types import TensorSpec, Windows
from pipeline.until_decided import _reference

SETTINGS = {"threads": 1, "flash_attention": False, "kv_type": "f32"}
FILES = ("hidden.npy", "logprobs.npy", "meta.json")


def windows_of(vocab: int = 272, count: int = 3, context: int = 40) -> Windows:
    ids = np.random.default_rng(0).integers(0, vocab, (count, context)).astype(np.int32)
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(count, 30))


def check_same(folder: Path, out: Path, windows: Windows | None = None) -> None:
    """Both references of a checkpoint are the same bytes."""
    windows = windows or windows_of()
    with Checkpoint(folder) as checkpoint:
        for name, layer_by_layer in (("plain", False), ("layers", True)):
            write_reference(checkpoint, checkpoint.identity(), windows, out / name, layer_by_layer=layer_by_layer)
    for file in FILES:
        assert (out / "layers" / file).read_bytes() == (out / "plain" / file).read_bytes(), file
    found = np.load(out / "layers" / "hidden.npy")
    assert found.shape == (len(windows.ids), windows.scored, found.shape[-1])
    assert len(np.unique(found)) > found.size / 2


# Equal to the plain one


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_layers_give_the_plain_reference(model_type: str, tmp_path: Path) -> None:
    check_same(made(model_type, tmp_path / "c"), tmp_path)


@pytest.mark.parametrize(
    ("model_type", "stored"),
    [
        ("qwen3", {"tie_word_embeddings": True, "dtype": "bfloat16"}),
        ("qwen3_5", {"wrapped": True, "mtp": 1}),
        ("qwen3_5_moe", {"wrapped": True, "layout": "fused", "dtype": "bfloat16"}),
        ("qwen3_5", {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}),
        ("qwen3_next", {"full_attention_interval": 2, "layer_types": None}),
    ],
)
def test_layers_give_the_plain_reference_of_other_layouts(
    model_type: str, stored: dict[str, Any], tmp_path: Path
) -> None:
    check_same(made(model_type, tmp_path / "c", **stored), tmp_path)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_next"])
def test_layers_give_the_plain_reference_of_fp8(model_type: str, tmp_path: Path) -> None:
    as_fp8(made(model_type, tmp_path / "source"), tmp_path / "fp8", (32, 48))
    check_same(tmp_path / "fp8", tmp_path)


def test_layers_give_the_plain_reference_of_the_embedded_checkpoint(tiny: Path, tmp_path: Path) -> None:
    check_same(tiny, tmp_path, windows_of(1024, 2, 512))


# Memory


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Every read of rows: the tensor's name and how many."""
    found: list[tuple[str, int]] = []
    rows = Checkpoint.rows

    def spied(self: Checkpoint, tensor: TensorSpec, start: int, count: int) -> np.ndarray:
        found.append((tensor.name, count))
        return rows(self, tensor, start, count)

    monkeypatch.setattr(Checkpoint, "rows", spied)
    return found


def test_each_layer_is_read_once_and_of_embeddings_what_occurs(
    reads: list[tuple[str, int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.torch_model.BLOCK_WEIGHTS", 1000)
    windows = windows_of(50)
    with Checkpoint(made("qwen3_5_moe", tmp_path / "c")) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        with torch_layers.final_states(checkpoint, spec, windows, tmp_path, lambda done: None) as states:
            order = [*reads]
            states(0)
            assert reads == order  # the last norm is read by then
    count: dict[str, int] = {}
    for name, rows in order:
        count[name] = count.get(name, 0) + rows
    of_embeddings = sum(len(np.unique(ids)) for ids in windows.ids)
    expected = {tensor.name: tensor.rows for tensor in spec.tensors if tensor.role != "head"}
    assert count == expected | {"model.embed_tokens.weight": of_embeddings}
    layers = {tensor.name: tensor.layer for tensor in spec.tensors}
    seen = [layers[name] for name, _ in order if layers[name] is not None]
    assert seen == sorted(seen)  # the next only when the last is done
    blocks = [rows for name, rows in order if name.endswith("layers.0.linear_attn.in_proj_qkv.weight")]
    assert blocks == [15] * 8 + [8]  # of 128 rows of 64 weights


def test_the_layers_memory_is_free_for_the_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[weakref.ref[Any]] = []
    load = torch_layers._Layers.load

    def spied(self: Any, number: int) -> Any:
        run = load(self, number)
        held.extend(weakref.ref(part) for part in (self, *self._modules.values()))
        return run

    monkeypatch.setattr(torch_layers._Layers, "load", spied)
    with Checkpoint(made("qwen3_next", tmp_path / "c")) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        with torch_layers.final_states(checkpoint, spec, windows_of(), tmp_path, lambda done: None):
            gc.collect()
            assert [part() for part in held if part() is not None] == []


def test_all_layers_lie_in_the_memory_of_the_largest(tmp_path: Path) -> None:
    with Checkpoint(made("qwen3_next", tmp_path / "c")) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        layers = torch_layers._Layers(checkpoint, spec)
        for number in range(spec.n_layers):
            layers.load(number)
        storages = {
            parameter.untyped_storage().data_ptr()
            for module in layers._modules.values()
            for parameter in module.parameters()
        }
        assert storages == {layers._memory.untyped_storage().data_ptr()}
        places = {parameter.data_ptr() % 64 for module in layers._modules.values() for parameter in module.parameters()}
        assert places == {layers._memory.data_ptr() % 64}
    largest = max(sum(t.weights for t in spec.tensors if t.layer == layer) for layer in range(spec.n_layers))
    assert largest <= len(layers._memory) < largest + 16 * 40


@pytest.mark.parametrize(("total", "expected"), [(8, False), (7, True)])
def test_a_model_above_half_of_the_memory_is_run_by_layers(
    total: int, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """total: bytes of memory for each weight."""
    called: list[str] = []
    plain, layers = torch_forward.of_checkpoint, torch_forward.final_states
    monkeypatch.setattr(torch_forward, "of_checkpoint", lambda c: called.append("plain") or plain(c))
    monkeypatch.setattr(torch_forward, "final_states", lambda *a: called.append("layers") or layers(*a))
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        weights = spec_of(checkpoint.config).weights
        monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(total=total * weights, available=0))
        write_reference(checkpoint, checkpoint.identity(), windows_of(), tmp_path / "out")
    assert called == ["layers" if expected else "plain"]


def test_progress_adds_up_to_the_windows(tmp_path: Path) -> None:
    told: list[float] = []
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        write_reference(checkpoint, checkpoint.identity(), windows_of(), tmp_path / "out", told.append, True)
    assert len(told) == 3 * (2 + 2)  # windows, by layers, embeddings and the last norm
    assert sum(told) == pytest.approx(3)


# What goes wrong


def broken(folder: Path) -> Path:
    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = np.inf

    return write_checkpoint(folder, dtype="F32", change=change)


def full(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(
    ("maker", "at", "kind", "message"),
    [
        (broken, None, MeasurementError, "logits are not finite"),
        (write_checkpoint, "write", OutputError, "cannot be written: No space left on device"),
        (
            lambda folder: write_checkpoint(folder, config={"attention_dropout": "much"}),
            None,
            CheckpointError,
            "cannot build what its config.json says",
        ),
    ],
)
def test_nothing_is_left_behind(
    maker: Callable[[Path], Path],
    at: str | None,
    kind: type[Exception],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if at:
        monkeypatch.setattr(torch_layers._Scratch, at, full)
    (tmp_path / "place").mkdir()
    with Checkpoint(maker(tmp_path / "c")) as checkpoint, pytest.raises(kind, match=message):
        write_reference(
            checkpoint, checkpoint.identity(), windows_of(), tmp_path / "place" / "out", layer_by_layer=True
        )
    assert list((tmp_path / "place").iterdir()) == []


def test_the_scratch_file_lies_beside_the_output_without_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So that no end of the process leaves it there."""
    seen: list[tuple[int, str]] = []
    write = torch_layers._Scratch.write

    def spied(self: Any, window: int, states: np.ndarray) -> None:
        write(self, window, states)
        device = Path(f"/proc/self/fd/{self._file.fileno()}")
        seen.append((self._file.fileno(), str(device.readlink()) if device.exists() or device.is_symlink() else ""))

    monkeypatch.setattr(torch_layers._Scratch, "write", spied)
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        write_reference(checkpoint, checkpoint.identity(), windows_of(), tmp_path / "out", layer_by_layer=True)
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(FILES)
    assert all(not link or link.endswith("(deleted)") for _, link in seen)


# The reply of a chat is not computed


def test_an_artifact_is_asked_and_its_reply_compared_with_none(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, windows = chatty(tmp_path / "source"), windows_of()
    artifact.convert(source, "gguf", "f32", tmp_path / "f32")
    with Checkpoint(source) as checkpoint:
        for name, layer_by_layer in (("plain", False), ("layers", True)):
            write_reference(checkpoint, checkpoint.identity(), windows, tmp_path / name, layer_by_layer=layer_by_layer)
        plain, layers = (load_reference(tmp_path / name, checkpoint) for name in ("plain", "layers"))
    assert plain.chat is not None
    assert layers.chat == chats.Chat(plain.chat.messages, plain.chat.prompt, plain.chat.stop_ids, None)
    assert json.loads((tmp_path / "layers" / chats.FILE).read_text())["reply"] is None
    expected, found = (
        evaluate(tmp_path / "f32", artifact.load(tmp_path / "f32"), windows, kept, SETTINGS)[0]
        for kept in (plain, layers)
    )
    reply = found.pop("reply")
    assert reply == expected.pop("reply") | {"same_tokens": None, "reference_tokens": None}
    assert found == expected
    assert chats.sameness(reply) == "not measured: the reference was run layer by layer"
    console_tables.quality("f32", found | {"reply": reply})
    said = " ".join(capsys.readouterr().out.split())
    assert "not measured: the reference was run layer by layer; no end within 32" in said
    assert markdown._reply("f32", reply)["same"] == chats.NOT_MEASURED
    (tmp_path / "artifacts").mkdir()
    (tmp_path / "layers").rename(tmp_path / "artifacts" / "reference")
    shown = _reference_reply(tmp_path)
    assert shown == {"asked": chats.MESSAGES[-1]["content"], "text": None, "tokens": None, "stopped": None}
    assert markdown._said(shown) == {"text": chats.NOT_MEASURED, "end": ""}


# The command line's cache


def test_scores_are_the_same_and_a_reference_without_reply_is_kept_apart(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    artifact.convert(tiny, "gguf", "q8_0", tmp_path / "q8_0")
    request = Request(tmp_path / "q8_0", tiny, "sample", 2, 64, SETTINGS)
    layer_by_layer = replace(request, layer_by_layer=True)
    layers = evaluate_place(layer_by_layer)
    references = tmp_path / "cache" / "quantgate" / "references"
    assert [path.name.endswith("-by-layers") for path in references.iterdir()] == [True]
    plain = evaluate_place(request)
    assert layers["reply"] == plain["reply"] | {"same_tokens": None, "reference_tokens": None}
    assert {**layers, "reply": plain["reply"]} == plain
    assert evaluate_place(layer_by_layer) == plain  # the one that has a reply serves both
    assert sorted(path.name.endswith("-by-layers") for path in references.iterdir()) == [False, True]


@pytest.mark.parametrize("by_layers", [False, True])
def test_until_decided_computes_all_windows_first(by_layers: bool, tmp_path: Path) -> None:
    source, windows = write_checkpoint(tmp_path / "c"), windows_of()
    artifact.convert(source, "gguf", "f32", tmp_path / "f32")
    with Checkpoint(source) as checkpoint:
        question = Question(
            tmp_path / "f32",
            artifact.load(tmp_path / "f32"),
            checkpoint,
            checkpoint.identity(),
            windows,
            tmp_path / "cached",
            by_layers,
        )
        found = _reference(question)
        expected = FreshReference(checkpoint, windows)
    assert isinstance(found, Reference if by_layers else FreshReference)
    assert (tmp_path / "cached").exists() == by_layers
    for window in range(3):
        for mine, theirs in zip(found.window(window), expected.window(window), strict=True):
            np.testing.assert_array_equal(mine, theirs)
    assert evaluation.is_larger is torch_layers.is_larger
