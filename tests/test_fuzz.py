"""Broken inputs of every kind, made by changing whole ones: each is refused by an error of ours or works.

Nothing else may escape, and nothing bad may reach native code, which would abort the process.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from figures import hand_made
from judged import project
from mutations import FEW, GONE, WRONG, changed, outcome
from support import Shape, config_of, tokenizer_json, write_checkpoint

from pipeline import artifact, gate
from pipeline.errors import ArtifactError, CheckpointError, CorpusError, TokenizerError
from pipeline.files import read_object, write_json
from pipeline.formats.gguf import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import Artifact, EffectiveType, Limits, SourceIdentity


def inspected(folder: Path) -> None:
    """What a conversion checks before it writes."""
    with Checkpoint(folder) as checkpoint:
        spec = spec_of(checkpoint.config)
        checkpoint.check(spec)
        write.check(checkpoint, spec)


def test_headers_of_safetensors_with_random_bytes(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Shape(layers=1))
    whole, rng, counts = (folder / "model.safetensors").read_bytes(), random.Random(0), Counter[str]()
    length = 8 + int.from_bytes(whole[:8], "little")
    for case in range(200):
        broken = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5, 20])):
            broken[rng.randrange(8 if rng.random() < 0.1 else length)] = rng.choice(
                [rng.randrange(256), *b'"[]{},:01-e.']
            )
        kept = rng.randrange(len(broken)) if rng.random() < 0.2 else len(broken)
        (folder / "model.safetensors").write_bytes(broken[:kept])
        counts[outcome(f"case {case}", lambda: inspected(folder), CheckpointError)] += 1
    assert counts["refused"] > 190


ENTRY = ("dtype", "shape", "data_offsets")
NUMBERS = (
    [1, 2, 3],
    ["a", "b"],
    [1.5, 2.5],
    [-1, -1],
    [2**70, 2**71],
    [[1], [2]],
    [64, -64],
    ["5", "6"],
    [True, False],
)


@pytest.mark.parametrize("key", ENTRY)
def test_an_entry_of_a_header_with_wrong_values(key: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Shape(layers=1))
    whole = (folder / "model.safetensors").read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    for bad in (*WRONG[1:], *NUMBERS):
        header = json.loads(whole[8:length])
        header["model.norm.weight"][key] = bad
        text = json.dumps(header).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + whole[length:])
        assert outcome(f"{key}: {bad!r}", lambda: inspected(folder), CheckpointError) == "refused"


@pytest.mark.parametrize("text", [b"[" * 200_000, b'{"a":' * 100_000], ids=["lists", "objects"])
def test_json_nested_without_end(text: bytes, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Shape(layers=1))
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        whole = (folder / name).read_bytes() if (folder / name).exists() else b"{}"
        (folder / name).write_bytes(text)
        assert outcome(name, lambda: inspected(folder)) == "refused"
        (folder / name).write_bytes(whole)
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    assert outcome("model.safetensors", lambda: inspected(folder), CheckpointError) == "refused"


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512, "attention_factor": 1.2}
ALL = YARN | {"beta_fast": 32, "beta_slow": 1, "rope_theta": 1e6}
OTHERS = {
    "attention_bias": False,
    "bos_token_id": 1,
    "pad_token_id": 1,
    "layer_types": None,
    "use_sliding_window": False,
}


@pytest.mark.parametrize(("model_type", "scaling"), [("qwen2", "rope_scaling"), ("qwen3", "rope_parameters")])
def test_every_key_of_the_config_with_wrong_values(model_type: str, scaling: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Shape(model_type, layers=1))
    config = config_of(Shape(model_type, layers=1)) | OTHERS | {scaling: ALL, "quantization_config": None}
    counts = Counter[str]()
    for key in config:
        for label, broken in changed({key: config[key]}):
            (folder / "config.json").write_text(json.dumps({**config, key: GONE, **broken}, default=lambda gone: None))
            result = outcome(f"{model_type}: {label}", lambda: inspected(folder))
            if result == "works":  # then it converts as well
                out = tmp_path / f"out-{sum(counts.values())}"
                artifact.convert(folder, "gguf", "q8_0", out)
            counts[result] += 1
    assert counts["refused"] > 150
    assert counts["works"] > 50


def test_every_part_of_the_tokenizer_with_wrong_values(tmp_path: Path) -> None:
    folder, whole, counts = write_checkpoint(tmp_path / "c", Shape(layers=1)), tokenizer_json(), Counter[str]()
    for label, broken in changed(whole, (*FEW, 2**40)):
        (folder / "tokenizer.json").write_text(json.dumps(broken))
        result = outcome(label, lambda: inspected(folder), TokenizerError)
        if result == "works":
            result = outcome(label, lambda: Tokenizer(folder).encode("the inn"), TokenizerError)
        if result == "works":
            out = tmp_path / f"out-{sum(counts.values())}"  # llama.cpp may read another tokenizer otherwise
            result = outcome(label, partial(artifact.convert, folder, "gguf", "q8_0", out), TokenizerError)
        counts[result] += 1
    assert counts["refused"] > 200
    assert counts["works"] > 30


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t["model"]["vocab"].update(new=5), r"model\.vocab gives the id 5 to two tokens, '.' and 'new'"),
        (lambda t: t["model"]["vocab"].update(new=-1), r"something else than an id: 'new': -1"),
        (lambda t: t["model"]["vocab"].update(new="7"), r"something else than an id: 'new': '7'"),
        (lambda t: t["model"]["merges"].append(["zz", "q"]), r"model\.merges: \['zz', 'q'\] needs 'zz'"),
        (lambda t: t["model"]["merges"].append("a b"), r"model\.merges: 'a b' needs 'ab', which is not in model"),
        (lambda t: t["model"]["merges"].append(["a"]), r"model\.merges: expected two tokens, found \['a'\]"),
        (lambda t: t["added_tokens"].append({"id": 270}), "added_tokens: expected an object with content and id"),
        (lambda t: t["added_tokens"].append({"id": 3, "content": "new"}), "id 3 is that of '.' and of 'new'"),
        (lambda t: t["added_tokens"].append({"id": 270, "content": "the"}), r"token 'the' has two ids, \d+ and 270"),
        (lambda t: t["added_tokens"].append({"id": 270, "content": "[PAD271]"}), "'.PAD271.' has two ids, 270 and 271"),
        (lambda t: t["model"]["vocab"].update({"\ud800": 270}), "half a character, a lone surrogate"),
    ],
)  # fmt: skip
def test_a_tokenizer_that_contradicts_itself(change: Callable[[Any], None], message: str, tmp_path: Path) -> None:
    """llama.cpp aborts the process on two ids of one text."""
    folder, content = write_checkpoint(tmp_path / "c", Shape(layers=1)), tokenizer_json()
    change(content)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(TokenizerError, match=message):
        inspected(folder)


TEMPLATES = ([{"name": "default"}], [{"template": "x"}], [{"name": "default", "template": 5}], {"default": "x"})
SETTINGS = {"bos_token": "<|endoftext|>", "eos_token": {"content": "<|im_end|>"}, "chat_template": "x"}


def test_every_setting_of_the_tokenizer_with_wrong_values(tmp_path: Path) -> None:
    folder, counts = write_checkpoint(tmp_path / "c", Shape(layers=1)), Counter[str]()
    for label, broken in changed(SETTINGS, (*WRONG, *TEMPLATES, ["<|im_end|>"], {"content": 5}, {"content": []})):
        (folder / "tokenizer_config.json").write_text(json.dumps(broken))
        counts[outcome(label, lambda: inspected(folder), TokenizerError)] += 1
    assert counts["refused"] > 50
    assert counts["works"] > 3


# What quantgate wrote itself, and something else changed


def test_every_key_of_artifact_json_with_wrong_values(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"x")
    digest = "2d711642b726b04401627ca9fbac32f5c8530fb1903cc4db02258717921a4881"
    source, types = SourceIdentity("c", None, {"config.json": digest}), {"Q8_0": EffectiveType(1, 2)}
    whole = Artifact(
        "gguf", "q8_0", {"model.gguf": digest}, digest, 1, 1, 2, 8.5, types, source, {"llama.cpp": "1"}, "Linux",
        {"output.weight": f"Q8_0 {digest[:16]}"},
    )  # fmt: skip
    write_json(tmp_path / "artifact.json", whole)
    assert artifact.load(tmp_path) == whole
    for label, broken in changed(asdict(whole)):
        (tmp_path / "artifact.json").write_text(json.dumps(broken))
        outcome(label, lambda: artifact.load(tmp_path), ArtifactError)
    for bad in (
        {"files": []},
        {"files": {}},
        {"tensors": {"output.weight": None}},
        {"scheme": 4},
        {"source": {}},
        {"effective_types": {"Q8_0": {"tensors": "1"}}},
    ):
        (tmp_path / "artifact.json").write_text(json.dumps(asdict(whole) | bad))
        assert outcome(str(bad), lambda: artifact.load(tmp_path), ArtifactError) == "refused"


def test_measurements_with_wrong_values_are_judged_or_refused(tmp_path: Path) -> None:
    whole = hand_made()
    (name, *_) = whole["variants"]
    whole["variants"] = {name: whole["variants"][name]}
    asked = project("fail", [name], Limits(max_ln_ppl_ratio=9.0, max_kld_mean=9.0, min_same_top=0.1))
    for label, broken in changed(whole, FEW[:4]):
        (tmp_path / "m.json").write_text(json.dumps(broken))

        def judged() -> None:
            result = gate.judge(read_object(tmp_path / "m.json"), asked)
            write_json(tmp_path / "g.json", result.as_json())

        assert outcome(label, judged) == "works"


def test_windows_of_another_shape_are_refused(tmp_path: Path) -> None:
    import numpy as np

    from pipeline import corpus

    meta = {"name": "x", "text_sha256": "a", "tokenizer_sha256": "b", "span_bytes": [3, 4]}
    np.save(tmp_path / "ids.npy", np.zeros((2, 8), np.int32))
    write_json(tmp_path / "meta.json", meta)
    assert corpus.load(tmp_path).ids.shape == (2, 8)
    for label, broken in changed(meta, WRONG[:1] + WRONG[3:-1]):
        (tmp_path / "meta.json").write_text(json.dumps(broken))
        outcome(label, lambda: corpus.load(tmp_path), CorpusError)
    write_json(tmp_path / "meta.json", meta)
    whole = (tmp_path / "ids.npy").read_bytes()
    for content in (b"", b"x" * 200, whole[:-1], whole[:50], b"PK\x03\x04"):
        (tmp_path / "ids.npy").write_bytes(content)
        assert outcome(repr(content[:9]), lambda: corpus.load(tmp_path), CorpusError) == "refused"
