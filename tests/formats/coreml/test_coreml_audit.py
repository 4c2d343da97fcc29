"""The audit of a saved package: what is not as planned is found, whoever made it so."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from saved_blobs import records, weights_of
from support import Shape, write_checkpoint

from pipeline.errors import ArtifactError
from pipeline.formats import TensorHashes
from pipeline.formats.coreml import audit, layers, proto
from pipeline.formats.coreml import write as write_module
from pipeline.formats.coreml.engine import tools
from pipeline.formats.coreml.names import Piece, pieces
from pipeline.formats.coreml.plan import plan, sizes_of
from pipeline.formats.coreml.schemes import scheme as scheme_of
from pipeline.formats.coreml.tables import tables
from pipeline.formats.coreml.weights import WeightFile, layout
from pipeline.formats.coreml.write import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact, EffectiveType, Options

SIZES = {"chunk": 64, "max_context": 200, "score_window": 32}
SHAPE = Shape("qwen2", 1)
MODEL = "model.mlpackage/Data/com.apple.CoreML/model.mlmodel"
Q = "model_layers_0_self_attn_q_proj_weight"


def convert(source: Path, scheme: str, folder: Path) -> Artifact:
    folder.mkdir(parents=True)
    with Checkpoint(source) as checkpoint:
        return write(checkpoint, scheme, folder, options=Options(sizes=SIZES))


def planned(source: Path, scheme: str) -> tuple[list[Piece], list[WeightFile]]:
    with Checkpoint(source) as checkpoint:
        spec = spec_of(checkpoint.config)
    chosen = scheme_of(scheme, Options(sizes=SIZES))
    encodings = plan(spec, chosen)
    parts = [piece for p in encodings for piece in pieces(p)]
    constants = tables(spec, encodings, sizes_of(spec, chosen))
    return parts, layout([*(blob for part in parts for blob in part.blobs), *constants])


def said_of(source: Path, scheme: str, out: Path) -> list[str]:
    """The problems that the audit lists."""
    with pytest.raises(ArtifactError, match="does not hold what was planned") as raised:
        audit.effective_types(out / "model.mlpackage", *planned(source, scheme))
    return [line.removeprefix("  - ") for line in str(raised.value).splitlines() if line.startswith("  - ")]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("audit") / "c", SHAPE)


@pytest.fixture
def made(source: Path, tmp_path: Path) -> Path:
    convert(source, "int8", tmp_path / "made")
    return tmp_path / "made"


# What is as planned


def test_int16_is_16_bit_integers_on_disk(tiny: Path, tmp_path: Path) -> None:
    """At least 95 % of all bytes of the weight files, tables and all, are in blobs of the type INT16."""
    artifact = convert(tiny, "int16", tmp_path / "out")
    sizes: Counter[str] = Counter()
    for dtype, size in records(*weights_of(tmp_path / "out")):
        sizes[dtype] += size
    assert sizes["INT16"] / artifact.size_bytes > 0.95
    matrices = artifact.effective_types["int16"]
    assert sizes["INT16"] == 2 * matrices.weights
    assert sizes["INT16"] + 4 * artifact.effective_types["F32"].weights <= sizes["INT16"] + sizes["FLOAT32"]
    assert artifact.weights == sum(found.weights for found in artifact.effective_types.values())


# Folded constants


def test_a_cast_that_is_computed_while_the_graph_is_built_is_refused(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "unknown", nullcontext)
    with pytest.raises(ArtifactError, match="computed from constants while the program was built"):
        convert(source, "int16", tmp_path / "out")


def test_constants_that_coremltools_folds_are_found(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own passes, its own weight file: what was INT16 is float16, and the audit says so of every function."""
    tools()
    from coremltools.converters.mil.backend.mil.load import CoreMLProtoExporter, MILProtoExporter
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    def model(program: Any, files: list[WeightFile], metadata: dict[str, str]) -> Any:
        for name in ("const_elimination", "dead_code_elimination"):
            PASS_REGISTRY[f"common::{name}"](program)
        folder = tmp_path / "theirs"
        folder.mkdir()
        functions = MILProtoExporter(program, str(folder), 9).export()
        exporter = CoreMLProtoExporter(program, functions, None, None, None, "mlprogram", "milinternal", 9)
        return exporter.export(9)

    def written(folder: Path, *_: object) -> None:
        (tmp_path / "theirs" / "weight.bin").rename(folder / "weight.bin")

    monkeypatch.setattr(layers, "unknown", nullcontext)
    monkeypatch.setattr(proto, "model", model)
    monkeypatch.setattr(write_module, "_write_weights", written)
    monkeypatch.setattr(write_module, "_hashes", lambda *_: TensorHashes("", {}))
    monkeypatch.setattr(audit, "some", lambda problems, *_: problems)
    with pytest.raises(ArtifactError) as raised:
        convert(source, "int16", tmp_path / "out")
    for function in ("decode", "prefill", "score"):
        assert f"  - {function}: {Q}_data is missing\n" in str(raised.value)
        assert f"  - {function}: l0_attn_q_weight: F16 [64, 64] at byte " in str(raised.value)


