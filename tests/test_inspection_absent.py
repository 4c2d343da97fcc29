"""inspect where a shard is absent: it is named with what it held, and nothing is made up of that."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import run
from fp8_blocks import as_fp8
from support import Shape, write_checkpoint

from pipeline.console import BAD_INPUT
from pipeline.source.safetensors import read_header
from pipeline.source.shards import INDEX

UP = "model.layers.0.mlp.up_proj.weight"


def told(folder: Path) -> list[str]:
    result = run("inspect", folder, "--json", "-")
    assert result.exit_code == BAD_INPUT
    found: list[str] = json.loads(result.stdout)["problems"]
    return found


@pytest.mark.parametrize(
    "name", ["model.odd", "lm_head.weight", "model.layers.0.mlp.up_proj.weight_scale_inv", "model.layers.9.odd"]
)
def test_an_absent_shard_may_have_held_what_is_none_of_the_models(name: str, tmp_path: Path) -> None:
    """The model is tied, and in bfloat16: the shard is named with what it held, and nothing more is known of that."""
    folder = write_checkpoint(tmp_path / "bad", Shape("qwen2", tied=True), shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"][name] = "model-00003-of-00003.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    (incomplete,) = told(folder)
    assert f"model-00003-of-00003.safetensors is absent; {INDEX} puts {name} there" in incomplete


@pytest.mark.parametrize("lost", [UP, f"{UP}_scale_inv"])
def test_fp8_whose_scales_lie_in_another_shard_is_no_problem_of_its_own(lost: str, tmp_path: Path) -> None:
    """Neither of the weights where the scales are absent with their shard, nor of the scales where the weights are."""
    folder = tmp_path / "bad"
    shard = "model-00002-of-00002.safetensors"
    as_fp8(write_checkpoint(tmp_path / "plain"), folder, change=lambda tensors: [tensors.pop(lost)])
    names = read_header(folder / "model.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, "model.safetensors") | {lost: shard}}))
    (incomplete,) = told(folder)
    assert f"{shard} is absent; {INDEX} puts {lost} there" in incomplete
