"""Checkpoints as people have them: experts alone, a hundred shards, mixed dtypes, and the Hub's folders of links."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from checkpoints import INDEX, problems_of
from family import tiny as made
from fp8_blocks import Raw, raw, valued, write_raw
from support import Shape, random_tensors, stored, write_checkpoint

from pipeline.errors import CheckpointError
from pipeline.models import spec_of
from pipeline.source import checkpoint as reading
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Span, TensorSpec


def stored_in(folder: Path) -> dict[str, Raw]:
    """The tensors of model.safetensors, which is removed."""
    from safetensors.torch import load_file

    found = {
        name: raw(weight.float().numpy(), "F32") for name, weight in load_file(folder / "model.safetensors").items()
    }
    (folder / "model.safetensors").unlink()
    return found


def sharded(folder: Path, tensors: dict[str, Raw], count: int) -> list[str]:
    """Tensors in turns over shards with an index; the shards' names."""
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    placed = {name: names[i % count] for i, name in enumerate(tensors)}
    for shard in names:
        write_raw(folder / shard, {name: tensors[name] for name in placed if placed[name] == shard})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": placed}))
    return names


def check_weights(folder: Path, tensors: dict[str, Raw]) -> None:
    """Every tensor of the model is read from where it lies."""
    with Checkpoint(folder) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        checkpoint.check(spec)
        for tensor in spec.tensors:
            parts = [valued(tensors[span.name]).reshape(-1, tensor.shape[-1]) for span in tensor.stored]
            np.testing.assert_array_equal(checkpoint.tensor(tensor), np.concatenate(parts).reshape(tensor.shape))


# Shards and links


def test_a_hundred_shards(tmp_path: Path) -> None:
    folder = made("qwen3_moe", tmp_path / "c")
    tensors = stored_in(folder)
    assert len(tensors) > 100
    names = sharded(folder, tensors, 100)
    check_weights(folder, tensors)
    with Checkpoint(folder) as checkpoint:
        assert [name for name in checkpoint.identity().files if name.startswith("model-")] == names


def test_an_absent_one_of_a_hundred_shards_is_named_with_its_tensors(tmp_path: Path) -> None:
    folder = made("qwen3_moe", tmp_path / "c")
    tensors = stored_in(folder)
    names = sharded(folder, tensors, 100)
    (folder / names[41]).unlink()
    with pytest.raises(CheckpointError) as caught:
        Checkpoint(folder)
    lines = [line.strip(" -") for line in str(caught.value).splitlines()[1:-1]]
    lost = [name for i, name in enumerate(tensors) if i % 100 == 41]
    assert lines == [f"{names[41]} is absent; {INDEX} puts {', '.join(lost)} there"]


def test_a_snapshot_of_links_to_blobs(tmp_path: Path) -> None:
    """As huggingface_hub lays its cache out: blobs by hash, and a folder of links that bears the commit."""
    source = made("qwen3_5_moe", tmp_path / "source", wrapped=True)
    tensors = stored_in(source)
    sharded(source, tensors, 3)
    storage = tmp_path / "models--some--model"
    snapshot = storage / "snapshots" / ("ab" * 20)
    (storage / "blobs").mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for file in source.iterdir():
        blob = storage / "blobs" / hashlib.sha256(file.read_bytes()).hexdigest()
        file.rename(blob)
        (snapshot / file.name).symlink_to(Path("..") / ".." / "blobs" / blob.name)
    check_weights(snapshot, tensors)
    with Checkpoint(snapshot, "some/model", "ab" * 20) as checkpoint:
        identity = checkpoint.identity()
    assert (identity.name, identity.revision) == ("some/model", "ab" * 20)
    assert {name: digest for name, digest in identity.files.items() if name.startswith("model-")} == {
        link.name: link.resolve().name for link in snapshot.glob("model-*.safetensors")
    }
    broken = next(snapshot.glob("model-00002*"))
    broken.resolve().unlink()
    with pytest.raises(CheckpointError, match=rf"{broken.name} is absent"):
        Checkpoint(snapshot)


# Dtypes


