"""The model of our own reader is the one that transformers loads, to the bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family import MODEL_TYPES
from family import tiny as made
from fp8_blocks import as_fp8
from support import Shape, write_checkpoint

from pipeline import torch_model
from pipeline.errors import CheckpointError
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_runtime import of_checkpoint

IDS = np.random.default_rng(0).integers(0, 272, 96).astype(np.int32)


def ours(folder: Path) -> Any:
    with Checkpoint(folder) as checkpoint:
        return of_checkpoint(checkpoint)


def transformers_model(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()


def check_same(found: Any, expected: Any, ids: np.ndarray = IDS) -> None:
    """Parameters, buffers, hidden states and logits."""
    import torch

    for kind in ("named_parameters", "named_buffers"):
        mine, theirs = dict(getattr(found._model, kind)()), dict(getattr(expected, kind)())
        assert mine.keys() == theirs.keys()
        assert [name for name in theirs if not torch.equal(mine[name], theirs[name])] == []
    with torch.inference_mode():
        states = expected.model(torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state[0].numpy()
    np.testing.assert_array_equal(found.hidden(ids, 0), states)
    np.testing.assert_array_equal(found.head.weight, expected.lm_head.weight.detach().numpy())


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_a_model_is_what_transformers_loads(model_type: str, tmp_path: Path) -> None:
    folder = made(model_type, tmp_path / "c", dtype="bfloat16")
    check_same(ours(folder), transformers_model(folder))


def test_the_embedded_checkpoint_is_what_transformers_loads(tiny: Path) -> None:
    check_same(ours(tiny), transformers_model(tiny), IDS * 3)


@pytest.mark.parametrize("dtype", ["F32", "F16", "BF16"])
def test_a_tied_qwen2_of_any_dtype(dtype: str, tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Shape("qwen2", tied=True), dtype)
    check_same(ours(folder), transformers_model(folder))


@pytest.mark.parametrize("rope_type", ["yarn", "linear"])
def test_a_scaled_rope(rope_type: str, tmp_path: Path) -> None:
    """Its frequencies are buffers, which no file stores."""
    own = {"rope_type": rope_type, "factor": 4.0, "original_max_position_embeddings": 512}
    folder = write_checkpoint(tmp_path / "c", Shape("qwen3"), config={"rope_scaling": own})
    check_same(ours(folder), transformers_model(folder))


@pytest.mark.parametrize(
    "stored",
    [
        {"wrapped": True, "mtp": 1},  # the text part of a larger model, with what is dropped
        {"layout": "fused", "wrapped": True},
        {"layout": "fused", "mtp": 2},
    ],
)
def test_one_model_in_every_layout(stored: dict[str, Any], tmp_path: Path) -> None:
    alone = made("qwen3_5_moe", tmp_path / "alone")
    check_same(ours(made("qwen3_5_moe", tmp_path / "stored", **stored)), transformers_model(alone))


@pytest.mark.parametrize(("model_type", "layout"), [("qwen3_moe", "per-expert"), ("qwen3_5_moe", "fused")])
def test_fp8_is_the_model_of_the_weights_it_stands_for(model_type: str, layout: str, tmp_path: Path) -> None:
    import torch

    source = made(model_type, tmp_path / "source", layout=layout)
    expected = as_fp8(source, tmp_path / "fp8", (32, 48))
    config = json.loads((source / "config.json").read_text())
    with Checkpoint(source) as checkpoint:
        spec = spec_of(config, checkpoint.shapes)
    weights = {
        tensor.name: torch.from_numpy(
            np.concatenate([expected[span.name].reshape(-1, tensor.shape[-1]) for span in tensor.stored])
        ).reshape(tensor.shape)
        for tensor in spec.tensors
    }
    found = ours(tmp_path / "fp8")
    check_same(found, torch_model.model(torch_model.settings(config), weights))
    assert not hasattr(found._model.config, "quantization_config")  # it is a model of float32 like any other


def test_what_is_left_without_values_is_an_error(tiny: Path) -> None:
    with Checkpoint(tiny) as checkpoint:
        weights = torch_model.read_all(checkpoint, spec_of(checkpoint.config, checkpoint.shapes).tensors)
        read = torch_model.settings(checkpoint.config)
    missing = {name: weight for name, weight in weights.items() if name != "model.norm.weight"}
    with pytest.raises(RuntimeError, match=r"Missing key\(s\) in state_dict: \"model.norm.weight\""):
        torch_model.model(read, missing)
    with pytest.raises(RuntimeError, match=r"Unexpected key\(s\) in state_dict: \"more\""):
        torch_model.model(read, {**weights, "more": weights["model.norm.weight"]})
    with pytest.raises(RuntimeError, match=r"size mismatch for model.norm.weight"):
        torch_model.model(read, {**weights, "model.norm.weight": weights["model.norm.weight"][:-1]})


def test_a_config_that_transformers_does_not_build_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Shape("qwen3"), config={"attention_dropout": "much"})
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as caught:
        of_checkpoint(checkpoint)
    said = str(caught.value)
    assert said.startswith(f"{folder}: transformers ")
    assert said.endswith("Correct its config.json, or fetch it again.")
