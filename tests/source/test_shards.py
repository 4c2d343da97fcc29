"""Shards and their index, files that are cut or no checkpoints at all, and the identity of a folder."""

from __future__ import annotations

import json
import os
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import INDEX, as_bf16, edit_index, folder_of, raw_file
from support import Shape, random_tensors, stored, write_checkpoint, write_safetensors

from pipeline.errors import CheckpointError
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint

# Shards and their index


@pytest.mark.parametrize("shards", [2, 5])
def test_shards_read_as_one_file_does(shards: int, tmp_path: Path) -> None:
    tensors = random_tensors(Shape())
    single, sharded = write_checkpoint(tmp_path / "1"), write_checkpoint(tmp_path / "n", shards=shards)
    with Checkpoint(single) as one, Checkpoint(sharded) as many:
        assert len(many.shards) == shards
        assert many.tensors.keys() == one.tensors.keys() == tensors.keys()
        many.check(spec_of(many.config))
        for name, weights in tensors.items():
            np.testing.assert_array_equal(many.tensor(stored(many, name)), as_bf16(weights))
            np.testing.assert_array_equal(one.tensor(stored(one, name)), as_bf16(weights))


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
        first = {name: checkpoint.tensor(stored(checkpoint, name))[0, 0] for name in checkpoint.tensors}
        assert first == {"a": 1, "b": 2}


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


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    """model.safetensors beside shards: which of them is the checkpoint?"""
    path = write_checkpoint(tmp_path / "c", shards=2)
    write_checkpoint(path, seed=1)
    assert (path / INDEX).exists()
    with pytest.raises(CheckpointError, match=f"holds both model.safetensors and {INDEX} of other files: two sets of"):
        Checkpoint(path)


def test_an_index_of_model_safetensors_itself_is_read(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    names = list(random_tensors(Shape()))
    (path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors")}))
    with Checkpoint(path) as checkpoint:
        assert list(checkpoint.shards) == ["model.safetensors"]
        checkpoint.check(spec_of(checkpoint.config))


@pytest.mark.parametrize("value", [7, None, ["model.safetensors"], {}, True])
def test_an_index_with_a_file_that_is_no_text_is_refused(value: object, tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", shards=2)
    edit_index(path, lambda weight_map: weight_map.update({"model.norm.weight": value}))
    with pytest.raises(CheckpointError, match=r"index\.json has no weight_map\. Fetch it again"):
        Checkpoint(path)


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


def identity(path: Path, name: str | None = None, revision: str | None = None) -> dict[str, Any]:
    with Checkpoint(path, name, revision) as checkpoint:
        return asdict(checkpoint.identity())


def test_identity_names_files_and_no_machine(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "here" / "model", shards=2)
    found = identity(path)
    assert (found["name"], found["revision"]) == ("model", None)
    assert identity(path, "some/model", "abc123") == found | {"name": "some/model", "revision": "abc123"}
    assert set(found["files"]) == {
        "config.json",
        "tokenizer.json",
        INDEX,
        "model-00001-of-00002.safetensors",
        "model-00002-of-00002.safetensors",
    }
    assert str(tmp_path) not in json.dumps(found)
    shutil.copytree(path, tmp_path / "there" / "model")
    assert identity(tmp_path / "there" / "model") == found


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
