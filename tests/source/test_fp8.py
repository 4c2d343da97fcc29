"""FP8 in blocks (CASES 5: llama.cpp#11991, #14762): code x scale, whatever the blocks and wherever a tensor lies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import problems_of
from family import tiny as made
from fp8_blocks import SETTINGS, Raw, as_fp8, in_blocks, raw, write_raw
from support import Shape, stored, write_checkpoint

from pipeline import artifact
from pipeline.errors import CheckpointError, QuantizationError
from pipeline.models import spec_of
from pipeline.source import fp8
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Span, TensorSpec

UP = "model.layers.0.mlp.up_proj.weight"
SCALES = f"{UP}_scale_inv"


def folder_of(folder: Path, tensors: dict[str, Raw], settings: dict[str, Any] | None = SETTINGS) -> Path:
    folder.mkdir()
    write_raw(folder / "model.safetensors", tensors)
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen3", "quantization_config": settings}))
    return folder


def random(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape, np.float32)


# Values


def test_every_code_is_what_torch_says() -> None:
    import torch

    expected = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(fp8.VALUES, expected)  # NaN equals NaN here
    assert np.isnan(fp8.VALUES[[0x7F, 0xFF]]).all()
    np.testing.assert_array_equal(np.signbit(fp8.VALUES[:0x7F]), False)
    np.testing.assert_array_equal(np.signbit(fp8.VALUES[0x80:0xFF]), True)
    assert (fp8.VALUES[0x01], fp8.VALUES[0x08], fp8.VALUES[0x7E]) == (2.0**-9, 2.0**-6, 448)


@pytest.mark.parametrize("scales", ["F32", "BF16", "F16"])
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((256, 256), (128, 128)),
        ((300, 200), (128, 128)),  # ragged both ways
        ((5, 7), (128, 128)),  # less than a block
        ((129, 1), (128, 128)),
        ((100, 96), (64, 32)),
        ((3, 150, 130), (128, 128)),  # blocks begin anew with each expert
        ((2, 128, 256), (128, 128)),
    ],
)
def test_weights_are_code_times_scale(shape: tuple[int, ...], block: tuple[int, int], scales: str, tmp_path: Path):
    name = "x.weight" if len(shape) == 2 else "experts.gate_up_proj"
    codes, scale, expected = in_blocks(random(*shape), block, scales)
    path = folder_of(
        tmp_path / "c", {name: codes, f"{name}_scale_inv": scale}, SETTINGS | {"weight_block_size": [*block]}
    )
    with Checkpoint(path) as checkpoint:
        tensor = stored(checkpoint, name)
        found = checkpoint.tensor(tensor)
        assert found.dtype == np.float32
        np.testing.assert_array_equal(found, expected)
        rows = expected.reshape(-1, shape[-1])
        for start, count in ((0, 1), (len(rows) // 2 - 1, 3), (len(rows) - 1, 1), (1, len(rows) - 1), (0, 0)):
            np.testing.assert_array_equal(checkpoint.rows(tensor, start, count), rows[start : start + count])


def test_blocks_are_128_by_128_where_config_does_not_say(tmp_path: Path) -> None:
    codes, scale, expected = in_blocks(random(130, 140))
    path = folder_of(tmp_path / "c", {"x": codes, "x_scale_inv": scale}, {"quant_method": "fp8"})
    with Checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor(stored(checkpoint, "x")), expected)
    path = folder_of(tmp_path / "d", {"x": codes, "x_scale_inv": scale}, None)  # nor of FP8 at all: the tensors do
    with Checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor(stored(checkpoint, "x")), expected)


def test_spans_of_fp8_and_other_dtypes_are_float32(tmp_path: Path) -> None:
    """Mixed dtypes in one file, and in one tensor's spans."""
    weights = random(4, 130)
    codes, scale, expected = in_blocks(weights)
    others = {dtype: raw(weights, dtype) for dtype in ("F32", "F16", "BF16")}
    path = folder_of(tmp_path / "c", {"x": codes, "x_scale_inv": scale} | others)
    spans = tuple(Span(name, (4, 130), 1, 2) for name in ("BF16", "x", "F32", "F16"))
    with Checkpoint(path) as checkpoint:
        found = checkpoint.tensor(TensorSpec("joined", "", None, (8, 130), spans=spans))
    import torch

    as_read = [torch.from_numpy(weights).to(kind).float().numpy() for kind in (torch.bfloat16, torch.float16)]
    np.testing.assert_array_equal(
        found, np.concatenate([part[1:3] for part in (as_read[0], expected, weights, as_read[1])])
    )


