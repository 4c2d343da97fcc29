"""Models with experts and hybrids: tensor by tensor the bytes of mlx_lm.convert, and each of the differences."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from family import FAMILY
from family_folders import HYBRIDS, checkpoint, convert, source_of, theirs
from fp8_blocks import as_fp8
from mlx_oracle import placed, tensors_of

from pipeline.errors import CheckpointError
from pipeline.formats.mlx import folder as weight_files
from pipeline.source.checkpoint import Checkpoint

INDEX = "model.safetensors.index.json"


def differing(ours: Path, others: Path) -> set[str]:
    """Names of tensors that only one has, or that are not the same."""
    found, expected = tensors_of(ours), tensors_of(others)
    return {name for name in found.keys() | expected.keys() if found.get(name) != expected.get(name)}


def routers(*names: str) -> set[str]:
    """Paths of those of the names that are of routers."""
    return {name.rpartition(".")[0] for name in names if ".mlp.gate." in name or ".shared_expert_gate." in name}


def check_routers_alone_differ(ours: Path, others: Path) -> None:
    """Each in its codes; of a row that has one group, the bias is the same in any number of bits."""
    different = differing(ours, others)
    assert {name.rpartition(".")[0] for name in different} == routers(*different) == routers(*tensors_of(ours))
    assert {f"{path}.weight" for path in routers(*different)} <= different


@pytest.mark.parametrize("scheme", ["bf16", "int4", "int8-g32", "mxfp4"])
@pytest.mark.parametrize("model_type", FAMILY)
def test_tensors_are_mlx_lms(model_type: str, scheme: str, tmp_path: Path) -> None:
    """But for qwen2_moe's routers, which its file in mlx-lm packs like all else."""
    source = source_of(model_type, tmp_path)
    ours, others = tmp_path / "ours", theirs(source, scheme, tmp_path)
    convert(source, scheme, ours)
    written, expected = (json.loads((folder / "config.json").read_text()) for folder in (ours, others))
    if model_type == "qwen2_moe" and scheme != "bf16":
        check_routers_alone_differ(ours, others)
        for path in routers(*tensors_of(ours)):
            assert written["quantization"].pop(path) == {"group_size": 64, "bits": 8}
    else:
        assert differing(ours, others) == set()
        assert placed(ours) == placed(others)
        files, their_files = (json.loads((folder / INDEX).read_text()) for folder in (ours, others))
        assert files["weight_map"] == their_files["weight_map"]
        assert files["metadata"]["total_size"] == their_files["metadata"]["total_size"]
    assert written.get("quantization") == expected.get("quantization")


@pytest.mark.parametrize("model_type", FAMILY)
def test_the_index_counts_all_weights(model_type: str, tmp_path: Path) -> None:
    """mlx-lm counts those of modules without parts alone, and DeltaNets have two vectors of their own."""
    source = source_of(model_type, tmp_path)
    artifact = convert(source, "int4", tmp_path / "ours")
    counts = [
        json.loads((folder / INDEX).read_text())["metadata"]["total_parameters"]
        for folder in (tmp_path / "ours", theirs(source, "int4", tmp_path))
    ]
    assert counts == [artifact.weights, artifact.weights - (3 * 2 * 4 if model_type in HYBRIDS else 0)]


@pytest.mark.parametrize("model_type", FAMILY)
def test_mixed_recipes_keep_routers_in_high_precision(model_type: str, tmp_path: Path) -> None:
    """mlx-lm's recipes take the place of the model's own predicate."""
    source = source_of(model_type, tmp_path)
    ours, others = tmp_path / "ours", theirs(source, "mixed_3_6", tmp_path)
    artifact = convert(source, "mixed_3_6", ours)
    check_routers_alone_differ(ours, others)
    count = {"qwen3_5": 0, "qwen3_moe": 4}.get(model_type, 8)
    assert artifact.effective_types.keys() == {"int3-g64", "int6-g64", "BF16"} | ({"int8-g64"} if count else set())
    if count:
        assert artifact.effective_types["int8-g64"].tensors == count
    written, expected = (json.loads((f / "config.json").read_text())["quantization"] for f in (ours, others))
    changed = {path: own for path, own in written.items() if expected[path] != own}
    assert changed.keys() == routers(*tensors_of(ours))
    assert all(own == {"group_size": 64, "bits": 8, "mode": "affine"} for own in changed.values())


