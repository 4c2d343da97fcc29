"""Sums of squares of what matrices are multiplied with, against those of every product that torch is asked for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family import MODEL_TYPES, tiny

from pipeline.activations import Watch, gather
from pipeline.errors import MeasurementError
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import ModelSpec, Sums, Windows

IDS = np.random.default_rng(0).integers(0, 256, (2, 24), dtype=np.int32)
WINDOWS = Windows("text", "", "", IDS, np.zeros(2, np.int64))
NEVER = 3  # an expert that no token is routed to
SKIPPED = {"embed", "head", "delta_conv"}


def load(folder: Path) -> Any:
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    ).eval()


def run(model: Any) -> None:
    import torch

    with torch.no_grad():
        for window in IDS:
            model.model(torch.from_numpy(window.astype(np.int64))[None])


@contextmanager
def products() -> Iterator[dict[int, tuple[np.ndarray, int]]]:
    """Of each matrix that torch.nn.functional.linear is given meanwhile, by its address: sums of squares and rows."""
    import torch

    linear, seen = torch.nn.functional.linear, {}

    def recorded(inputs: Any, weight: Any, bias: Any = None) -> Any:
        rows = inputs.detach().reshape(-1, inputs.shape[-1]).numpy().astype(np.float64)
        sums, count = seen.get(weight.data_ptr(), (0, 0))
        seen[weight.data_ptr()] = (sums + (rows**2).sum(0), count + len(rows))
        return linear(inputs, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "linear", recorded)
        yield seen


def matrices(spec: ModelSpec) -> list[Any]:
    return [tensor for tensor in spec.tensors if len(tensor.shape) > 1 and tensor.role not in SKIPPED]


@pytest.mark.parametrize("model_type", MODEL_TYPES)
def test_sums_are_those_of_every_product(model_type: str, tmp_path: Path) -> None:
    folder = tiny(model_type, tmp_path / "tiny", layout="fused")
    with Checkpoint(folder) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        found = gather(checkpoint, WINDOWS, tmp_path)
    model = load(folder)
    weights = dict(model.named_parameters())
    with products() as seen:
        run(model)
    assert found.keys() == {tensor.name for tensor in matrices(spec)}
    for tensor in matrices(spec):
        weight, sums = weights[tensor.name].data, found[tensor.name]
        assert sums.sums.dtype == np.float64
        parts = weight if weight.ndim == 3 else weight[None]
        assert sums.sums.shape == (len(parts), tensor.shape[-1])
        for row, tokens, part in zip(sums.sums, sums.tokens, parts, strict=True):
            expected, count = seen.get(part.data_ptr(), (np.zeros(tensor.shape[-1]), 0))
            assert tokens == count
            np.testing.assert_allclose(row, expected, rtol=1e-5, atol=1e-6 * np.max(expected), err_msg=tensor.name)
        if weight.ndim == 3:
            assert sums.tokens.sum() == IDS.size * spec.experts.used
        else:
            assert sums.tokens.tolist() == [IDS.size]


def test_experts_stored_alone_or_fused_have_the_same_sums(tmp_path: Path) -> None:
    found: list[dict[str, Sums]] = []
    for layout in ("fused", "per-expert"):
        with Checkpoint(tiny("qwen3_moe", tmp_path / layout, layout=layout)) as checkpoint:
            found.append(gather(checkpoint, WINDOWS, tmp_path))
    for name, sums in found[0].items():
        assert np.array_equal(sums.sums, found[1][name].sums)
        assert np.array_equal(sums.tokens, found[1][name].tokens)


def test_an_expert_that_is_never_chosen_has_no_tokens_and_no_sums(tmp_path: Path) -> None:
    folder = tiny("qwen3_moe", tmp_path / "tiny", layout="fused", num_hidden_layers=1)
    with Checkpoint(folder) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
    model = load(folder)
    router = model.model.layers[0].mlp.gate
    router.register_forward_hook(lambda module, args, out: (*out[:2], out[2].where(out[2] != NEVER, NEVER - 1)))
    watch = Watch(spec.tensors)
    with watch.on(model):
        run(model)
    for name in ("gate_up_proj", "down_proj"):
        sums = watch.found()[f"model.layers.0.mlp.experts.{name}"]
        assert sums.tokens[NEVER] == 0
        assert not sums.sums[NEVER].any()
        assert sums.sums[NEVER - 1].all()


def test_a_layer_alone_gives_what_the_whole_model_gives(tmp_path: Path) -> None:
    folder = tiny("qwen3_5_moe", tmp_path / "tiny", layout="fused")
    with Checkpoint(folder) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
    model, whole, alone = load(folder), Watch(spec.tensors), Watch(spec.tensors)
    with whole.on(model):
        run(model)
    with alone.on(model.model.layers[1], "model.layers.1"):
        run(model)
    run(model)  # nothing looks on any more
    expected = {name: sums for name, sums in whole.found().items() if name.startswith("model.layers.1.")}
    assert alone.found().keys() == expected.keys() != set()
    for name, sums in alone.found().items():
        assert np.array_equal(sums.sums, expected[name].sums)
        assert np.array_equal(sums.tokens, expected[name].tokens)


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3_5_moe"])
def test_layer_by_layer_gives_the_same_bits(model_type: str, tmp_path: Path) -> None:
    (tmp_path / "scratch").mkdir()
    with Checkpoint(tiny(model_type, tmp_path / "tiny")) as checkpoint:
        whole = gather(checkpoint, WINDOWS, tmp_path / "scratch")
        alone = gather(checkpoint, WINDOWS, tmp_path / "scratch", layer_by_layer=True)
    assert alone.keys() == whole.keys()
    for name, sums in alone.items():
        assert np.array_equal(sums.sums, whole[name].sums), name
        assert np.array_equal(sums.tokens, whole[name].tokens)
    assert list((tmp_path / "scratch").iterdir()) == []


def test_activations_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    folder = tiny("qwen3", tmp_path / "tiny")
    with Checkpoint(folder) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
    model, watch = load(folder), Watch(spec.tensors)
    model.model.layers[3].post_attention_layernorm.weight.data[:] = float("inf")
    with watch.on(model):
        run(model)
    with pytest.raises(MeasurementError, match=r"float32:\n  - model.layers.3.mlp.gate_proj.weight\n"):
        watch.found()
