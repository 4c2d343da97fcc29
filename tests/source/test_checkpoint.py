"""Safetensors in, float32 out, and every checkpoint that must be refused."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, random_tensors, write_checkpoint, write_safetensors

from pipeline.errors import CheckpointError
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"
BF16_MASK = np.uint32(0xFFFF0000)


def raw_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def folder_of(folder: Path, content: bytes, file: str = "model.safetensors") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / file).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "qwen2"}')
    return folder


def one_tensor(folder: Path, dtype: str, shape: list[int], data: bytes) -> Path:
    header = {"x": {"dtype": dtype, "shape": shape, "data_offsets": [0, len(data)]}}
    return folder_of(folder, raw_file(json.dumps(header).encode(), data))


def as_bf16(weights: np.ndarray) -> np.ndarray:
    """What is left of float32 in `write_safetensors`' BF16."""
    return (weights.view(np.uint32) & BF16_MASK).view(np.float32)


def problems_of(path: Path) -> str:
    """The message of check()."""
    with Checkpoint(path) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.check(spec_of(checkpoint.config))
    return str(caught.value)


def edit_index(path: Path, change: Any) -> None:
    index = json.loads((path / INDEX).read_text())
    change(index["weight_map"])
    (path / INDEX).write_text(json.dumps(index))


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
        found = checkpoint.tensor("x")
    assert found.dtype == np.float32
    assert found.tobytes() == struct.pack("<f", value)  # bits, so that -0.0 is not 0.0


def test_every_value_of_f16_is_widened_exactly(tmp_path: Path) -> None:
    data = np.arange(1 << 16, dtype="<u2").tobytes()
    with Checkpoint(one_tensor(tmp_path / "c", "F16", [256, 256], data)) as checkpoint:
        found = checkpoint.tensor("x")
    expected = np.array(struct.unpack(f"<{1 << 16}e", data)).reshape(256, 256)  # Python's own half
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(np.signbit(found), np.signbit(expected))


def test_every_value_of_bf16_keeps_its_bits(tmp_path: Path) -> None:
    data = np.arange(1 << 16, dtype="<u2").tobytes()
    with Checkpoint(one_tensor(tmp_path / "c", "BF16", [256, 256], data)) as checkpoint:
        found = checkpoint.tensor("x")
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
        np.testing.assert_array_equal(checkpoint.tensor(name), expected)
        for start, count in ((0, 64), (0, 1), (17, 5), (63, 1), (30, 0)):
            found = checkpoint.rows(name, start, count)
            assert found.shape == (count, 128)
            np.testing.assert_array_equal(found, expected[start : start + count])


def test_a_vector_is_one_row(tmp_path: Path) -> None:
    expected = random_tensors(Shape())["model.norm.weight"]
    with Checkpoint(write_checkpoint(tmp_path / "c", dtype="F32")) as checkpoint:
        np.testing.assert_array_equal(checkpoint.rows("model.norm.weight", 0, 1), expected[None])
        np.testing.assert_array_equal(checkpoint.tensor("model.norm.weight"), expected)


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_read_as_one_file_does(shards: int, tmp_path: Path) -> None:
    tensors = random_tensors(Shape())
    single, sharded = write_checkpoint(tmp_path / "1"), write_checkpoint(tmp_path / "n", shards=shards)
    with Checkpoint(single) as one, Checkpoint(sharded) as many:
        assert len(many.shards) == shards
        assert many.tensors.keys() == one.tensors.keys() == tensors.keys()
        many.check(spec_of(many.config))
        for name, weights in tensors.items():
            np.testing.assert_array_equal(many.tensor(name), as_bf16(weights))
            np.testing.assert_array_equal(one.tensor(name), as_bf16(weights))


def test_a_path_with_spaces_and_other_letters(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "Mödèle 模型 с пробелом", shards=2)
    with Checkpoint(path) as checkpoint:
        checkpoint.check(spec_of(checkpoint.config))
        weights = random_tensors(Shape())["model.embed_tokens.weight"]
        np.testing.assert_array_equal(checkpoint.tensor("model.embed_tokens.weight"), as_bf16(weights))
        assert checkpoint.identity().name == "Mödèle 模型 с пробелом"


def test_the_embedded_checkpoint_is_whole(tiny: Path) -> None:
    with Checkpoint(tiny) as checkpoint:
        checkpoint.check(spec_of(checkpoint.config))
        assert len(checkpoint.tensors) == 68


# CASES 2: a tied head


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


# CASES 3: shards


