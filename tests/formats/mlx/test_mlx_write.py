"""A whole MLX folder: byte for byte what mlx_lm.convert makes."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from dataclasses import replace
from functools import partial
from itertools import cycle, product
from pathlib import Path

import numpy as np
import pytest
from folders import convert
from mlx_oracle import mlx_convert, options_of, placed, silenced, tensors_of
from support import Shape, random_tensors, write_checkpoint

from pipeline.files import sha256
from pipeline.formats import TensorHashes
from pipeline.formats.mlx import folder as weight_files
from pipeline.formats.mlx.schemes import SCHEMES
from pipeline.formats.mlx.write import write
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hard_text import hard_text
from pipeline.source.safetensors import read_header
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import EffectiveType

ROOT = Path(__file__).parents[3]
QWEN2 = Shape("qwen2", 3, hidden=128, ff=256)
QWEN3 = Shape("qwen3", 2, hidden=128, ff=256, heads=2, kv_heads=1, head_dim=128)
INDEX = "model.safetensors.index.json"


def both(
    source: Path, scheme: str, place: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int | None = None
) -> tuple[Path, Path]:
    """Our folder and mlx-lm's, cut into files of at most `shard_bytes`."""
    if shard_bytes is not None:
        monkeypatch.setattr(weight_files, "SHARD_BYTES", shard_bytes)
    convert(source, scheme, place / "ours")
    return place / "ours", mlx_convert(source, place / "theirs", options_of(scheme), shard_bytes)


def check_same(ours: Path, theirs: Path, *texts: str) -> None:
    found, expected = tensors_of(ours), tensors_of(theirs)
    assert found.keys() == expected.keys()
    assert [name for name in found if found[name] != expected[name]] == []
    assert placed(ours) == placed(theirs)
    for text in (INDEX, *texts):
        assert (ours / text).read_text() == (theirs / text).read_text()


# The same bytes as mlx_lm.convert


SOURCES = {
    "qwen2-tied-bf16": (QWEN2, "BF16", {"torch_dtype": "bfloat16"}),
    "qwen3-untied-f32": (replace(QWEN3, tied=False), "F32", {}),
    "qwen2-untied-f32-cast-to-f16": (replace(QWEN2, tied=False), "F32", {"torch_dtype": "float16"}),
    "qwen3-tied-f16-cast-to-bf16": (QWEN3, "F16", {"torch_dtype": "bfloat16"}),
}


