"""MLX folders of models with experts and of hybrids that others made: read, scored, and refused where they are not of
the checkpoint.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from family import FAMILY
from family_folders import HYBRIDS, IDS, checkpoint, convert, loaded, logits, source_of, theirs
from folders import GONE, Tensors, loads, rewritten

from pipeline import artifact as artifacts
from pipeline.errors import ArtifactError
from pipeline.formats.mlx import reader
from pipeline.formats.mlx.run import MlxRuntime
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A checkpoint, and what mlx_lm.convert makes of it: each once."""
    found: dict[str, tuple[Path, Path]] = {}

    def make(model_type: str) -> tuple[Path, Path]:
        if model_type not in found:
            place = tmp_path_factory.mktemp(model_type)
            source = source_of(model_type, place)
            found[model_type] = source, theirs(source, "int8-g32", place)
        return found[model_type]

    return make


Made = Callable[[str], tuple[Path, Path]]


def described(folder: Path, source: Path) -> Artifact:
    with Checkpoint(source) as found:
        return artifacts.describe(folder, "mlx", found)


@pytest.mark.parametrize("model_type", FAMILY)
def test_folders_of_mlx_lms_making_are_described_and_scored(model_type: str, made: Made) -> None:
    source, folder = made(model_type)
    artifact = described(folder, source)
    types = {"int8-g32", "BF16", "int8-g64"} - ({"int8-g64"} if model_type in ("qwen2_moe", "qwen3_5") else set())
    assert (artifact.scheme, artifact.effective_types.keys()) == ("int8-g32", types)
    with Checkpoint(source) as found:
        assert artifact.weights == sum(int(np.prod(tensor.shape)) for tensor in found.tensors.values())
    expected = logits(loaded(folder), IDS)
    with closing(MlxRuntime(folder, context=64)) as runtime:
        by_torch = np.concatenate([*runtime.score(IDS, 0)])
    np.testing.assert_allclose(by_torch, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_names_that_mlx_lm_changes_or_leaves_out_are_no_others(model_type: str, made: Made, tmp_path: Path) -> None:
    """As in folders of models that read images as well, or without the part of names that says which they are."""
    source, folder = made(model_type)
    expected = reader.read(folder).tensors

    def larger(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[name.replace("language_model.model.", "model.language_model.")] = tensors.pop(name)
        for name in ("vision_tower.proj.weight", "model.visual.proj.weight", "language_model.mtp.fc.weight"):
            tensors[name] = "BF16", [2], bytes(4)

    def bare(tensors: Tensors) -> None:
        for name in [*tensors]:
            tensors[name.removeprefix("language_model.")] = tensors.pop(name)

    for i, change in enumerate((larger, bare)):
        copy = rewritten(folder, tmp_path / str(i), change=change)
        assert loads(copy)
        found = reader.read(copy).tensors
        assert found.keys() == expected.keys()
        for name, tensor in found.items():
            assert tensor.planned == expected[name].planned
            np.testing.assert_array_equal(reader.whole(tensor), reader.whole(expected[name]))
        assert described(copy, source).effective_types == described(folder, source).effective_types


def test_what_the_checkpoint_has_beside_it_is_said(tmp_path: Path) -> None:
    source = checkpoint("qwen3_5", tmp_path / "c", wrapped=True, mtp=1)
    made = convert(source, "int4", tmp_path / "out")
    assert [part.part for part in made.dropped] == ["vision tower", "MTP layers"]
    assert described(tmp_path / "out", source).dropped == made.dropped


@pytest.mark.parametrize("model_type", FAMILY)
def test_a_checkpoint_itself_is_to_be_converted(model_type: str, tmp_path: Path) -> None:
    source = checkpoint(model_type, tmp_path / "c")
    config = json.loads((source / "config.json").read_text())
    config |= {"num_experts": 6, "partial_rotary_factor": 0.5, "rope_theta": 10_000.0, "model_type": model_type}
    (source / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"c holds tensors as a checkpoint does, which mlx-lm rearranges") as raised:
        reader.read(source)
    said = "mlp.experts.0.down_proj" if model_type not in HYBRIDS else "layers.0.linear_attn.conv1d.weight"
    assert said in str(raised.value)
    assert str(raised.value).endswith("Convert it, and give the folder that comes of it.")


@pytest.mark.parametrize(
    ("model_type", "config", "problem"),
    [
        ("qwen3_moe", {"num_experts_per_tok": 3}, "num_experts_per_tok: expected 2, found 3"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob: expected True, found False as mlx-lm"),
        ("qwen3_next", {"norm_topk_prob": GONE}, "norm_topk_prob: expected True, found False as mlx-lm"),
        ("qwen3_next", {"partial_rotary_factor": 0.25}, "rotated dims of a head: expected 16, found 8 as mlx-lm reads"),
        ("qwen3_5", {"rope_parameters": {"rope_theta": 1e4}}, "rotated dims of a head: expected 16, found 8 as mlx-lm"),
        ("qwen3_5", {"rope_parameters": GONE}, "rope_theta: expected 10000.0, found 100000.0 as mlx-lm"),
        (
            "qwen3_5",
            {"linear_num_value_heads": 8, "linear_value_head_dim": 16},
            "sizes of DeltaNets: expected 2 x 32 of keys, 4 x 32 of values, found 2 x 32 of keys, 8 x 16 of values",
        ),
    ],
)  # fmt: skip
def test_settings_that_shapes_do_not_show_are_compared(
    model_type: str, config: dict[str, Any], problem: str, made: Made, tmp_path: Path
) -> None:
    source, folder = made(model_type)

    def fitting(tensors: Tensors) -> None:  # vectors of which each head has one, or each of its dims
        for name, (dtype, _, data) in [*tensors.items()]:
            if "linear_value_head_dim" in config and name.endswith(("A_log", "dt_bias", "linear_attn.norm.weight")):
                size = 16 if name.endswith("norm.weight") else 8
                tensors[name] = dtype, [size], (data * 2)[: size * (4 if dtype == "F32" else 2)]
            for part in ("in_proj_a", "in_proj_b"):
                if "linear_value_head_dim" in config and part in name:
                    dtype, shape, data = tensors[name]
                    tensors[name] = dtype, [8, *shape[1:]], data * 2

    with pytest.raises(ArtifactError) as raised:
        described(rewritten(folder, tmp_path / "a", config, change=fitting), source)
    assert problem in str(raised.value)


def test_a_tensor_that_is_missing_is_named(made: Made, tmp_path: Path) -> None:
    _, folder = made("qwen3_5_moe")
    name = "language_model.model.layers.1.mlp.switch_mlp.up_proj.scales"

    def without(tensors: Tensors) -> None:
        del tensors[name]

    with pytest.raises(ArtifactError, match=r"up_proj\.weight: U32 \[6, 64, 16\] is not F32, F16, BF16"):
        reader.read(rewritten(folder, tmp_path / "a", change=without))


def test_a_head_that_mlx_lm_has_whatever_config_json_says_is_used(made: Made, tmp_path: Path) -> None:
    source, folder = made("qwen2_moe")
    said_tied = rewritten(folder, tmp_path / "a", {"tie_word_embeddings": True})
    assert described(said_tied, source).tensors_sha256 == described(folder, source).tensors_sha256
    with closing(MlxRuntime(said_tied, context=64)) as runtime:
        by_torch = np.concatenate([*runtime.score(IDS, 0)])
        assert runtime.native is not None
        by_mlx = np.concatenate([*runtime.native.score(IDS, 0)])
    np.testing.assert_allclose(by_torch, by_mlx, rtol=0, atol=1e-4)
    np.testing.assert_allclose(by_torch, logits(loaded(folder), IDS), rtol=0, atol=1e-4)
