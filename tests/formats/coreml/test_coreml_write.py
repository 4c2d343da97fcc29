"""A whole Core ML folder: every weight at its place, the same bytes each time, and what happens when it cannot be
written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from dataclasses import replace
from itertools import cycle
from pathlib import Path

import numpy as np
import pytest
from saved_blobs import Blob, blobs, records, weights_of
from support import Shape, config_of, random_tensors, tokenizer_json, write_checkpoint

from pipeline import artifact as artifacts
from pipeline.errors import (
    CheckpointError,
    OutputError,
    ParamsError,
    QuantizationError,
    TokenizerError,
)
from pipeline.files import new_folder, sha256
from pipeline.formats.coreml import codec
from pipeline.formats.coreml import write as write_module
from pipeline.formats.coreml.engine import tools
from pipeline.formats.coreml.schemes import SCHEMES
from pipeline.formats.coreml.write import write
from pipeline.models import spec_of as model_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact, EffectiveType, Options

ROOT = Path(__file__).parents[3]
SIZES = {"chunk": 64, "max_context": 200, "score_window": 32}
QWEN2 = Shape("qwen2", 1)
QWEN3 = Shape("qwen3", 1, ff=96, heads=4, kv_heads=2, head_dim=32, tied=False)
WEIGHTS = "model.mlpackage/Data/com.apple.CoreML/weights"
PROGRAM = "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"


def convert(source: Path, scheme: str, folder: Path, sizes: dict[str, int] | None = None) -> Artifact:
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpoint(source) as checkpoint:
        return write(checkpoint, scheme, folder, options=Options(sizes=SIZES if sizes is None else sizes))


def files_of(out: Path) -> dict[str, bytes]:
    return {path.relative_to(out).as_posix(): path.read_bytes() for path in out.rglob("*") if path.is_file()}


# Every weight, whole, in its encoding, at its place


def truncated(weights: np.ndarray) -> np.ndarray:
    """What the checkpoint's bfloat16 holds, as float32."""
    return (np.ascontiguousarray(weights, np.float32).view(np.uint32) & 0xFFFF0000).view(np.float32)


def named(stem: str, scheme: str) -> list[str]:
    """The names of a matrix' data, and of its scales or tables."""
    if scheme == "fp16":
        return [stem]
    if scheme == "int16":
        return [f"{stem}_data", f"{stem}_scale"]
    return [f"{stem}.data", f"{stem}.scale"] if scheme.startswith("int") else [f"{stem}.indices", f"{stem}.lut"]