def test_an_absent_shard_is_named_with_its_tensors(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", shards=12)
    gone = "model-00002-of-00012.safetensors"
    held = [n for n, file in json.loads((path / INDEX).read_text())["weight_map"].items() if file == gone]
    assert len(held) == 3
    (path / gone).unlink()
    with pytest.raises(CheckpointError, match=f"{gone} is absent") as caught:
        Checkpoint(path)
    assert all(name in str(caught.value) for name in held)


def test_a_tensor_in_the_index_but_in_no_shard_is_named_with_its_file(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", shards=2)
    edit_index(path, lambda weight_map: weight_map.update({"ghost.weight": "model-00002-of-00002.safetensors"}))
    with pytest.raises(CheckpointError, match=r"ghost\.weight is in no shard; .*model-00002-of-00002\.safetensors"):
        Checkpoint(path)


def test_an_absent_shard_and_an_absent_tensor_are_one_error(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", shards=3)
    edit_index(path, lambda weight_map: weight_map.update({"ghost.weight": "model-00001-of-00003.safetensors"}))
    (path / "model-00003-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="is incomplete") as caught:
        Checkpoint(path)
    assert "model-00003-of-00003.safetensors is absent" in str(caught.value)
    assert "ghost.weight is in no shard" in str(caught.value)


def test_an_absent_tensor_of_a_shard_in_a_subfolder_is_named(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "c", b"", "unused")
    (path / "part").mkdir()
    write_safetensors(path / "part" / "model.safetensors", {"a": np.ones((2, 2), np.float32)})
    weight_map = dict.fromkeys(["a", "ghost.weight"], "part/model.safetensors")
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=r"ghost\.weight is in no shard"):
        Checkpoint(path)


def test_shards_of_one_name_in_two_subfolders_are_both_read(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "c", b"", "unused")
    for part, value in (("a", 1), ("b", 2)):
        (path / part).mkdir()
        write_safetensors(path / part / "model.safetensors", {part: np.full((2, 2), value, np.float32)})
    weight_map = {part: f"{part}/model.safetensors" for part in "ab"}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with Checkpoint(path) as checkpoint:
        assert {name: checkpoint.tensor(name)[0, 0] for name in checkpoint.tensors} == {"a": 1, "b": 2}


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", shards=2)
    second = path / "model-00002-of-00002.safetensors"
    write_safetensors(second, {"model.embed_tokens.weight": np.ones((272, 64), np.float32)})
    with pytest.raises(CheckpointError, match=r"model\.embed_tokens\.weight is in two shards"):
        Checkpoint(path)


@pytest.mark.parametrize("name", ["../evil.safetensors", "/etc/passwd", "sub/../../evil.safetensors"])
def test_an_index_may_not_leave_the_folder(name: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", shards=2)
    write_safetensors(tmp_path / "evil.safetensors", {"x": np.ones(1, np.float32)})
    edit_index(path, lambda weight_map: weight_map.update({"model.norm.weight": name}))
    with pytest.raises(CheckpointError, match=re.escape(repr(name)) + ".*outside the checkpoint folder"):
        Checkpoint(path)


@pytest.mark.parametrize("text", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', "[]"])
def test_an_index_without_a_weight_map_is_refused(text: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    (path / INDEX).write_text(text)
    with pytest.raises(CheckpointError, match="weight_map"):
        Checkpoint(path)


# CASES 4: names and shapes


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


# CASES 5 and 6: sources that are quantized


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


def with_fp8(path: Path, tensors: dict[str, np.ndarray], fp8: str) -> None:
    """model.safetensors in F32, but one tensor in FP8."""
    header, blobs, offset = {}, [], 0
    for name, weights in tensors.items():
        blob = b"\x38" * weights.size if name == fp8 else weights.astype("<f4").tobytes()
        dtype = "F8_E4M3" if name == fp8 else "F32"
        header[name] = {"dtype": dtype, "shape": list(weights.shape), "data_offsets": [offset, offset + len(blob)]}
        blobs.append(blob)
        offset += len(blob)
    (path / "model.safetensors").write_bytes(raw_file(json.dumps(header).encode(), b"".join(blobs)))


def test_an_fp8_tensor_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    with_fp8(path, random_tensors(Shape()), "model.layers.0.mlp.up_proj.weight")
    assert "model.layers.0.mlp.up_proj.weight: dtype F8_E4M3 is not read, only F32, F16, BF16" in problems_of(path)


def test_an_fp8_embedding_beside_a_tied_head_is_refused(tmp_path: Path) -> None:
    tensors = random_tensors(Shape())
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    path = write_checkpoint(tmp_path / "c")
    with_fp8(path, tensors, "model.embed_tokens.weight")
    assert "model.embed_tokens.weight: dtype F8_E4M3 is not read" in problems_of(path)


# Folders and files that are not checkpoints


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "c", b"\x80\x02", "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"holds neither .* It holds pytorch_model\.bin: pickles are not read"):
        Checkpoint(path)


def test_a_folder_without_weights_is_refused(tmp_path: Path) -> None:
    path = folder_of(tmp_path / "c", b"", "unused.txt")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors nor .* Save it as safetensors"):
        Checkpoint(path)


def test_a_path_that_is_no_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"absent is not a folder"):
        Checkpoint(tmp_path / "absent")


def test_a_folder_without_config_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    (path / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config\.json cannot be read: No such file"):
        Checkpoint(path)


@pytest.mark.parametrize("text", ["{", "[]", "null"])
def test_a_config_that_is_no_json_object_is_refused(text: str, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    (path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        Checkpoint(path)


def test_a_file_cut_short_is_refused(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    file = path / "model.safetensors"
    length = file.stat().st_size
    os.truncate(file, length - 1)
    with pytest.raises(
        CheckpointError, match=rf"model\.norm\.weight lies at bytes \d+ to {length}, .*{length - 1}.*cut short"
    ):
        Checkpoint(path)


@pytest.mark.parametrize("kept", [0, 5, 8, 100])
def test_a_file_cut_within_its_header_is_refused(kept: int, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    os.truncate(path / "model.safetensors", kept)
    with pytest.raises(
        CheckpointError, match=rf"model\.safetensors: not a safetensors file: header of \d+ .* file of {kept}\b"
    ):
        Checkpoint(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (raw_file(b"garbage!"), "the header is not JSON"),
        (raw_file(b"\xff\xfe\x00\x01"), "the header is not JSON"),
        (b"<html>404 Not Found</html>", "not a safetensors file: header of"),
        (raw_file(b"[1, 2]"), "header"),
        (raw_file(b"7"), "header"),
        (raw_file(b'{"x": 7}'), "the header entry of x is malformed: 7"),
        (raw_file(b'{"x": {"dtype": "F32", "shape": [1]}}', bytes(4)), "the header entry of x is malformed"),
        (
            raw_file(b'{"x": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 20]}}', bytes(20)),
            r"x \[2, 3\] F32 needs 24 bytes, the header gives it 20",
        ),
        (
            raw_file(b'{"x": {"dtype": "BF16", "shape": [2, 3], "data_offsets": [0, 24]}}', bytes(24)),
            r"x \[2, 3\] BF16 needs 12 bytes, the header gives it 24",
        ),
        (raw_file(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}', bytes(4)), "x lies at bytes"),
        (raw_file(b'{"x": {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]}}', bytes(4)), "x lies at bytes"),
    ],
    ids=[
        "no JSON",
        "no UTF-8",
        "a web page",
        "a list",
        "a number",
        "an entry that is no mapping",
        "no offsets",
        "too few bytes",
        "too many bytes",
        "offsets reversed",
        "offsets before the data",
    ],
)
def test_a_header_that_makes_no_sense_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=rf"model\.safetensors: .*{message}"):
        Checkpoint(folder_of(tmp_path / "c", content))


# Identity


def identity(path: Path, revision: str | None = None) -> dict[str, Any]:
    with Checkpoint(path) as checkpoint:
        return asdict(checkpoint.identity(revision))


def test_identity_names_files_and_no_machine(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "here" / "model", shards=2)
    found = identity(path, "abc123")
    assert (found["name"], found["revision"]) == ("model", "abc123")
    assert set(found["files"]) == {
        "config.json",
        "tokenizer.json",
        INDEX,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert str(tmp_path) not in json.dumps(found)
    shutil.copytree(path, tmp_path / "there" / "model")
    assert identity(tmp_path / "there" / "model", "abc123") == found


def test_identity_holds_the_sha256_of_the_bytes(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    (path / "config.json").write_bytes(b'{"model_type": "abc"}')
    # printf '{"model_type": "abc"}' | sha256sum
    expected = "fcde091ef01726c2165dcbe1ee1d0494a17f9af85790b3158fce44832865b2ab"
    assert identity(path)["files"]["config.json"] == expected


def test_identity_changes_with_one_byte_of_a_weight(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    before = identity(path)
    file = path / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    os.utime(file, ns=(0, 1))  # a clock may be too coarse to tell two writes apart
    after = identity(path)
    assert {name for name in before["files"] if before["files"][name] != after["files"][name]} == {"model.safetensors"}


def test_identity_reads_a_file_again_only_when_size_or_time_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_checkpoint(tmp_path / "c")
    first = identity(path)

    def refuse(file: Path) -> str:
        raise AssertionError(f"{file.name} is read")

    monkeypatch.setattr("pipeline.files.sha256", refuse)
    assert identity(path) == first
    os.utime(path / "config.json", ns=(0, 1))
    with pytest.raises(AssertionError, match=r"config\.json is read"):
        identity(path)
