"""Safetensors in, float32 out; tied heads, names and shapes, quantized sources."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import as_bf16, one_tensor, problems_of, raw_file
from support import Shape, random_tensors, stored, write_checkpoint

from pipeline.errors import CheckpointError
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint

# Reading


@pytest.mark.parametrize(
    ("dtype", "bits", "value"),
    [
        ("BF16", 0x3F80, 1.0),
        ("BF16", 0xC049, -3.140625),
        ("BF16", 0x0001, 2.0**-133),  # the smallest denormal
        ("BF16", 0x807F, -127 * 2.0**-133),  # the largest, negative
        ("BF16", 0x8000, -0.0),
        ("BF16", 0x7F7F, 255 * 2.0**120),  # the largest finite
        ("BF16", 0xFF80, -np.inf),
        ("F16", 0x3C00, 1.0),
        ("F16", 0x0001, 2.0**-24),
        ("F16", 0x83FF, -1023 * 2.0**-24),
        ("F16", 0x8000, -0.0),
        ("F16", 0x7BFF, 65504.0),
        ("F16", 0x7C00, np.inf),
        ("F32", 0x3F800000, 1.0),
        ("F32", 0x00000001, 2.0**-149),
        ("F32", 0x80000000, -0.0),
        ("F32", 0x7F7FFFFF, (2**24 - 1) * 2.0**104),
    ],
)
def test_a_value_is_widened_exactly(dtype: str, bits: int, value: float, tmp_path: Path) -> None:
    data = bits.to_bytes(4 if dtype == "F32" else 2, "little")
    with Checkpoint(one_tensor(tmp_path / "c", dtype, [1], data)) as checkpoint:
        found = checkpoint.tensor(stored(checkpoint, "x"))
    assert found.dtype == np.float32
    assert found.tobytes() == struct.pack("<f", value)  # bits, so that -0.0 is not 0.0


def test_every_value_of_f16_is_widened_exactly(tmp_path: Path) -> None:
    data = np.arange(1 << 16, dtype="<u2").tobytes()
    with Checkpoint(one_tensor(tmp_path / "c", "F16", [256, 256], data)) as checkpoint:
        found = checkpoint.tensor(stored(checkpoint, "x"))
    expected = np.array(struct.unpack(f"<{1 << 16}e", data)).reshape(256, 256)  # Python's own half
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_every_value_of_bf16_keeps_its_bits(tmp_path: Path) -> None:
    data = np.arange(1 << 16, dtype="<u2").tobytes()
    with Checkpoint(one_tensor(tmp_path / "c", "BF16", [256, 256], data)) as checkpoint:
        found = checkpoint.tensor(stored(checkpoint, "x"))
    assert found.tobytes() == b"".join(b"\0\0" + data[i : i + 2] for i in range(0, len(data), 2))


@pytest.mark.parametrize("dtype", ["BF16", "F16", "F32"])
def test_rows_are_a_slice_of_the_tensor(dtype: str, tmp_path: Path) -> None:
    tensors = random_tensors(Shape())
    path = write_checkpoint(tmp_path / "c", dtype=dtype)
    name = "model.layers.1.mlp.down_proj.weight"
    expected = {"BF16": as_bf16, "F16": lambda w: w.astype(np.float16).astype(np.float32), "F32": lambda w: w}[dtype](
        tensors[name]
    )
    with Checkpoint(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint.tensor(stored(checkpoint, name)), expected)
        for start, count in ((0, 64), (0, 1), (17, 5), (63, 1), (30, 0)):
            found = checkpoint.rows(stored(checkpoint, name), start, count)
            assert found.shape == (count, 128)
            np.testing.assert_array_equal(found, expected[start : start + count])


def test_a_vector_is_one_row(tmp_path: Path) -> None:
    expected = random_tensors(Shape())["model.norm.weight"]
    with Checkpoint(write_checkpoint(tmp_path / "c", dtype="F32")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.rows(stored(checkpoint, "model.norm.weight"), 0, 1), expected[None])
        np.testing.assert_array_equal(checkpoint.tensor(stored(checkpoint, "model.norm.weight")), expected)


def test_a_path_with_spaces_and_other_letters(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "Mödèle 模型 с пробелом", shards=2)
    with Checkpoint(path) as checkpoint:
        checkpoint.check(spec_of(checkpoint.config))
        weights = random_tensors(Shape())["model.embed_tokens.weight"]
        np.testing.assert_array_equal(
            checkpoint.tensor(stored(checkpoint, "model.embed_tokens.weight")), as_bf16(weights)
        )
        assert checkpoint.identity().name == "Mödèle 模型 с пробелом"


def test_the_embedded_checkpoint_is_whole(tiny: Path) -> None:
    with Checkpoint(tiny) as checkpoint:
        checkpoint.check(spec_of(checkpoint.config))
        assert len(checkpoint.tensors) == 68


# A tied head (llama.cpp#6578)


def equal_head(tensors: dict[str, np.ndarray]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()


def other_head(tensors: dict[str, np.ndarray]) -> None:
    equal_head(tensors)
    tensors["lm_head.weight"][-1, -1] += 1


def test_a_tied_checkpoint_may_hold_the_head_again(tmp_path: Path) -> None:
    with Checkpoint(write_checkpoint(tmp_path / "c", change=equal_head, shards=2)) as checkpoint:
        assert "lm_head.weight" in checkpoint.tensors
        spec = spec_of(checkpoint.config)
        checkpoint.check(spec)
        assert "lm_head.weight" not in {tensor.name for tensor in spec.tensors}


def test_a_tied_head_that_differs_in_its_last_weight_is_refused(tmp_path: Path) -> None:
    text = problems_of(write_checkpoint(tmp_path / "c", change=other_head))
    assert "lm_head.weight: differs from model.embed_tokens.weight" in text
    assert "tie_word_embeddings" in text


def test_a_tied_head_that_differs_beyond_the_first_block_is_refused(tmp_path: Path) -> None:
    shape = Shape(layers=1, hidden=256, head_dim=64, vocab=9000)  # 2.3M weights, compared in blocks of 1M
    assert "lm_head.weight: differs" in problems_of(write_checkpoint(tmp_path / "c", shape, change=other_head))


def test_a_tied_head_of_another_shape_is_refused(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"][:-1]

    assert "lm_head.weight: differs" in problems_of(write_checkpoint(tmp_path / "c", change=add_head))


def test_an_untied_checkpoint_needs_its_head(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", config={"tie_word_embeddings": False})
    assert "lm_head.weight: missing, expected [272, 64]" in problems_of(path)


# Names and shapes (unsloth#6754)


def test_every_unknown_missing_and_misshapen_tensor_is_in_one_error(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        del tensors["model.layers.1.self_attn.q_proj.bias"]
        tensors["model.layers.0.mlp.up_proj.weight"] = np.ones((127, 64), np.float32)
        tensors["model.layers.0.self_attn.k_proj.bias"] = np.ones((1, 32), np.float32)
        tensors["model.layers.7.mlp.up_proj.weight"] = np.ones((3, 5), np.float32)
        tensors["visual.patch_embed.proj.weight"] = np.ones((4,), np.float32)

    lines = problems_of(write_checkpoint(tmp_path / "c", change=change)).splitlines()
    assert {line.strip(" -") for line in lines[1:-1]} == {
        "model.norm.weight: missing, expected [64]",
        "model.layers.1.self_attn.q_proj.bias: missing, expected [64]",
        "model.layers.0.mlp.up_proj.weight: expected [128, 64], found [127, 64]",
        "model.layers.0.self_attn.k_proj.bias: expected [32], found [1, 32]",
        "model.layers.7.mlp.up_proj.weight: not a tensor of qwen2, [3, 5]",
        "visual.patch_embed.proj.weight: not a tensor of qwen2, [4]",
    }
    assert str(tmp_path / "c") in lines[0]


@pytest.mark.parametrize("count", [40, 41])
def test_many_problems_are_told_by_what_the_tensors_are_called(count: int, tmp_path: Path) -> None:
    """Beyond 40 of them, numbers aside; none is left out."""
    names = [f"model.layers.{i}.odd.{part}" for i in range(19) for part in ("weight", "bias")]
    names += ["vision2d.proj.weight", "text", "other"][: count - 39]

    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        tensors.update({name: np.ones(4, np.float32) for name in names})

    lines = problems_of(write_checkpoint(tmp_path / "c", change=change)).splitlines()[1:-1]
    assert [line.strip(" -") for line in lines] == [
        "model.norm.weight: missing, expected [64]",
        *(
            [f"{name}: not a tensor of qwen2, [4]" for name in sorted(names)]
            if count == 40
            else [
                "model.layers.N.odd.bias, 19 tensors: not a tensor of qwen2, [4]",
                "model.layers.N.odd.weight, 19 tensors: not a tensor of qwen2, [4]",
                "text: not a tensor of qwen2, [4]",
                "vision2d.proj.weight: not a tensor of qwen2, [4]",
            ]
        ),
    ]


def test_layers_that_config_json_promises_and_no_file_has_are_told_together(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c", Shape("qwen3"), config={"num_hidden_layers": 100})
    lines = problems_of(checkpoint).splitlines()[1:-1]
    assert "  - model.layers.N.self_attn.k_proj.weight, 98 tensors: missing, expected [32, 64]" in lines
    assert len(lines) == 11  # the tensors of a layer


# Sources that are quantized (llama.cpp#7505, #23758, #11991)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}, "quantization_config, gptq"),
        ({"quantization_config": {"quant_method": "awq", "bits": 4}}, "quantization_config, awq"),
        (
            {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True}},
            "quantization_config, bitsandbytes",
        ),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization, MLX"),
    ],
)
def test_a_quantized_source_is_refused_with_the_reason(config: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", config=config)
    with pytest.raises(CheckpointError, match=rf"already quantized \(config\.json: {reason}\).*give the original"):
        Checkpoint(path)


def test_a_null_quantization_config_is_no_quantization(tmp_path: Path) -> None:
    with Checkpoint(write_checkpoint(tmp_path / "c", config={"quantization_config": None})) as checkpoint:
        checkpoint.check(spec_of(checkpoint.config))


# Weights of other dtypes


def with_dtype(path: Path, tensors: dict[str, np.ndarray], dtypes: dict[str, tuple[str, int]]) -> None:
    """model.safetensors in F32, but for the tensors whose dtype and bytes per weight are given."""
    header, blobs, offset = {}, [], 0
    for name, weights in tensors.items():
        dtype, size = dtypes.get(name, ("F32", 4))
        blob = weights.astype("<f4").tobytes() if dtype == "F32" else b"\x38" * size * weights.size
        header[name] = {"dtype": dtype, "shape": list(weights.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    (path / "model.safetensors").write_bytes(raw_file(json.dumps(header).encode(), b"".join(blobs)))


UP = "model.layers.0.mlp.up_proj.weight"


def test_a_tensor_of_another_dtype_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    with_dtype(path, random_tensors(Shape()), {UP: ("F64", 8)})
    assert f"{UP}: dtype F64 is not read, only F32, F16, BF16, and F8_E4M3 in blocks" in problems_of(path)


def test_an_embedding_of_another_dtype_beside_a_tied_head_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(Shape())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    path = write_checkpoint(tmp_path / "c")
    with_dtype(path, tensors, {"model.embed_tokens.weight": ("F64", 8)})
    assert "model.embed_tokens.weight: dtype F64 is not read" in problems_of(path)
