"""What keeps an MLX folder from being written, and that nothing of it is left."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import convert
from support import Shape, write_checkpoint

from pipeline.errors import (
    ArtifactError,
    CheckpointError,
    OutputError,
    ParamsError,
    QuantizationError,
    TokenizerError,
)
from pipeline.files import new_folder
from pipeline.formats.mlx import write as write_module
from pipeline.formats.mlx.write import write
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.safetensors import Stored
from pipeline.types import Options


def nothing_left(folder: Path) -> bool:
    return list(folder.iterdir()) == []


def refused(source: Path, scheme: str, place: Path, kind: type[Exception]) -> str:
    """What is said, once nothing is left in `place`."""
    place.mkdir()
    with Checkpoint(source) as checkpoint, pytest.raises(kind) as raised, new_folder(place / "out") as partial:
        write(checkpoint, scheme, partial)
    assert nothing_left(place)
    return str(raised.value)


def test_rows_that_do_not_divide_are_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """mlx#1033: mlx-lm leaves these layers as they are and exits 0."""
    source = write_checkpoint(tmp_path / "c", Shape("qwen2", 8, hidden=96, ff=192, heads=4, kv_heads=4))
    monkeypatch.setattr(write_module, "encode_all", None)  # which would be the work
    said = refused(source, "int4", tmp_path / "place", QuantizationError)
    assert "rows of 96 weights do not divide into groups of 64: model.embed_tokens.weight, model.layers.0." in said
    assert "and 46 more" in said  # 6 of each of 8 layers and the embedding, 3 of them named
    assert "Groups of 32 would divide them all: take int8-g32, int6-g32, int4-g32, int3-g32, mxfp8, mxfp4." in said
    monkeypatch.undo()
    artifact = convert(source, "int4-g32", tmp_path / "out")
    assert artifact.effective_types["int4-g32"].tensors == 8 * 7 + 1


def test_weights_that_are_not_finite_are_all_named(tmp_path: Path) -> None:
    def break_two(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5:8] = np.nan
        tensors["model.layers.1.self_attn.q_proj.bias"][2] = -np.inf

    for scheme in ("int4", "mxfp4", "bf16", "fp16"):
        source = write_checkpoint(tmp_path / scheme / "c", change=break_two)
        said = refused(source, scheme, tmp_path / scheme / "place", QuantizationError)
        assert sorted(line for line in said.splitlines() if line.startswith("  - ")) == [
            "  - model.layers.0.mlp.up_proj.weight: weights that are not finite (3 of them)",
            "  - model.layers.1.self_attn.q_proj.bias: weights that are not finite (1 of them)",
        ]


@pytest.mark.parametrize(
    ("scheme", "config", "value", "kind"),
    [
        ("fp16", {"torch_dtype": "bfloat16"}, 7e4, "F16"),
        ("int4", {"torch_dtype": "float16"}, -7e4, "int4-g64-F16"),
        ("nvfp4", {}, 3000.0, "nvfp4"),
        ("int8", {}, -3e38, "int8-g64"),
        ("mxfp4", {}, 3e38, "mxfp4"),
    ],
)
def test_weights_that_are_too_large_are_counted(
    scheme: str, config: dict[str, Any], value: float, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """mlx-lm writes infinity, or another weight."""

    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][::9, 0] = value

    monkeypatch.setattr("pipeline.formats.streaming.BLOCK_WEIGHTS", 10 * 128)  # counted over all blocks
    source = write_checkpoint(tmp_path / "c", change=enlarge, config=config)
    said = refused(source, scheme, tmp_path / "place", QuantizationError)
    assert f"  - model.layers.1.mlp.down_proj.weight: weights too large for {kind} (8 of them)\n" in said


@pytest.mark.parametrize(
    ("scheme", "weight", "fits"),
    [("mxfp4", 1e-39, False), ("mxfp8", 1e-37, False), ("nvfp4", 1e-39, True), ("int4", 1e-39, True)],
)
def test_weights_too_small_for_a_scale_are_counted(scheme: str, weight: float, fits: bool, tmp_path: Path) -> None:
    """Of groups this small MLX wraps the exponent of the scale around: they would come out as 1e35 and more."""

    def shrink(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][3, 32:64] = weight

    source = write_checkpoint(tmp_path / "c", change=shrink)
    if fits:
        convert(source, scheme, tmp_path / "place")
    else:
        said = refused(source, scheme, tmp_path / "place", QuantizationError)
        assert (
            f"down_proj.weight: weights too small for the scales of {scheme}, which MLX would make huge (32 of" in said
        )


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        tensors["extra.weight"] = np.zeros((2, 2), np.float32)

    said = refused(write_checkpoint(tmp_path / "c", change=change), "int4", tmp_path / "place", CheckpointError)
    assert "model.norm.weight: missing" in said
    assert "extra.weight: not a tensor of qwen2" in said


