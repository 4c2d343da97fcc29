"""MLX folders of others say what they are, and are refused where they are not of the checkpoint."""

from __future__ import annotations

import json
import random
import shutil
from collections import Counter
from contextlib import chdir
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from click.testing import CliRunner
from commands import succeeded
from folders import GONE, Change, Tensors, converted, rewritten
from mutations import FEW, changed, outcome
from support import Shape, config_of, tokenizer_json, write_checkpoint

from pipeline import artifact as artifacts
from pipeline.errors import ArtifactError, PipelineError, TokenizerError
from pipeline.files import sha256, write_json
from pipeline.formats import format_of
from pipeline.formats.mlx import given
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact, EffectiveType
from stages import convert, fetch

ROOT = Path(__file__).parents[3]
SHAPE = Shape("qwen3", hidden=128)
TEXT = "In the beginning the heath there then held the thin inn. " * 10


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mlx-given") / "source", SHAPE)


@pytest.fixture(scope="module")
def int4(source: Path) -> Path:
    return converted(source, source.parent / "int4")


def described(path: Path, source: Path) -> Artifact:
    with Checkpoint(source) as checkpoint:
        return artifacts.describe(path, "mlx", checkpoint)


def refusal(path: Path, source: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        described(path, source)
    return str(caught.value)


# what it is


def test_a_folder_of_mlx_lms_making_says_what_it_is(source: Path, int4: Path) -> None:
    found = described(int4, source)
    weights = 272 * 128 + 2 * (3 * 128 * 128 + 64 * 128 + 2 * 32 * 128 + 128 * 64)
    vectors = 128 + 2 * (128 + 128 + 16 + 16)
    with Checkpoint(source) as checkpoint:
        identity = checkpoint.identity()
    names = ["config.json", "model.safetensors", "model.safetensors.index.json", "tokenizer.json"]
    assert found == Artifact(
        format="mlx",
        scheme="int4-g64",
        files={name: sha256(int4 / name) for name in [*names, "tokenizer_config.json"]},
        tensors_sha256=found.tensors_sha256,
        size_bytes=(int4 / "model.safetensors").stat().st_size,
        folder_bytes=sum((int4 / name).stat().st_size for name in [*names, "tokenizer_config.json"]),
        weights=weights + vectors,
        bits_per_weight=(weights * 4.5 + vectors * 16) / (weights + vectors),
        effective_types={"int4-g64": EffectiveType(15, weights), "BF16": EffectiveType(9, vectors)},
        source=identity,
        tools={},
        platform="made elsewhere",
        tensors=found.tensors,
        path=str(int4),
    )
    assert (int4 / "README.md").exists()  # is none of its files


def test_files_that_decide_nothing_are_not_hashed(int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a")
    before = given.hashes(folder)
    for name in ("README.md", "LICENSE", "artifact.json", ".hidden.json", "code.py", "adapters.safetensors"):
        (folder / name).write_text("x")
    assert given.hashes(folder) == before
    for name in ("chat_template.jinja", "generation_config.json", "merges.txt"):
        (folder / name).write_text("x")
    assert given.hashes(folder).keys() == before.keys() | {
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
    }


def test_other_shards_and_headers_are_the_same_tensors(source: Path, int4: Path, tmp_path: Path) -> None:
    whole, cut = described(int4, source), described(rewritten(int4, tmp_path / "a", shards=3), source)
    assert cut.tensors_sha256 == whole.tensors_sha256
    assert cut.files != whole.files
    assert cut.effective_types == whole.effective_types
    other = rewritten(int4, tmp_path / "b", change=flipped("model.norm.weight"))
    assert described(other, source).tensors_sha256 != whole.tensors_sha256


def flipped(name: str) -> Change:
    def change(tensors: Tensors) -> None:
        dtype, shape, data = tensors[name]
        tensors[name] = dtype, shape, bytes([data[0] ^ 1]) + data[1:]

    return change


@pytest.mark.parametrize(
    ("settings", "scheme", "types"),
    [
        ({"q_bits": 8, "q_group_size": 32}, "int8-g32", {"int8-g32", "BF16"}),
        ({"q_bits": 4, "q_group_size": 32, "q_mode": "mxfp4"}, "mxfp4", {"mxfp4", "BF16"}),
        ({"quant_predicate": "mixed_3_6"}, "int4-g64", {"int3-g64", "int6-g64", "BF16"}),  # its config.json says so
        ({"q_bits": 6, "dtype": "float16"}, "int6-g64", {"int6-g64-F16", "F16"}),
        ({"quantize": False}, "bf16", {"BF16"}),
        ({"quantize": False, "dtype": "float16"}, "fp16", {"F16"}),
        ({"quantize": False, "dtype": "float32"}, "fp32", {"F32"}),
    ],
)
def test_the_scheme_is_what_config_json_says_of_all(
    settings: dict[str, Any], scheme: str, types: set[str], source: Path, tmp_path: Path
) -> None:
    found = described(converted(source, tmp_path / "a", **settings), source)
    assert (found.scheme, found.effective_types.keys()) == (scheme, types)


def test_an_older_config_without_a_mode_is_affine(source: Path, int4: Path, tmp_path: Path) -> None:
    assert described(rewritten(int4, tmp_path / "a", {"quantization/mode": GONE}), source).scheme == "int4-g64"


def test_matrices_that_mlx_lm_left_unquantized_are_seen(tmp_path: Path) -> None:
    """49 of 57, as rows of 96 do not divide into groups of 64."""
    source = write_checkpoint(tmp_path / "source", Shape("qwen2", layers=8, hidden=96, vocab=272))
    found = described(converted(source, tmp_path / "out"), source)
    assert found.scheme == "int4-g64"
    assert {name: entry.tensors for name, entry in found.effective_types.items()} == {"BF16": 49 + 41, "int4-g64": 8}
    assert 12 < found.bits_per_weight < 14


def test_a_checkpoint_is_an_mlx_folder_too(source: Path) -> None:
    with Checkpoint(source) as checkpoint:
        found = artifacts.load(source, checkpoint)
    assert (found.format, found.scheme, found.bits_per_weight, found.path) == ("mlx", "bf16", 16, str(source))


def test_a_tied_head_that_mlx_lm_drops_is_not_counted(source: Path, int4: Path, tmp_path: Path) -> None:
    def head(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = "BF16", [272, 128], bytes(272 * 128 * 2)

    found, whole = described(rewritten(int4, tmp_path / "a", change=head), source), described(int4, source)
    assert (found.weights, found.tensors_sha256) == (whole.weights, whole.tensors_sha256)
    assert found.size_bytes > whole.size_bytes


# where it lies


def test_the_format_of_a_place(source: Path, int4: Path, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").touch()
    places = [source, int4, tmp_path / "a.gguf", tmp_path, tmp_path / "absent"]
    assert [format_of(place) for place in places] == ["mlx", "mlx", "gguf", None, None]


def test_a_folder_is_described_where_it_lies(source: Path, int4: Path, tmp_path: Path) -> None:
    with Checkpoint(source) as checkpoint:
        taken = artifacts.take(int4, "mlx", checkpoint, tmp_path / "out")
        assert artifacts.load(int4, checkpoint) == taken
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["artifact.json"]  # no copy
    assert artifacts.load(tmp_path / "out") == taken == described(int4, source)
    assert artifacts.location(tmp_path / "out", taken) == int4 == artifacts.location(int4, taken)
    assert artifacts.load(int4) == replace(taken, source=None)


def test_a_folder_that_changed_after_it_was_described_is_refused(source: Path, int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a")
    with Checkpoint(source) as checkpoint:
        artifacts.take(folder, "mlx", checkpoint, tmp_path / "out")
    kept = (folder / "tokenizer.json").read_bytes()
    (folder / "tokenizer.json").write_bytes(kept + b" ")
    with pytest.raises(ArtifactError, match=rf"{folder}/tokenizer\.json is not what artifact\.json says: expected sha"):
        artifacts.load(tmp_path / "out")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ArtifactError, match=rf"{folder}: tokenizer\.json is absent\. Fetch it again"):
        artifacts.load(tmp_path / "out")


def test_an_artifact_json_in_the_folder_decides(source: Path, int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a")
    made = replace(described(folder, source), path=None, scheme="int4")
    write_json(folder / "artifact.json", made)
    assert artifacts.load(folder) == made
    assert artifacts.location(folder, made) == folder


def test_the_stages_identify_and_describe_a_folder(source: Path, int4: Path, tmp_path: Path) -> None:
    shutil.copytree(int4, tmp_path / "files" / "theirs")
    (tmp_path / "text.txt").write_text(TEXT)
    params = yaml.safe_load((ROOT / "params.yaml").read_text()) | {
        "checkpoint": str(source),
        "corpus": {"name": "file", "path": "text.txt"},
        "variants": {"theirs": {"format": "mlx", "path": "files/theirs"}},
    }
    (tmp_path / "params.yaml").write_text(yaml.safe_dump(params))
    with chdir(tmp_path):
        for stage, *arguments in ((fetch.main,), (convert.main, "theirs")):
            result = CliRunner().invoke(stage, arguments)
            assert result.exit_code == 0, result.output
        found = artifacts.load(Path("artifacts/variants/theirs"))
        builds = json.loads(Path("artifacts/builds.json").read_text())
    assert builds == {"theirs": {"format": "mlx", "path": "files/theirs", "files": found.files}}
    assert (found.path, found.scheme) == ("files/theirs", "int4-g64")
    assert (found.files, found.tensors_sha256) == (given.hashes(int4), described(int4, source).tensors_sha256)


def evaluated(folder: Path, source: Path) -> dict[str, Any]:
    (source.parent / "text.txt").write_text(TEXT)
    arguments = ("--corpus", source.parent / "text.txt", "--context", 32, "--windows", 2, "--json", "-")
    found: dict[str, Any] = json.loads(succeeded("evaluate", folder, "--checkpoint", source, *arguments).stdout)
    assert found.pop("artifact") == given.hashes(folder)
    return found


def test_a_folder_is_scored_by_the_settings_that_mlx_lm_reads(tmp_path: Path) -> None:
    """Which are mlx-lm's defaults where config.json has none, not transformers'."""
    source = write_checkpoint(tmp_path / "source", Shape("qwen2"))
    folder = converted(source, tmp_path / "int4")
    bare = {"rope_theta": GONE, "tie_word_embeddings": GONE, "max_position_embeddings": GONE}
    found = evaluated(folder, source)
    assert found["kld"]["mean"] > 0
    assert evaluated(rewritten(folder, tmp_path / "bare", bare), source) == found
    itself = evaluated(rewritten(source, tmp_path / "itself", bare), source)
    assert itself["kld"]["max"] == 0
    assert itself["ppl"] == itself["reference_ppl"] == found["reference_ppl"]


@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_yarn_runs_in_mlx_as_it_is_scored(model_type: str, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "attention_factor": 1.3}
    source = write_checkpoint(tmp_path / "source", Shape(model_type), config={"rope_scaling": yarn})
    theirs = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "mscale": 0.3 / (0.1 * np.log(4))}
    found = evaluated(rewritten(source, tmp_path / "a", {"rope_scaling": theirs}), source)
    assert found["kld"]["max"] < 1e-9
    assert 0 < found["parity"]["max_difference"] < 1e-4


# of another checkpoint


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"rope_theta": 10_000.0}, "rope_theta: expected 1000000.0, found 10000.0 as mlx-lm reads config.json"),
        ({"rms_norm_eps": 1e-5}, "rms_norm_eps: expected 1e-06, found 1e-05"),
        (
            {"rope_scaling": {"type": "linear", "factor": 4.0}},
            "rope scaling: expected none, found linear 4 as mlx-lm reads config.json",
        ),
        (
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
            "rope scaling: expected none, found yarn 4 of 512, attention 1.13863, beta 32 to 1 as mlx-lm reads",
        ),
    ],
)
def test_a_setting_that_shapes_do_not_show_is_refused(
    config: dict[str, Any], problem: str, source: Path, int4: Path, tmp_path: Path
) -> None:
    """Weights that fit are scored by the checkpoint's architecture: another one would not be seen there."""
    folder = rewritten(int4, tmp_path / "a", config)
    first, found, last = refusal(folder, source).splitlines()
    assert first == f"{folder} is not of the checkpoint source:"
    assert found.startswith(f"  - {problem}")
    assert last.startswith("Figures on its tokens would mean nothing")