@pytest.mark.parametrize(
    ("scheme", "name"),
    [
        *zip(SCHEMES, cycle(SOURCES), strict=False),
        *product(("int4", "mixed_4_6", "nvfp4"), SOURCES),
    ],
)
def test_every_scheme_gives_mlx_lms_bytes(
    scheme: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shape, dtype, config = SOURCES[name]
    source = write_checkpoint(tmp_path / "c", shape, dtype, config=config)
    ours, theirs = both(source, scheme, tmp_path, monkeypatch)
    cast = {"bf16": "bfloat16", "fp16": "float16"}.get(scheme)
    says_so = cast is None or config.get("torch_dtype", cast) == cast
    check_same(ours, theirs, *(["config.json"] if says_so else []))
    if not says_so:  # where mlx-lm leaves the old one
        assert json.loads((ours / "config.json").read_text())["torch_dtype"] == cast


@pytest.mark.parametrize(
    ("scheme", "shape", "shards"),
    [
        ("int4", QWEN2, 3),
        ("int8-g32", replace(QWEN2, tied=False), 1),
        ("mxfp8", QWEN3, 1),
        ("bf16", replace(QWEN3, tied=False), 2),
        ("mixed_3_6", replace(QWEN3, tied=False, layers=9), 3),
    ],
)
def test_many_files_in_and_out_are_cut_where_mlx_lm_cuts_them(
    scheme: str, shape: Shape, shards: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit below some tensors and above others: those get a file of their own."""
    source = write_checkpoint(tmp_path / "c", shape, shards=shards)
    ours, theirs = both(source, scheme, tmp_path, monkeypatch, 15_000)
    check_same(ours, theirs, "config.json")
    files = placed(ours)
    assert len(files) > 10
    assert f"model-00001-of-{len(files):05d}.safetensors" in files
    assert max(len(names) for names in files.values()) >= 3
    assert json.loads((ours / INDEX).read_text())["metadata"]["total_parameters"] == sum(
        weights.size for weights in random_tensors(shape).values()
    )


def hard_rows(tensors: dict[str, np.ndarray], smallest: float = 2.0**-130) -> None:
    """Zero, constant, an outlier 1000 times the rest, and denormals of bfloat16, of float16 and of float32."""
    for i, name in enumerate(sorted(name for name, weights in tensors.items() if weights.ndim == 2)):
        rows = tensors[name]
        rows[0], rows[1], rows[2] = 0.0, 0.75, -0.5
        rows[3, 5] = (-1) ** i * 1000 * np.abs(rows[3]).max()
        rows[4] *= np.float32(smallest)
        rows[5] *= np.float32(2.0**-18)
        rows[6, ::2] = 0.0
        rows[7] = np.round(rows[7] * 4) / 4  # ties


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("scheme", ["int8", "int4-g32", "int3-g128", "mxfp8", "mxfp4", "nvfp4", "mixed_2_6", "fp16"])
def test_rows_that_broke_other_tools_give_mlx_lms_bytes(
    scheme: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smallest = 2.0**-100 if scheme in {"mxfp4", "mxfp8"} else 2.0**-130  # their scales hold no less: see below
    change = partial(hard_rows, smallest=smallest)
    source = write_checkpoint(tmp_path / "c", QWEN2, "F32", change=change, config={"torch_dtype": dtype})
    ours, theirs = both(source, scheme, tmp_path, monkeypatch)
    check_same(ours, theirs)
    for name, (kind, _, data) in tensors_of(ours).items():
        if kind in {"F32", "F16"}:
            assert np.isfinite(np.frombuffer(data, "<f4" if kind == "F32" else "<f2")).all(), name
        elif kind == "BF16":
            assert (np.frombuffer(data, "<u2") & 0x7F80 != 0x7F80).all(), name


def test_blocks_of_rows_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither how a tensor is cut into blocks, nor whether MLX is there to pack them."""
    source = write_checkpoint(tmp_path / "c", QWEN3)
    convert(source, "mixed_3_4", tmp_path / "whole")
    monkeypatch.setattr("pipeline.formats.streaming.BLOCK_WEIGHTS", 5 * 128)
    convert(source, "mixed_3_4", tmp_path / "cut")
    assert tensors_of(tmp_path / "cut") == tensors_of(tmp_path / "whole")


WITHOUT_MLX = """
import sys
for name in ("mlx", "mlx.core", "mlx_lm", "torch", "transformers", "safetensors"):
    sys.modules[name] = None
from pathlib import Path
from pipeline.artifact import convert
for scheme in sys.argv[2:]:
    artifact = convert(sys.argv[1], "mlx", scheme, Path(sys.argv[1]).parent / f"without-{scheme}")
    print(artifact.tensors_sha256)
"""


def test_a_machine_without_mlx_makes_the_same_files(tmp_path: Path) -> None:
    schemes = ("int4", "int3-g32", "mxfp8", "nvfp4", "fp16")
    source = write_checkpoint(tmp_path / "c", QWEN3)
    command = [sys.executable, "-W", "error", "-c", WITHOUT_MLX, str(source), *schemes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for scheme, tensors in zip(schemes, done.stdout.split(), strict=True):
        artifact = convert(source, scheme, tmp_path / scheme)
        without = tmp_path / f"without-{scheme}"
        assert artifact.files == {name: sha256(without / name) for name in artifact.files}
        assert artifact.tensors_sha256 == tensors


# What the folder says and carries


def test_artifact_says_what_the_folder_is(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN3)
    (source / "generation_config.json").write_text("{}")
    out = tmp_path / "out"
    artifact = convert(source, "mixed_4_6", out)
    weights = {name: w.size for name, w in random_tensors(QWEN3).items()}
    vectors = [name for name, w in random_tensors(QWEN3).items() if w.ndim == 1]
    at = "model.layers.1."  # of two layers, 7 * 2 // 8 = 1
    high = sum(weights[f"{at}{part}.weight"] for part in ("self_attn.v_proj", "mlp.down_proj"))
    bf16 = sum(weights[name] for name in vectors)
    low = sum(weights.values()) - high - bf16
    assert artifact.effective_types == {
        "int4-g64": EffectiveType(13, low),
        "int6-g64": EffectiveType(2, high),
        "BF16": EffectiveType(len(vectors), bf16),
    }
    assert artifact.weights == sum(weights.values())
    assert artifact.bits_per_weight == pytest.approx((4.5 * low + 6.5 * high + 16 * bf16) / artifact.weights, rel=1e-12)
    assert artifact.files == {path.name: sha256(path) for path in out.iterdir()}
    assert artifact.files.keys() == {
        *("model.safetensors", INDEX, "config.json", "tokenizer.json", "generation_config.json")
    }
    assert artifact.size_bytes == (out / "model.safetensors").stat().st_size
    assert artifact.folder_bytes == sum(path.stat().st_size for path in out.iterdir())
    assert (artifact.format, artifact.scheme, artifact.source and artifact.source.name) == ("mlx", "mixed_4_6", "c")
    assert artifact.tools


def test_the_hash_of_tensors_is_that_of_what_they_hold(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN2)
    artifact = convert(source, "int4", tmp_path / "one")
    monkeypatch.setattr(weight_files, "SHARD_BYTES", 20_000)
    cut = convert(source, "int4", tmp_path / "many")
    assert len(cut.files) > len(artifact.files)
    assert cut.tensors_sha256 == artifact.tensors_sha256
    backwards = dict(reversed(read_header(tmp_path / "one" / "model.safetensors").items()))
    assert weight_files.hashes(backwards) == TensorHashes(artifact.tensors_sha256, artifact.tensors)

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] *= 2

    other = convert(write_checkpoint(tmp_path / "d", QWEN2, change=change), "int4", tmp_path / "other")
    assert other.tensors_sha256 != artifact.tensors_sha256
    assert {name for name, digest in artifact.tensors.items() if other.tensors[name] != digest} == {"model.norm.weight"}


def test_each_tensor_has_its_type_and_the_hash_of_its_bytes(tmp_path: Path) -> None:
    artifact = convert(write_checkpoint(tmp_path / "c", QWEN2), "int4", tmp_path / "out")
    stored = tensors_of(tmp_path / "out").items()
    assert artifact.tensors == {name: f"{t} {hashlib.sha256(data).hexdigest()[:16]}" for name, (t, _, data) in stored}
    assert artifact.tensors["model.embed_tokens.weight"].startswith("U32 ")
    assert artifact.tensors["model.embed_tokens.scales"].startswith("BF16 ")


def test_progress_reaches_all_weights(tmp_path: Path) -> None:
    done: list[float] = []
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        artifact = write(checkpoint, "int4-g32", tmp_path, done.append)
    assert sum(done) == artifact.weights


def test_tokenizer_files_are_carried_as_they_are_and_code_is_not(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    carried = {
        **{name: f'{{"of": "{name}"}}' for name in ("special_tokens_map.json", "added_tokens.json", "vocab.json")},
        **{"chat_template.json": "{}", "tokenizer_config.json": '{"eos_token": "<|im_end|>"}\n'},
        **{"merges.txt": "#version\na b\n", "chat_template.jinja": "{{ 'é' }}", "generation_config.json": "{ }"},
    }
    for name, text in carried.items():
        (source / name).write_text(text, encoding="utf-8")
    for name in ("modeling_qwen.py", "README.md", "training_args.bin"):
        (source / name).write_text("raise SystemExit")
    artifact = convert(source, "int4", tmp_path / "out")
    for name in (*carried, "tokenizer.json"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert artifact.files.keys() == {*carried, "tokenizer.json", "config.json", "model.safetensors", INDEX}
    assert artifact.source is not None
    assert artifact.source.files.keys() == {*carried, "tokenizer.json", "config.json", "model.safetensors"}


def test_mlx_lm_loads_the_embedded_checkpoint_and_generates(tiny: Path, tmp_path: Path) -> None:
    convert(tiny, "int4", tmp_path / "out")
    with silenced():
        from mlx_lm import generate, load

        model, tokenizer = load(str(tmp_path / "out"))
        reply = generate(model, tokenizer, "The old house stood", max_tokens=3)
    assert len(reply) > 3
    own = Tokenizer(tiny)
    assert tokenizer.encode(hard_text(own)) == own.encode(hard_text(own)).tolist()
    with Checkpoint(tiny) as checkpoint:
        assert tokenizer.eos_token_ids >= {*own.stop_ids(checkpoint.config)}


@pytest.mark.parametrize(
    ("config", "generation", "written"),
    [
        (262, None, 262),
        ([262, 260], None, [262, 260]),
        (260, {"eos_token_id": [262, 261]}, [262, 261]),
        (262, {}, 262),
        (262, {"eos_token_id": None}, 262),
        (262, {"eos_token_id": 0}, 0),
    ],
)
def test_mlx_lm_ends_a_reply_where_the_checkpoint_does(
    config: object, generation: dict[str, object] | None, written: object, tmp_path: Path
) -> None:
    """mlx-lm takes an id 0 in generation_config.json for none, and then the one of config.json."""
    source = write_checkpoint(tmp_path / "c", config={"eos_token_id": config})
    if generation is not None:
        (source / "generation_config.json").write_text(json.dumps(generation))
    convert(source, "int4", tmp_path / "out")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == written
    with silenced():
        from mlx_lm import load

        _, tokenizer = load(str(tmp_path / "out"), lazy=True)
    with Checkpoint(source) as checkpoint:
        assert tokenizer.eos_token_ids >= {*Tokenizer(source).stop_ids(checkpoint.config)}