def test_a_tokenizer_is_needed_and_must_fit(tmp_path: Path) -> None:
    source, other = write_checkpoint(tmp_path / "c"), write_checkpoint(tmp_path / "d")
    (other / "tokenizer.json").write_text((source / "tokenizer.json").read_text().replace('"id": 262', '"id": 272'))
    assert "has id 272, but the embedding has 272 rows" in refused(other, "int4", tmp_path / "other", TokenizerError)
    (source / "tokenizer.json").unlink()
    assert "tokenizer.json cannot be read" in refused(source, "int4", tmp_path / "place", TokenizerError)


@pytest.mark.parametrize("eos", ["im_end", -1, [262, "x"], {"id": 262}, True])
def test_stop_tokens_that_are_no_ids_are_refused(eos: object, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", config={"eos_token_id": eos})
    said = refused(source, "int4", tmp_path / "place", TokenizerError)
    assert "config.json: eos_token_id must be an id, a list of them or null" in said


def test_too_little_disk_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    source = write_checkpoint(tmp_path / "c")
    convert(source, "int4", tmp_path / "first")
    needed = sum((tmp_path / "first" / name).stat().st_size for name in ("model.safetensors", "tokenizer.json"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9, needed - 1))
    assert "MB are free. Make room." in refused(source, "int4", tmp_path / "place", OutputError)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9, needed))
    convert(source, "int4", tmp_path / "out")


def test_an_unknown_scheme_and_options_are_refused(tmp_path: Path) -> None:
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        with pytest.raises(ParamsError, match=r"mlx has no scheme 'int5'; did you mean"):
            write(checkpoint, "int5", tmp_path)
        with pytest.raises(ParamsError, match="mlx schemes take none"):
            write(checkpoint, "int4", tmp_path, options=Options(types={"attn_v": "int8"}))
        with pytest.raises(ParamsError, match="chunk: mlx artifacts have no fixed sizes"):
            write(checkpoint, "int4", tmp_path, options=Options(sizes={"chunk": 64}))
        with pytest.raises(ParamsError, match="imatrix: mlx artifacts are made without one"):
            write(checkpoint, "int4", tmp_path, options=Options(imatrix=tmp_path / "a.gguf"))


@pytest.mark.parametrize("scheme", ["int4", "mxfp4", "mixed_4_6"])
def test_a_converted_checkpoint_is_not_converted_again(scheme: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(write_checkpoint(tmp_path / "c"), scheme, out)
    with pytest.raises(CheckpointError, match="is already quantized"):
        Checkpoint(out)


Header = dict[str, Stored]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda read: dict([*read.items()][1:]),
            r"expected tensor model\.embed_tokens\.weight U32 .*, read back nothing",
        ),
        (lambda read: read | {"x": read["model.norm.weight"]}, r"expected tensor x nothing, read back BF16"),
        (
            lambda read: {name: replace(stored, dtype="I32") for name, stored in read.items()},
            r"expected tensor model\.embed_tokens\.weight U32 \[272, 8\], 8704 bytes at \d+, read back I32",
        ),
        (
            lambda read: {name: replace(s, offset=s.offset + 1) for name, s in read.items()},
            r"expected tensor model\.emb",
        ),
    ],
    ids=["dropped", "added", "type", "offset"],
)
def test_a_header_that_does_not_read_back_as_planned(
    change: Callable[[Header], Header], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, read = write_checkpoint(tmp_path / "c"), write_module.read_header
    monkeypatch.setattr(write_module, "read_header", lambda path: change(read(path)))
    with pytest.raises(ArtifactError, match=message):
        convert(source, "int4", tmp_path / "out")


def test_a_file_of_another_length_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = write_checkpoint(tmp_path / "c"), write_module.read_header

    def read_longer(path: Path) -> Header:
        header = read(path)
        with path.open("ab") as file:
            file.write(b"\0" * 7)
        return header

    monkeypatch.setattr(write_module, "read_header", read_longer)
    with pytest.raises(ArtifactError, match=r"expected \d+ bytes, read back \d+"):
        convert(source, "int4", tmp_path / "out")