@pytest.mark.parametrize(("scheme", "shape"), [*zip(SCHEMES, cycle((QWEN2, QWEN3)), strict=False), ("int16", QWEN2)])
def test_every_weight_is_stored_whole(
    scheme: str, shape: Shape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 64 rows, with an embedding in parts of 96, 96 and 80: the second block lies in two of them."""
    monkeypatch.setattr("pipeline.formats.streaming.BLOCK_WEIGHTS", 64 * 64)
    monkeypatch.setattr("pipeline.formats.coreml.names.MOST_ROWS", 100)
    convert(write_checkpoint(tmp_path / "c", shape), scheme, tmp_path / "out")
    functions = blobs(tmp_path / "out")
    assert functions.keys() == {"prefill", "decode", "score"}
    packing = SCHEMES[scheme].packing
    expected: dict[str, bytes] = {}
    for name, weights in random_tensors(shape).items():
        stem, weights = name.replace(".", "_"), truncated(weights)
        if weights.ndim == 1:
            expected[stem] = weights.astype("<f4" if "norm" in name else "<f2").tobytes()
            continue
        whole = codec.encode(weights, packing, "F16")
        starts = [0, 96, 192] if len(weights) == 272 else [0]
        for i, start in enumerate(starts):
            rows = slice(start, [*starts, len(weights)][i + 1])
            part = whole if len(starts) == 1 else codec.encode(weights[rows], packing, "F16")
            names = named(stem if len(starts) == 1 else f"{stem}_{i}", scheme)
            expected |= {one: array.tobytes() for one, array in zip(names, part, strict=True)}
    for own in functions.values():
        assert all(blob.dtype == blob.stored for blob in own.values())
        found = {name: blob.data for name, blob in own.items() if not name.startswith(("rope_", "positions", "zeros_"))}
        assert found.keys() == expected.keys()
        assert [name for name in found if found[name] != expected[name]] == []
    fp16 = functions["score"].get("model_layers_0_self_attn_q_proj_weight")
    if scheme == "fp16":
        assert fp16 == Blob(
            *("FLOAT16", "FLOAT16", (4 * (16 if shape is QWEN2 else 32), 64)),
            truncated(random_tensors(shape)["model.layers.0.self_attn.q_proj.weight"]).astype("<f2").tobytes(),
        )


def test_many_weight_files_hold_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN2)
    one = convert(source, "int16", tmp_path / "one")
    monkeypatch.setattr("pipeline.formats.coreml.weights.MOST_BYTES", 40_000)
    many = convert(source, "int16", tmp_path / "many")
    files = weights_of(tmp_path / "many")
    count = len(files)
    assert count > 3
    assert [file.name for file in files] == [f"weight-{i:05d}-of-{count:05d}.bin" for i in range(1, count + 1)]
    assert {file.stat().st_size < 40_000 for file in files} == {True}
    assert sum(len(records(file)) for file in files) == len(records(*weights_of(tmp_path / "one")))
    assert blobs(tmp_path / "many") == blobs(tmp_path / "one")
    assert many.tensors_sha256 == one.tensors_sha256
    assert {f"{WEIGHTS}/{file.name}" for file in files} <= many.files.keys()
    assert many.size_bytes == sum(file.stat().st_size for file in files)


# A package like any other


def test_coremltools_opens_it(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a b é", QWEN2)
    (source / "generation_config.json").write_text('{"eos_token_id": [262, 261]}')
    convert(source, "int4", tmp_path / "out")
    package = str(tmp_path / "out" / "model.mlpackage")
    ct = tools()
    from coremltools.libmodelpackage import ModelPackage

    assert ModelPackage.isValid(package)
    assert ModelPackage(package).getRootModel().path() == f"{package}/Data/com.apple.CoreML/model.mlmodel"
    weights = ModelPackage(package).findItemByNameAuthor("weights", "com.apple.CoreML")
    assert weights.path() == f"{package}/Data/com.apple.CoreML/weights"
    model = ct.models.MLModel(package, skip_model_load=True)
    assert model.weights_dir == weights.path()
    spec = model.get_spec()
    assert spec.specificationVersion == 9
    assert [function.name for function in spec.description.functions] == ["prefill", "decode", "score"]
    assert dict(spec.description.metadata.userDefined) == {
        "quantgate.scheme": "int4+chunk=64,max_context=200,score_window=32",
        "quantgate.source": "a b é",
        "quantgate.chunk": "64",
        "quantgate.max_context": "200",
        "quantgate.score_window": "32",
    }
    shapes = {
        f"{function.name} {feature.name}": list(feature.type.multiArrayType.shape)
        for function in spec.description.functions
        for feature in function.input
    }
    assert shapes == {
        "prefill input_ids": [1, 64],
        "prefill position": [1],
        "prefill length": [1],
        "decode input_ids": [1, 1],
        "decode position": [1],
        "score input_ids": [1, 32],
    }
    swift = (tmp_path / "out" / "LanguageModel.swift").read_text()
    assert "static let chunk = 64\n" in swift
    assert "static let maxContext = 200\n" in swift
    assert "static let stopIDs: Set<Int32> = [262, 261]\n" in swift


def test_artifact_says_what_the_folder_is(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN2)
    artifact = artifacts.convert(source, "coreml", "int8", tmp_path / "out", Options(sizes=SIZES))
    assert artifacts.load(tmp_path / "out") == artifact
    tensors = random_tensors(QWEN2)
    norms = [weights.size for name, weights in tensors.items() if "norm" in name]
    biases = [weights.size for name, weights in tensors.items() if "bias" in name]
    matrices = [weights for weights in tensors.values() if weights.ndim == 2]
    packed = sum(weights.size for weights in matrices)
    assert artifact.effective_types == {
        "int8": EffectiveType(len(matrices), packed),
        "F32": EffectiveType(len(norms), sum(norms)),
        "F16": EffectiveType(len(biases), sum(biases)),
    }
    bits = 8 * packed + 16 * sum(len(weights) for weights in matrices) + 32 * sum(norms) + 16 * sum(biases)
    assert artifact.weights == packed + sum(norms) + sum(biases)
    assert artifact.bits_per_weight == pytest.approx(bits / artifact.weights, rel=1e-12)
    found = {name: path for name, path in ((n, tmp_path / "out" / n) for n in files_of(tmp_path / "out"))}
    assert found.keys() - {"artifact.json"} == {
        *("model.mlpackage/Manifest.json", PROGRAM, f"{WEIGHTS}/weight.bin"),
        *("config.json", "tokenizer.json", "LanguageModel.swift"),
    }
    assert artifact.files == {name: sha256(path) for name, path in found.items() if name != "artifact.json"}
    assert artifact.size_bytes == (tmp_path / "out" / WEIGHTS / "weight.bin").stat().st_size
    assert artifact.folder_bytes == sum((tmp_path / "out" / name).stat().st_size for name in artifact.files)
    assert (artifact.format, artifact.scheme) == ("coreml", "int8+chunk=64,max_context=200,score_window=32")
    assert artifact.source is not None
    assert artifact.source.name == "c"
    assert artifact.tools["coremltools"] == "9.0"


def test_tensors_are_the_same_whatever_the_sizes(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN2)
    one, other = convert(source, "int8", tmp_path / "a"), convert(source, "int8", tmp_path / "b", {"chunk": 100})
    assert one.tensors_sha256 == other.tensors_sha256
    assert one.scheme != other.scheme

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] *= 2

    changed = convert(write_checkpoint(tmp_path / "d", QWEN2, change=change), "int8", tmp_path / "e")
    assert changed.tensors_sha256 != one.tensors_sha256
    differing = {name for name, digest in one.tensors.items() if changed.tensors[name] != digest}
    assert one.tensors == other.tensors
    assert differing == {"model_norm_weight"}


def test_a_tied_head_is_the_embedding(tmp_path: Path) -> None:
    """The same constants serve both: without them the head would be 272 rows of int8 with a scale each, and their
    records.
    """
    sizes = [
        convert(
            write_checkpoint(tmp_path / f"{tied}", replace(QWEN2, tied=tied)), "int8", tmp_path / f"o{tied}"
        ).size_bytes
        for tied in (True, False)
    ]
    head = 272 * 64 + 64 + 272 * 2 + 64
    assert sizes[1] - sizes[0] == pytest.approx(head, abs=2 * 64)


def test_files_beside_the_package_are_carried_as_they_are(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN2)
    for name, text in {"merges.txt": "#version\na b\n", "chat_template.jinja": "{{ 'é' }}", "README.md": "no"}.items():
        (source / name).write_text(text, encoding="utf-8")
    convert(source, "int8", tmp_path / "out")
    for name in ("config.json", "tokenizer.json", "merges.txt", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "out" / "README.md").exists()


def test_progress_reaches_all_weights(tmp_path: Path) -> None:
    done: list[float] = []
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        artifact = write(checkpoint, "int4", tmp_path, done.append)
    assert sum(done) == artifact.weights


# The same bytes, on any machine, in little memory


HUNDRED = Shape("qwen2", 12, hidden=768, ff=2048, heads=12, kv_heads=4, vocab=32_000)  # 100M weights

ELSEWHERE = """
import sys
for name in ("torch", "transformers", "safetensors", "mlx", "gguf", "llama_cpp", "sklearn", "scipy"):
    sys.modules[name] = None
from pathlib import Path
from pipeline.artifact import convert
from pipeline.formats.coreml.engine import tools
from pipeline.metrics.memory import peak_rss_bytes
from pipeline.types import Options
place = Path(sys.argv[1])
options = Options(sizes={"chunk": 64, "max_context": 200, "score_window": 32})
for scheme in sys.argv[2:]:
    convert(place / "c", "coreml", scheme, place / f"elsewhere-{scheme}", options)
before = peak_rss_bytes()
convert(place / "hundred", "coreml", "int8", place / "large", options)
print(before, peak_rss_bytes())
"""


def of_zeros(folder: Path, shape: Shape) -> Path:
    """A checkpoint that takes no room on disk."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(shape)))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(shape.vocab)))
    header, offset = {}, 0
    for tensor in model_of(config_of(shape)).tensors:
        end = offset + 2 * tensor.weights
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    head = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(head).to_bytes(8, "little") + head)
        file.truncate(8 + len(head) + offset)
    return folder