# Other packages than the plan's


def change(out: Path, how: Callable[[Any], object]) -> None:
    """The model, changed in place."""
    model = tools().proto.Model_pb2.Model()
    model.ParseFromString((out / MODEL).read_bytes())
    how(model)
    (out / MODEL).write_bytes(model.SerializeToString())


def values(model: Any, function: str, name: str) -> Iterator[Any]:
    """The values that refer to a constant: of a const's own, or a parameter of a constexpr op: 'x.scale'."""
    name, _, parameter = name.partition(".")
    proto = model.mlProgram.functions[function]
    for op in proto.block_specializations[proto.opset].operations:
        if op.outputs and op.outputs[0].name == name:
            yield op.inputs[parameter].arguments[0].value if parameter else op.attributes["val"]


def value(model: Any, function: str, name: str) -> Any:
    (found,) = values(model, function, name)
    return found


def of_another_type(model: Any) -> None:
    value(model, "score", f"{Q}.data").type.tensorType.dataType = tools().proto.MIL_pb2.DataType.UINT8


def of_another_shape(model: Any) -> None:
    value(model, "score", f"{Q}.data").type.tensorType.dimensions[0].constant.size = 32


def elsewhere(model: Any) -> None:
    value(model, "decode", f"{Q}.data").blobFileValue.offset = value(
        model, "decode", "model_layers_0_self_attn_o_proj_weight.data"
    ).blobFileValue.offset


def in_the_program(model: Any) -> None:
    value(model, "prefill", f"{Q}.scale").immediateValue.tensor.bytes.values = np.ones(64, np.float16).tobytes()


def unplanned(model: Any) -> None:
    value(model, "score", "rope_cos").blobFileValue.offset += 64


@pytest.mark.parametrize(
    ("how", "problems"),
    [
        (of_another_type, [f"score: {Q}_data: expected INT8 [64, 64], found UINT8 [64, 64]"]),
        (of_another_shape, [f"score: {Q}_data: expected INT8 [64, 64], found INT8 [32, 64]"]),
        (elsewhere, [f"decode: {Q}_data is missing"]),
        (in_the_program, [f"prefill: {Q}: F16 [64, 1] lies in the program itself", f"prefill: {Q}_scale is missing"]),
        (unplanned, [r"score: rope_cos: F32 [288, 8] at byte OFFSET was not planned"]),
    ],
)
def test_a_program_that_is_not_the_plans(
    how: Callable[[Any], None], problems: list[str], source: Path, made: Path
) -> None:
    change(made, how)
    (file,) = planned(source, "int8")[1]
    offset = str(file.records["rope_cos"] + 64)
    assert said_of(source, "int8", made) == [problem.replace("OFFSET", offset) for problem in problems]


def test_weight_files_that_are_not_the_plans(source: Path, made: Path) -> None:
    (file,) = planned(source, "int8")[1]
    (path,) = weights_of(made)
    (path.parent / "more.bin").touch()
    with path.open("r+b") as opened:
        opened.seek(file.records[f"{Q}_data"] + 4)
        opened.write(struct.pack("<I", 6))
        opened.seek(0, 2)
        opened.write(b"\0" * 7)
    at = file.data[f"{Q}_data"]
    assert said_of(source, "int8", made) == [
        f"weight.bin: expected {file.length} bytes, found {file.length + 7}",
        f"{Q}_data: expected INT8, 4096 bytes at {at} of weight.bin, found INT16, 4096 bytes at {at}",
        "more.bin was not planned",
    ]


def test_a_package_of_another_scheme_is_not_the_plans(source: Path, made: Path) -> None:
    said = said_of(source, "fp16", made)
    assert len(said) == 21
    assert said[-1].endswith("more constants")


def test_the_types_are_those_of_the_package(source: Path, made: Path) -> None:
    matrices, norms, biases = 272 * 64 + 2 * 64 * 64 + 2 * 32 * 64 + 3 * 128 * 64, 3 * 64, 64 + 2 * 32
    assert audit.effective_types(made / "model.mlpackage", *planned(source, "int8")) == {
        "int8": EffectiveType(8, matrices),
        "F32": EffectiveType(3, norms),
        "F16": EffectiveType(3, biases),
    }