# Whole checkpoints


@pytest.mark.parametrize(
    ("model_type", "settings"),
    [
        ("qwen3", {}),
        ("qwen3_moe", {"layout": "per-expert"}),
        ("qwen3_moe", {"layout": "fused"}),
        ("qwen3_5_moe", {"layout": "fused", "wrapped": True, "mtp": 1}),
        ("qwen3_next", {"layout": "per-expert", "mtp": 1}),
    ],
)
def test_a_whole_checkpoint_in_fp8(model_type: str, settings: dict[str, Any], tmp_path: Path) -> None:
    source = made(model_type, tmp_path / "source", **settings)
    expected = as_fp8(source, tmp_path / "fp8", (32, 48))
    with Checkpoint(source) as plain, Checkpoint(tmp_path / "fp8") as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        assert spec == spec_of(plain.config, plain.shapes)  # scales are no tensors of their own
        checkpoint.check(spec)
        typed = checkpoint.typed(spec)
        assert {tensor.dtype for tensor in (*typed.tensors, *typed.mtp)} == {"F32"}
        for tensor in (*spec.tensors, *spec.mtp):
            parts = [expected[span.name].reshape(-1, tensor.shape[-1]) for span in tensor.stored]
            np.testing.assert_array_equal(checkpoint.tensor(tensor), np.concatenate(parts).reshape(tensor.shape))


def test_identity_covers_the_scales(tmp_path: Path) -> None:
    """They are in the files whose hashes it has."""
    source = write_checkpoint(tmp_path / "source", dtype="F32")

    def other(tensors: dict[str, Raw]) -> None:
        tensors[SCALES] = raw(np.full((1, 1), 2.0), "F32")

    as_fp8(source, tmp_path / "a")
    as_fp8(source, tmp_path / "b", change=other)
    with Checkpoint(tmp_path / "a") as a, Checkpoint(tmp_path / "b") as b:
        first, second = a.identity().files, b.identity().files
    assert {name for name in first if first[name] != second[name]} == {"model.safetensors"}


# What is wrong is named


def without(*names: str) -> Callable[[dict[str, Raw]], None]:
    def change(tensors: dict[str, Raw]) -> None:
        for name in names:
            del tensors[name]

    return change


def with_scales(shape: tuple[int, ...], dtype: str = "F32") -> Callable[[dict[str, Raw]], None]:
    return lambda tensors: tensors.update({SCALES: raw(np.ones(shape, np.float32), dtype)})


def vector_in_fp8(tensors: dict[str, Raw]) -> None:
    tensors["model.norm.weight"] = raw(np.ones(64), "F8_E4M3")