def test_a_machine_without_torch_makes_the_same_files_in_little_memory(tmp_path: Path) -> None:
    """200 MB of bfloat16 in 60 MB beside what the libraries take."""
    schemes = ("int16", "pal4")
    source = write_checkpoint(tmp_path / "c", QWEN3)
    of_zeros(tmp_path / "hundred", HUNDRED)
    command = [sys.executable, "-W", "error", "-c", ELSEWHERE, str(tmp_path), *schemes]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for scheme in schemes:
        convert(source, scheme, tmp_path / scheme)
        elsewhere = files_of(tmp_path / f"elsewhere-{scheme}")
        del elsewhere["artifact.json"]
        assert files_of(tmp_path / scheme) == elsewhere
    assert (tmp_path / "large" / WEIGHTS / "weight.bin").stat().st_size > 100e6
    before, after = map(int, done.stdout.split())
    assert after - before < 60e6


def test_a_checkpoint_gives_the_same_bytes_however_it_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other conversions come between, and blocks of other rows."""
    source = write_checkpoint(tmp_path / "c", QWEN2)
    for scheme in ("int4", "pal4"):
        convert(source, scheme, tmp_path / "one" / scheme)
    monkeypatch.setattr("pipeline.formats.streaming.BLOCK_WEIGHTS", 17 * 64)
    for scheme in ("int4", "pal4"):
        convert(source, scheme, tmp_path / "two" / scheme)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    assert len(files_of(tmp_path / "one")) == 2 * 6


# What is refused


def refused(source: Path, scheme: str, place: Path, kind: type[Exception], sizes: dict[str, int] | None = None) -> str:
    """What is said, once nothing is left in `place`."""
    place.mkdir()
    with Checkpoint(source) as checkpoint, pytest.raises(kind) as raised, new_folder(place / "out") as partial:
        write(checkpoint, scheme, partial, options=Options(sizes=sizes or {}))
    assert list(place.iterdir()) == []
    return str(raised.value)


@pytest.mark.parametrize(
    ("scheme", "shape", "message"),
    [
        ("int4", replace(QWEN2, hidden=48, ff=96), "rows of 48 weights do not divide into blocks of 32"),
        ("pal4", replace(QWEN2, vocab=280), "280 rows do not divide into groups of 16"),
    ],
)
def test_matrices_that_do_not_divide_are_refused_before_work(
    scheme: str, shape: Shape, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write_module, "encode_all", None)  # which would be the work
    said = refused(write_checkpoint(tmp_path / "c", shape), scheme, tmp_path / "place", QuantizationError)
    assert f"model.embed_tokens.weight: {message}" in said
    assert "Take fp16" in said


@pytest.mark.parametrize("scheme", ["fp16", "int16", "int4", "pal4"])
def test_weights_that_float16_does_not_hold_are_all_named_and_counted(
    scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """9e3 fits, 7e4 does not; float32 norms hold both. Counted over all blocks, and both parts of one."""

    def change(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"][90:100, 3] = np.nan
        tensors["model.layers.0.mlp.up_proj.weight"][3, 5:8] = -np.inf
        tensors["model.layers.0.mlp.down_proj.weight"][::9, 0] = 7e4
        tensors["model.layers.0.mlp.gate_proj.weight"][::9, 0] = 9e3
        tensors["model.layers.0.self_attn.q_proj.bias"][2] = -7e4
        tensors["model.layers.0.input_layernorm.weight"][:] = 7e4
        tensors["model.norm.weight"][1] = np.nan

    monkeypatch.setattr("pipeline.formats.streaming.BLOCK_WEIGHTS", 64 * 64)
    monkeypatch.setattr("pipeline.formats.coreml.names.MOST_ROWS", 100)
    source = write_checkpoint(tmp_path / "c", QWEN2, change=change)
    said = refused(source, scheme, tmp_path / "place", QuantizationError)
    lines = sorted(line for line in said.splitlines() if line.startswith("  - "))
    counts = {name: int(rest.rpartition("(")[2].split()[0]) for name, _, rest in (x[4:].partition(":") for x in lines)}
    assert counts == {
        "model.embed_tokens.weight": 10,
        "model.layers.0.mlp.up_proj.weight": 3,
        "model.layers.0.self_attn.q_proj.bias": 1,
        "model.norm.weight": 1,
        "model.layers.0.mlp.down_proj.weight": 8,
    }
    assert all("finite" in line for line in lines if "embed" in line or "up_proj" in line or "model.norm" in line)


def test_a_checkpoint_that_is_not_whole_is_refused(tmp_path: Path) -> None:
    def change(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        tensors["extra.weight"] = np.zeros((2, 2), np.float32)

    said = refused(write_checkpoint(tmp_path / "c", change=change), "int8", tmp_path / "place", CheckpointError)
    assert "model.norm.weight: missing" in said
    assert "extra.weight: not a tensor of qwen2" in said


def test_a_tokenizer_is_needed_and_must_fit(tmp_path: Path) -> None:
    source, other = write_checkpoint(tmp_path / "c"), write_checkpoint(tmp_path / "d")
    (other / "tokenizer.json").write_text((source / "tokenizer.json").read_text().replace('"id": 262', '"id": 272'))
    assert "has id 272, but the embedding has 272 rows" in refused(other, "int8", tmp_path / "other", TokenizerError)
    (source / "tokenizer.json").unlink()
    assert "tokenizer.json cannot be read" in refused(source, "int8", tmp_path / "place", TokenizerError)


def test_too_little_disk_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    source = write_checkpoint(tmp_path / "c")
    first = convert(source, "int8", tmp_path / "first")
    needed = first.size_bytes + sum((source / name).stat().st_size for name in ("config.json", "tokenizer.json"))
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9, needed - 1))
    assert "MB are free. Make room." in refused(source, "int8", tmp_path / "place", OutputError, SIZES)
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9, needed))
    convert(source, "int8", tmp_path / "out")


def test_unknown_schemes_and_options_are_refused(tmp_path: Path) -> None:
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        with pytest.raises(ParamsError, match=r"coreml has no scheme 'int5'; did you mean"):
            write(checkpoint, "int5", tmp_path)
        with pytest.raises(ParamsError, match="coreml schemes take none"):
            write(checkpoint, "int4", tmp_path, options=Options(types={"attn_v": "int8"}))
        with pytest.raises(ParamsError, match="chunk must be 64 to 512 tokens, found 32"):
            write(checkpoint, "int4", tmp_path, options=Options(sizes={"chunk": 32}))
        with pytest.raises(ParamsError, match="max_context 4096 is beyond the model's context of 2048 tokens"):
            write(checkpoint, "int4", tmp_path, options=Options(sizes={"max_context": 4096}))
        with pytest.raises(ParamsError, match="imatrix: coreml artifacts are made without one"):
            write(checkpoint, "int4", tmp_path, options=Options(imatrix=tmp_path / "a.gguf"))


def test_a_package_is_no_checkpoint(tmp_path: Path) -> None:
    convert(write_checkpoint(tmp_path / "c"), "int4", tmp_path / "out")
    with pytest.raises(CheckpointError, match=r"holds neither model\.safetensors"):
        Checkpoint(tmp_path / "out")


def test_what_a_killed_conversion_left_is_removed(tmp_path: Path) -> None:
    left = tmp_path / ".out.partial" / WEIGHTS
    left.mkdir(parents=True)
    (left / "weight-00001-of-00002.bin").write_bytes(b"half")
    artifact = artifacts.convert(write_checkpoint(tmp_path / "c"), "coreml", "int8", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"c", "out"}
    assert files_of(tmp_path / "out").keys() == {*artifact.files, "artifact.json"}


# What three functions cost


@pytest.mark.parametrize("scheme", ["pal4"])  # the smallest package
def test_three_functions_cost_at_most_2_percent_more_than_one(scheme: str) -> None:
    """At 100M weights, with the programs alone: the weights are those of the plan."""
    from pipeline.formats.coreml import graph, proto
    from pipeline.formats.coreml.names import pieces
    from pipeline.formats.coreml.plan import plan, sizes_of
    from pipeline.formats.coreml.tables import tables
    from pipeline.formats.coreml.weights import layout

    spec = model_of(config_of(HUNDRED))
    planned, sizes = plan(spec, SCHEMES[scheme]), sizes_of(spec, SCHEMES[scheme])
    constants = [blob for p in planned for piece in pieces(p) for blob in piece.blobs]
    files = layout([*constants, *tables(spec, planned, sizes)])
    program = graph.program(spec, planned, sizes)
    weights = sum(file.length for file in files)
    three = weights + proto.model(program, files, {}).ByteSize()
    for name in ("decode", "score"):
        program.functions.pop(name)
    one = weights + proto.model(program, files, {}).ByteSize()
    assert weights > 50e6
    assert 1.002 < three / one < 1.02
