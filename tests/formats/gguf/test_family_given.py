"""GGUF files of the family that others made, and what a hybrid's context holds."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from family import FAMILY
from family_files import convert, maker
from gguf import GGMLQuantizationType
from rewriting import Tensor, rewrite

from pipeline.errors import ArtifactError
from pipeline.formats.gguf import engine, given
from pipeline.formats.gguf.run import GgufRuntime
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return maker(tmp_path_factory.mktemp("given"))


def described(file: Path, source: Path) -> Artifact:
    with Checkpoint(source) as checkpoint:
        return given.describe(file, checkpoint)


def without_mtp(file: Path, arch: str) -> Path:
    """As a converter leaves the MTP layer out."""
    keys = {f"{arch}.block_count": 4, f"{arch}.nextn_predict_layers": None}
    keys[f"{arch}.attention.recurrent_layers"] = None
    return rewrite(
        file, file.with_name("without.gguf"), keys, lambda tensors: [t for t in tensors if t.name[:6] != "blk.4."]
    )


@pytest.mark.parametrize("model_type", FAMILY)
def test_what_llama_quantize_made_is_of_the_checkpoint(
    model_type: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    source = make(model_type, mtp=int(model_type in FAMILY[2:]))
    theirs = oracle.quantize(convert(source, "f32")[0], SCHEMES["q4_0"].ftype, tmp_path / "theirs.gguf")
    ours = convert(source, "q4_0")[1]
    found = described(theirs, source)
    same = ("tensors_sha256", "weights", "bits_per_weight", "effective_types", "dropped")
    assert {key: getattr(found, key) for key in same} == {key: getattr(ours, key) for key in same}


def test_a_file_without_the_checkpoints_mtp_layers_is_of_it(make: Callable[..., Path]) -> None:
    source = make("qwen3_5", mtp=1)
    found = described(without_mtp(convert(source, "q8_0")[0], "qwen35"), source)
    (dropped,) = found.dropped
    assert (dropped.part, dropped.reason) == ("MTP layers", "the file was made without them")
    assert "mtp.fc.weight" in dropped.tensors
    assert found.weights + dropped.weights == convert(source, "q8_0")[1].weights


def test_a_file_with_mtp_layers_that_the_checkpoint_lacks_is_of_it(make: Callable[..., Path]) -> None:
    """Checkpoints that transformers saved have none."""
    file = convert(make("qwen3_5", mtp=1), "q8_0")[0]
    assert described(file, make("qwen3_5")).dropped == ()


def other(name: str, shape: tuple[int, ...]) -> Tensor:
    return Tensor(name, np.ones(shape, np.float32), GGMLQuantizationType.F32)


@pytest.mark.parametrize(
    ("keys", "tensor", "why"),
    [
        ({"qwen35moe.expert_used_count": 3}, None, "expert_used_count: expected 2, found 3"),
        ({"qwen35moe.ssm.group_count": 4}, None, r"ssm\.group_count: expected 2, found 4"),
        ({}, other("blk.1.ffn_up_exps.weight", (5, 32, 64)), r"ffn_up_exps\.weight: expected \[6, 32, 64\], found \[5"),
        ({}, other("blk.1.ssm_out.weight", (64, 32)), r"ssm_out\.weight: expected \[64, 64\], found \[64, 32\]"),
        ({}, other("blk.4.attn_v.weight", (64, 32)), r"blk\.4\.attn_v\.weight: expected \[64, 64\], found \[64, 32\]"),
    ],
)
def test_a_file_of_another_model_is_refused(
    keys: dict[str, Any], tensor: Tensor | None, why: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    source = make("qwen3_5_moe", mtp=1)
    changed = rewrite(
        convert(source, "f32")[0],
        tmp_path / "other.gguf",
        keys,
        lambda tensors: [tensor if tensor is not None and t.name == tensor.name else t for t in tensors],
    )
    with pytest.raises(ArtifactError, match=why):
        described(changed, source)


class Endless(list[str]):
    """A log of which nothing is deleted."""

    def __delitem__(self, at: object) -> None:
        pass


@pytest.mark.parametrize("kv_type", ["f32", "f16", "q8_0"])
@pytest.mark.parametrize("context", [256, 1000])
@pytest.mark.parametrize(("model_type", "mtp"), [("qwen3_next", 0), ("qwen3_5", 1), ("qwen3_5_moe", 1)])
def test_only_layers_of_attention_have_a_cache_and_the_others_a_state(
    model_type: str, mtp: int, context: int, kv_type: str, make: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CASES 27, llama-toolchest#166: 2 of 8 layers, as llama.cpp logs; MTP layers have none."""
    log = Endless()
    monkeypatch.setattr(engine, "_log", log)
    file, _ = convert(make(model_type, mtp=mtp, num_hidden_layers=8, linear_num_value_heads=6), "q8_0")
    del log[:]
    with closing(GgufRuntime(file, context=context, threads=1, kv_type=kv_type, flash_attention=True)) as runtime:
        text = "".join(log)
        cells, bytes_each = -(-context // 256) * 256, {"f32": 4, "f16": 2, "q8_0": 34 / 32}[kv_type]
        keys_and_values = 2 * 2 * (2 * 32) * cells * bytes_each
        channels, state = 2 * 2 * 16 + 6 * 16, 6 * 16 * 16
        assert runtime.kv_bytes == keys_and_values + 6 * (3 * channels + state) * 4
        shown = re.findall(r"size = +([\d.]+) MiB \( *\d+ cells, +(\d+) layers", text)
        assert [layers for _, layers in shown] == ["2", "8"]  # of the recurrent part, llama.cpp logs all layers
        assert f"{keys_and_values / 2**20:.2f}" == shown[0][0]
        assert f"{(runtime.kv_bytes - keys_and_values) / 2**20:.2f}" == shown[1][0]


@pytest.mark.parametrize("model_type", FAMILY[2:])
def test_a_hybrid_can_be_timed_and_replies(model_type: str, make: Callable[..., Path]) -> None:
    """Each call begins with an empty state: the same prompt gets the same reply."""
    file, _ = convert(make(model_type, mtp=1), "q8_0")
    with closing(GgufRuntime(file, context=256, threads=1)) as runtime:
        ids = np.arange(20, dtype=np.int32)
        assert runtime.prefill(ids) > 0
        assert runtime.decode(3) > 0
        first = runtime.reply(ids.tolist(), 8)
        logits = [part.copy() for part in runtime.score(ids, 0)]
        assert runtime.reply(ids.tolist(), 8) == first
        np.testing.assert_array_equal([*runtime.score(ids, 0)], logits)