def with_another(tensors: dict[str, Raw]) -> None:
    tensors["model.layers.0.mlp.up_proj.weight_scale"] = raw(np.ones(1), "F32")
    del tensors[SCALES]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (without(SCALES), {f"{UP}: FP8 without scales of its blocks: {SCALES} is missing, expected [1, 1]"}),
        (with_scales((2, 1)), {f"{SCALES}: expected [1, 1], by blocks of 128 x 128, found [2, 1]"}),
        (with_scales((1,)), {f"{SCALES}: expected [1, 1], by blocks of 128 x 128, found [1]"}),
        (
            with_scales((1, 1), "F8_E4M3"),
            {f"{SCALES}: dtype F8_E4M3 is not read of scales, only F32, F16, BF16"},
        ),
        (
            without(UP),
            {f"{UP}: missing, expected [128, 64]", f"{SCALES}: scales of {UP}, which is missing, expected F8_E4M3"},
        ),
        (
            lambda tensors: tensors.update({UP: raw(np.ones((128, 64)), "BF16")}),
            {f"{SCALES}: scales of {UP}, which is BF16, expected F8_E4M3"},
        ),
        (vector_in_fp8, {"model.norm.weight: FP8 is read of matrices only, found [64]"}),
        (
            with_another,  # a scale for the whole tensor
            {
                f"{UP}: FP8 without scales of its blocks: {SCALES} is missing, expected [1, 1]",
                "model.layers.0.mlp.up_proj.weight_scale: not a tensor of qwen2, [1]",
            },
        ),
        (
            lambda tensors: tensors.update({UP: raw(np.ones((128, 64)), "F8_E5M2")}),
            {
                f"{UP}: dtype F8_E5M2 is not read, only F32, F16, BF16, and F8_E4M3 in blocks",
                f"{SCALES}: scales of {UP}, which is F8_E5M2, expected F8_E4M3",
            },
        ),
    ],
    ids=["missing", "rows", "dimensions", "dtype", "no weight", "bf16 weight", "vector", "per tensor", "e5m2"],
)
def test_scales_that_do_not_fit_are_named(
    change: Callable[[dict[str, Raw]], None], expected: set[str], tmp_path: Path
) -> None:
    as_fp8(write_checkpoint(tmp_path / "source", dtype="F32"), tmp_path / "c", change=change)
    assert {line.strip(" -") for line in problems_of(tmp_path / "c").splitlines()[1:-1]} == expected


def nan_code(tensors: dict[str, Raw]) -> None:
    dtype, shape, data = tensors[UP]
    tensors[UP] = dtype, shape, data[:100] + b"\x7f\xff" + data[102:]


@pytest.mark.parametrize(
    "change",
    [
        nan_code,
        lambda tensors: tensors.update({SCALES: raw(np.full((1, 1), np.inf), "F32")}),
        lambda tensors: tensors.update({SCALES: raw(np.full((1, 1), np.nan), "F32")}),
    ],
    ids=["code", "infinite scale", "scale that is no number"],
)
def test_weights_that_are_not_finite_are_found(change: Callable[[dict[str, Raw]], None], tmp_path: Path) -> None:
    as_fp8(write_checkpoint(tmp_path / "source", dtype="F32"), tmp_path / "c", change=change)
    for format_name, scheme in (("gguf", "q8_0"), ("mlx", "int8")):
        with pytest.raises(QuantizationError, match=rf"{UP}: .*not finite") as caught:
            artifact.convert(tmp_path / "c", format_name, scheme, tmp_path / format_name)
        assert str(caught.value).count("not finite") == 1


# What config.json says


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"fmt": "e5m2"}, r"fmt is 'e5m2', only 'e4m3' is read"),
        ({"weight_block_size": None}, "weight_block_size is null: a scale for a whole tensor is not read"),
        ({"weight_block_size": [128]}, r"weight_block_size: expected two positive integers, found \[128\]"),
        ({"weight_block_size": [128, 0]}, r"weight_block_size: expected two positive integers, found \[128, 0\]"),
    ],
)
def test_fp8_of_another_kind_is_refused(settings: dict[str, Any], reason: str, tmp_path: Path) -> None:
    codes, scale, _ = in_blocks(random(4, 4))
    path = folder_of(tmp_path / "c", {"x": codes, "x_scale_inv": scale}, SETTINGS | settings)
    with pytest.raises(CheckpointError, match=rf"quantization_config, fp8\): {reason}.* Give the bf16 checkpoint"):
        Checkpoint(path)


@pytest.mark.parametrize("method", ["gptq", "compressed-tensors"])
def test_other_methods_are_refused_in_the_text_part_too(method: str, tmp_path: Path) -> None:
    config = {"text_config": {"quantization_config": {"quant_method": method}}}
    path = write_checkpoint(tmp_path / "c", config=config)
    with pytest.raises(
        CheckpointError, match=rf"already quantized \(config.json: text_config.quantization_config, {method}"
    ):
        Checkpoint(path)


def test_fp8_of_which_no_tensor_is_there_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", Shape(), config={"quantization_config": SETTINGS})
    with pytest.raises(CheckpointError, match="says quantization_config, fp8, but no tensor is F8_E4M3"):
        Checkpoint(path)