def test_shards_are_cut_where_mlx_lm_cuts_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for model_type in FAMILY:
        place = tmp_path / model_type
        source = source_of(model_type, place)
        monkeypatch.setattr(weight_files, "SHARD_BYTES", 20_000)
        convert(source, "bf16", place / "ours")
        others = theirs(source, "bf16", place, 20_000)
        assert len(placed(others)) > 10
        assert placed(place / "ours") == placed(others)


@pytest.mark.parametrize(("dtype", "cast"), [("float32", "bfloat16"), ("float16", "bfloat16"), ("float32", "float16")])
def test_norms_are_the_effective_ones_rounded_once(dtype: str, cast: str, tmp_path: Path) -> None:
    """mlx-lm#1197: 1 is added once, to what the checkpoint stores; mlx-lm adds it in float16 and rounds again."""
    import torch
    from safetensors.torch import load_file

    source = source_of("qwen3_5", tmp_path, dtype=dtype)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": cast, "torch_dtype": cast}))
    convert(source, "int4", tmp_path / "ours")
    stored = load_file(source / "model.safetensors")
    kind = {"bfloat16": "BF16", "float16": "F16"}[cast]
    for name, (found, _, data) in tensors_of(tmp_path / "ours").items():
        if not name.endswith("norm.weight"):
            continue
        weight = stored[name.removeprefix("language_model.")].float()
        effective = weight if "linear_attn" in name else 1 + weight
        assert found == kind
        assert data == effective.to(getattr(torch, cast)).contiguous().view(torch.uint8).numpy().tobytes(), name
    again = differing(tmp_path / "ours", theirs(source, "int4", tmp_path))
    assert bool(again) == (dtype == "float16")
    assert all(name.endswith("norm.weight") for name in again)


@pytest.mark.parametrize("scheme", ["bf16", "int4"])
@pytest.mark.parametrize("model_type", HYBRIDS)
def test_decays_are_not_cast(model_type: str, scheme: str, tmp_path: Path) -> None:
    """mlx-lm's qwen3_5 does not either, its qwen3_next does."""
    source = source_of(model_type, tmp_path, dtype="float32")
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    convert(source, scheme, tmp_path / "ours")
    kinds = {name: kind for name, (kind, _, _) in tensors_of(tmp_path / "ours").items()}
    decays = {name for name in kinds if name.endswith("A_log")}
    assert {name for name, kind in kinds.items() if kind == "F32"} == decays
    different = differing(tmp_path / "ours", theirs(source, scheme, tmp_path))
    assert different == (decays if model_type == "qwen3_next" else set())


@pytest.mark.parametrize("model_type", [name for name in FAMILY if name != "qwen3_5"])
def test_experts_stored_alone_or_fused_give_the_same_bytes(model_type: str, tmp_path: Path) -> None:
    hashes = []
    for layout in ("per-expert", "fused"):
        source = checkpoint(model_type, tmp_path / layout, layout=layout, experts=5)
        hashes.append(convert(source, "int4", tmp_path / f"of-{layout}").tensors)
    assert hashes[0] == hashes[1]


def test_blocks_of_rows_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkpoint("qwen3_next", tmp_path / "c")
    convert(source, "int4", tmp_path / "whole")
    monkeypatch.setattr("pipeline.formats.streaming.BLOCK_WEIGHTS", 7 * 64)
    convert(source, "int4", tmp_path / "cut")
    assert tensors_of(tmp_path / "cut") == tensors_of(tmp_path / "whole")