def test_theta_where_mlx_lm_does_not_look_is_seen(tmp_path: Path) -> None:
    """What transformers 5 saves: mlx_lm.convert carries it over, and runs by its default."""
    shape = Shape("qwen2")
    parameters = {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}
    source = write_checkpoint(tmp_path / "source", shape)
    config = config_of(shape) | parameters
    del config["rope_theta"]
    (source / "config.json").write_text(json.dumps(config))
    folder = converted(source, tmp_path / "out")
    assert "  - rope_theta: expected 500000.0, found 1000000.0 as mlx-lm reads config.json\n" in refusal(folder, source)
    assert described(rewritten(folder, tmp_path / "right", {"rope_theta": 500_000.0}), source).scheme == "int4-g64"


@pytest.mark.parametrize("factor", [None, 1.3, 0.7])
def test_yarn_in_other_keys_is_the_same(factor: float | None, tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    source = write_checkpoint(
        tmp_path / "source",
        Shape("qwen2"),
        config={"rope_scaling": yarn if factor is None else yarn | {"attention_factor": factor}},
    )
    mscale = None if factor is None else (factor - 1) / 0.13862943611198906
    theirs = {"type": "yarn", "factor": 4, "original_max_position_embeddings": 512, "beta_fast": 32, "mscale": mscale}
    if mscale is None:
        del theirs["mscale"]
    folder = rewritten(source, tmp_path / "a", {"rope_scaling": theirs})
    assert described(folder, source).scheme == "bf16"
    if factor is not None:
        assert "rope scaling: expected yarn 4 of 512, attention" in refusal(source, source)  # mlx-lm does not know it


def test_another_model_is_refused_with_every_difference(source: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", Shape("qwen3", layers=1, hidden=64, heads=2, head_dim=32, tied=False))
    vocabulary = tokenizer_json()
    vocabulary["model"]["vocab"] = {{"$": "x!"}.get(k, k): i for k, i in vocabulary["model"]["vocab"].items()}
    (other / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert refusal(converted(other, tmp_path / "out"), source).splitlines()[1:-1] == [
        "  - num_hidden_layers: expected 2, found 1",
        "  - num_attention_heads: expected 4, found 2",
        "  - tie_word_embeddings: expected True, found False as mlx-lm reads config.json",
        "  - lm_head.weight: not a tensor of the checkpoint",
        "  - model.embed_tokens.weight: expected [272, 128], found [272, 64]",
        "  - model.layers.0.input_layernorm.weight: expected [128], found [64]",
        "  - model.layers.0.mlp.down_proj.weight: expected [128, 128], found [64, 128]",
        "  - model.layers.0.mlp.gate_proj.weight: expected [128, 128], found [128, 64]",
        "  - … and 20 more tensors",
        "  - token 3: expected '$', found 'x!'",
    ]
    qwen2 = write_checkpoint(tmp_path / "qwen2", Shape("qwen2", hidden=128))
    assert refusal(qwen2, source).splitlines()[1:-1] == ["  - model_type: expected qwen3, found qwen2"]


def test_other_texts_of_tokens_are_refused_but_padding_may_differ(source: Path, int4: Path, tmp_path: Path) -> None:
    folder, vocabulary = rewritten(int4, tmp_path / "a"), tokenizer_json()
    vocabulary["added_tokens"].append({"id": 270, "content": "<|extra|>", "special": True})
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert described(folder, source).tensors_sha256 == described(int4, source).tensors_sha256
    vocabulary["added_tokens"][2]["content"] = "</s>"
    (folder / "tokenizer.json").write_text(json.dumps(vocabulary))
    assert refusal(folder, source).splitlines()[1:-1] == ["  - token 262: expected '<|im_end|>', found '</s>'"]


def test_a_folder_without_a_tokenizer_is_refused(source: Path, int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a")
    (folder / "tokenizer.json").unlink()
    said = f"{folder} holds no tokenizer.json, which mlx-lm needs. Fetch it from the same repository."
    assert refusal(folder, source) == said
    with pytest.raises(ArtifactError, match=r"holds no tokenizer\.json"):
        artifacts.describe(folder, "mlx", None)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(TokenizerError, match="a byte-level BPE is expected"):
        described(folder, source)


def test_nothing_is_left_where_a_folder_is_refused(source: Path, tmp_path: Path) -> None:
    with Checkpoint(source) as checkpoint, pytest.raises(ArtifactError, match="is no MLX folder"):
        artifacts.take(tmp_path / "absent", "mlx", checkpoint, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ArtifactError, match="is no MLX folder"):
        given.hashes(tmp_path)


# spoilt


def test_spoilt_folders_are_described_or_refused(source: Path, int4: Path, tmp_path: Path) -> None:
    folder, counts, rng = rewritten(int4, tmp_path / "a"), Counter[str](), random.Random(0)
    config, vocabulary = json.loads((folder / "config.json").read_text()), tokenizer_json()
    cases = [("config.json", label, json.dumps(broken).encode()) for label, broken in changed(config, FEW)]
    cases += [("tokenizer.json", label, json.dumps(broken).encode()) for label, broken in changed(vocabulary, FEW[:4])]
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        whole = (folder / name).read_bytes()
        for case in range(20):
            broken = bytearray(whole)
            broken[rng.randrange(min(len(whole), 4000))] = rng.randrange(256)
            cases.append((name, f"byte {case}", bytes(broken)))
            cases.append((name, f"cut {case}", whole[: rng.randrange(len(whole))]))
    kept = {name: (folder / name).read_bytes() for name in ("config.json", "tokenizer.json", "model.safetensors")}
    for name, label, data in rng.sample(cases, 120):
        (folder / name).write_bytes(data)
        counts[outcome(f"{name}, {label}", lambda: described(folder, source), PipelineError)] += 1
        (folder / name).write_bytes(kept[name])
    assert counts["refused"] > 60
    assert counts["works"] > 15
    assert described(folder, source).tensors_sha256 == described(int4, source).tensors_sha256