def test_dtypes_may_differ_from_tensor_to_tensor(tmp_path: Path) -> None:
    """float32, float16 and bfloat16 in one file: each is read as what it is."""
    folder = write_checkpoint(tmp_path / "c", Shape("qwen3"))
    kinds = ("F32", "F16", "BF16")
    tensors = {
        name: raw(weights, kinds[i % 3]) for i, (name, weights) in enumerate(random_tensors(Shape("qwen3")).items())
    }
    write_raw(folder / "model.safetensors", tensors)
    check_weights(folder, tensors)
    with Checkpoint(folder) as checkpoint:
        typed = checkpoint.typed(spec_of(checkpoint.config, checkpoint.shapes))
    assert {tensor.name: tensor.dtype for tensor in typed.tensors} == {name: tensors[name][0] for name in tensors}
    assert {tensor.dtype for tensor in typed.tensors} == set(kinds)


def test_experts_of_several_dtypes_are_read_as_float32(tmp_path: Path) -> None:
    folder = made("qwen3_moe", tmp_path / "c")
    tensors = stored_in(folder)
    for i, name in enumerate([name for name in tensors if ".experts." in name]):
        tensors[name] = raw(valued(tensors[name]), ("F16", "BF16", "F32", "F16")[i % 4])
    write_raw(folder / "model.safetensors", tensors)
    check_weights(folder, tensors)
    with Checkpoint(folder) as checkpoint:
        typed = checkpoint.typed(spec_of(checkpoint.config, checkpoint.shapes))
    assert {tensor.dtype for tensor in typed.tensors if tensor.role.startswith("expert_")} == {"F32"}


# Experts that are stored alone (CASES 3, 4)


def test_a_missing_expert_and_unknown_ones_are_named_as_they_are_stored(tmp_path: Path) -> None:
    folder = made("qwen3_5_moe", tmp_path / "c", wrapped=True)
    tensors = stored_in(folder)
    at = "model.language_model.layers.2.mlp.experts"
    del tensors[f"{at}.5.up_proj.weight"]
    tensors[f"{at}.1.down_proj.weight"] = raw(np.ones((64, 31)), "F32")
    tensors[f"{at}.6.gate_proj.weight"] = raw(np.ones((32, 64)), "F32")
    tensors[f"{at}.6.up_proj.weight"] = raw(np.ones((32, 64)), "F32")
    write_raw(folder / "model.safetensors", tensors)
    with Checkpoint(folder) as checkpoint, pytest.raises(CheckpointError) as caught:
        checkpoint.check(spec_of(checkpoint.config, checkpoint.shapes))
    assert {line.strip(" -") for line in str(caught.value).splitlines()[1:-1]} == {
        f"{at}.5.up_proj.weight: missing, expected [32, 64]",
        f"{at}.1.down_proj.weight: expected [64, 32], found [64, 31]",
        f"{at}.6.gate_proj.weight: not a tensor of qwen3_5_moe, [32, 64]",
        f"{at}.6.up_proj.weight: not a tensor of qwen3_5_moe, [32, 64]",
    }


def test_an_expert_of_a_checkpoint_alone_is_named_too(tmp_path: Path) -> None:
    folder = made("qwen3_moe", tmp_path / "c")
    tensors = stored_in(folder)
    del tensors["model.layers.3.mlp.experts.0.gate_proj.weight"]
    write_raw(folder / "model.safetensors", tensors)
    assert "model.layers.3.mlp.experts.0.gate_proj.weight: missing, expected [32, 64]" in problems_of(folder)


# Reads


def test_rows_that_lie_together_are_one_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    pread = reading.pread
    monkeypatch.setattr(reading, "pread", lambda fd, size, at: sizes.append(size) or pread(fd, size, at))
    name = "model.layers.1.mlp.down_proj.weight"  # 64 rows of 128 float32
    with Checkpoint(write_checkpoint(tmp_path / "c", dtype="F32")) as checkpoint:
        shape = checkpoint.tensors[name].shape
        whole = checkpoint.tensor(stored(checkpoint, name))
        runs = ((4, 2), (6, 1), (7, 9), (20, 3), (19, 1), (20, 1))
        spans = tuple(Span(name, shape, start, count) for start, count in runs)
        sizes.clear()
        found = checkpoint.tensor(TensorSpec("some", "", None, (17, 128), spans=spans))
    np.testing.assert_array_equal(found, np.concatenate([whole[start : start + count] for start, count in runs]))
    assert sizes == [12 * 512, 3 * 512, 2 * 512]