# checkpoints as people have them


@pytest.mark.parametrize("layout", ["per-expert", "fused"])
def test_fp8_in_ragged_blocks_is_the_weights_it_stands_for(layout: str, tmp_path: Path) -> None:
    """llama.cpp#11991 and #14762."""
    import torch
    from safetensors.torch import save_file

    source = source_of("qwen3_5_moe", tmp_path, layout=layout, dtype="float32", wrapped=True)
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    stands_for = as_fp8(source, tmp_path / "fp8", (48, 40))
    tensors = {name: torch.from_numpy(weights) for name, weights in stands_for.items()}
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    found, expected = (convert(tmp_path / name, "int4", tmp_path / f"of-{name}") for name in ("fp8", "plain"))
    assert found.tensors == expected.tensors
    written = (tmp_path / "of-fp8" / "config.json").read_text()
    assert written == (tmp_path / "of-plain" / "config.json").read_text()


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_next"])
@pytest.mark.parametrize(("declared", "present", "dropped"), [(1, 0, 0), (0, 1, 1), (None, 1, 1), (1, 1, 1), (2, 2, 2)])
def test_mtp_layers_are_dropped_whatever_is_declared(
    declared: int | None, present: int, dropped: int, model_type: str, tmp_path: Path
) -> None:
    """llama.cpp#24737 and #26916."""
    source = source_of(model_type, tmp_path, mtp=present)
    config = json.loads((source / "config.json").read_text()) | {"mtp_num_hidden_layers": declared}
    (source / "config.json").write_text(json.dumps(config))
    without = convert(source_of(model_type, tmp_path / "none"), "int4", tmp_path / "without")
    artifact = convert(source, "int4", tmp_path / "out")
    assert artifact.tensors == without.tensors
    assert [part.part for part in artifact.dropped] == (["MTP layers"] if dropped else [])
    if dropped:
        with Checkpoint(source) as found:
            names = {name for name in found.tensors if name.startswith("mtp.")}
            weights = sum(int(np.prod(found.tensors[name].shape)) for name in names)
        assert {*artifact.dropped[0].tensors} == names
        assert (artifact.dropped[0].weights, len(names) > 10 * dropped) == (weights, True)


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_a_tied_head_is_written_once(model_type: str, tmp_path: Path) -> None:
    """llama.cpp#6578."""
    from safetensors.torch import load_file, save_file

    source = source_of(model_type, tmp_path, tie_word_embeddings=True)
    first = convert(source, "int4", tmp_path / "out")
    assert not any("lm_head" in name for name in first.tensors)
    tensors = load_file(source / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert convert(source, "int4", tmp_path / "again").tensors == first.tensors


def test_tensors_of_unknown_names_are_all_named(tmp_path: Path) -> None:
    """unsloth#6754."""
    from safetensors.torch import load_file, save_file

    source = source_of("qwen3_5_moe", tmp_path)
    tensors = load_file(source / "model.safetensors")
    unknown = ("model.layers.0.mlp.experts.bias", "model.layers.0.linear_attn.conv1d.bias", "mtq.norm.weight")
    tensors |= {name: tensors["model.norm.weight"].clone() for name in unknown}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError) as raised:
        convert(source, "int4", tmp_path / "out")
    assert all(f"{name}: not a tensor of qwen3_5_moe, [64]" in str(raised.value) for name in unknown)


def test_norms_of_nine_thousand_fit_float16(tmp_path: Path) -> None:
    """coremltools#2585."""
    from safetensors.torch import load_file, save_file

    source = source_of("qwen3_5", tmp_path, dtype="float32")
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"][3] = 9e3
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    convert(source, "fp16", tmp_path / "out")
    kind, _, data = tensors_of(tmp_path / "out")["language_model.model.norm.weight"]
    assert (kind, np.frombuffer(data, "<f2")[3]) == ("F16", 9000)
