"""The protobuf of a package: what it says, that it is the same each time, and what is refused as a defect."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, config_of, stored, write_checkpoint

from pipeline.errors import ArtifactError, QuantizationError
from pipeline.formats.coreml import engine, graph, proto
from pipeline.formats.coreml.mil import builder
from pipeline.formats.coreml.names import Blob, pieces
from pipeline.formats.coreml.plan import plan, sizes_of
from pipeline.formats.coreml.schemes import scheme
from pipeline.formats.coreml.tables import tables
from pipeline.formats.coreml.weights import WeightFile, layout
from pipeline.formats.coreml.write import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Options

SHAPE = Shape("qwen3", 2, hidden=64, ff=96, heads=4, kv_heads=2, head_dim=32)
SIZES = {"chunk": 64, "max_context": 200, "score_window": 32}


def parts(name: str = "int4", shape: Shape = SHAPE) -> tuple[Any, list[Blob]]:
    """A program and its blobs."""
    spec, made = spec_of(config_of(shape)), scheme(name, Options(sizes=SIZES))
    planned, sizes = plan(spec, made), sizes_of(spec, made)
    blobs = [blob for p in planned for piece in pieces(p) for blob in piece.blobs]
    return graph.program(spec, planned, sizes), [*blobs, *tables(spec, planned, sizes)]


def serialized(name: str, shape: Shape = SHAPE) -> bytes:
    program, blobs = parts(name, shape)
    made: bytes = proto.model(program, layout(blobs), {"a": "b"}).SerializeToString(deterministic=True)
    return made


def types_of(features: Sequence[Any]) -> dict[str, tuple[str, list[int]]]:
    """Type and shape of inputs, outputs or states, by their names."""
    found = {}
    for feature in features:
        array = feature.type.multiArrayType
        if feature.type.WhichOneof("Type") == "stateType":
            array = feature.type.stateType.arrayType
        found[feature.name] = (array.ArrayDataType.Name(array.dataType), [*array.shape])
    return found


def test_three_functions_are_described() -> None:
    program, blobs = parts()
    made = proto.model(program, layout(blobs), {"com.example.scheme": "int4", "x": "y"})
    assert made.specificationVersion == 9
    description = made.description
    assert description.defaultFunctionName == "prefill"
    assert dict(description.metadata.userDefined) == {"com.example.scheme": "int4", "x": "y"}
    found = {f.name: (types_of(f.input), types_of(f.output), types_of(f.state)) for f in description.functions}
    one = ("INT32", [1])
    states = dict.fromkeys(("k_cache", "v_cache"), ("FLOAT16", [2, 2, 288, 32]))  # 200 + 64 - 1, to a multiple of 32
    assert found == {
        "prefill": (
            {"input_ids": ("INT32", [1, 64]), "position": one, "length": one},
            {"logits": ("FLOAT16", [1, 1, 272])},
            states,
        ),
        "decode": ({"input_ids": ("INT32", [1, 1]), "position": one}, {"logits": ("FLOAT16", [1, 1, 272])}, states),
        "score": ({"input_ids": ("INT32", [1, 32])}, {"logits": ("FLOAT16", [1, 32, 272])}, {}),
    }
    assert all(x.shortDescription for f in description.functions for x in (*f.input, *f.output, *f.state))
    assert {f.opset for f in made.mlProgram.functions.values()} == {"CoreML8"}


@pytest.mark.parametrize("name", ["fp16", "int16", "int4"])
def test_the_same_program_is_the_same_bytes(name: str) -> None:
    """Whatever the process has built before."""
    first = serialized(name)
    serialized("int8", Shape("qwen2", 3, tied=False))
    builder()._get_free_name("cast")
    assert serialized(name) == first


def test_coremltools_reads_it_back(tmp_path: Path) -> None:
    """By its own frontend: each function with its types, and the weights of all as they were written."""
    source = write_checkpoint(tmp_path / "source", SHAPE, "F16")
    (tmp_path / "out").mkdir()
    with Checkpoint(source) as checkpoint:
        write(checkpoint, "int4", tmp_path / "out", options=Options(sizes=SIZES))
        embedding = checkpoint.tensor(stored(checkpoint, "model.embed_tokens.weight"))
        norm = checkpoint.tensor(stored(checkpoint, "model.norm.weight"))
    ct = engine.tools()
    from coremltools.converters.mil.frontend.milproto import load
    from coremltools.converters.mil.mil import types

    package = tmp_path / "out" / "model.mlpackage"
    spec = ct.utils.load_spec(str(package))
    program = load.load(spec, 9, str(package / "Data/com.apple.CoreML/weights"))
    assert {*program.functions} == {"prefill", "decode", "score"}
    for name, length, rows in (("prefill", 64, 1), ("decode", 1, 1), ("score", 32, 32)):
        function = program.functions[name]
        assert function.inputs["input_ids"].shape == (1, length)
        (logits,) = function.outputs
        assert (logits.name, logits.shape, logits.dtype) == ("logits", (1, rows, 272), types.fp16)
        weights = {op.name: op for op in function.operations}
        found = weights["model_embed_tokens_weight"].materialized_val_inference()
        assert np.abs(found - embedding).max() <= np.abs(embedding).max() / 14 * 1.01  # half a step of int4
        np.testing.assert_array_equal(weights["model_norm_weight"].outputs[0].val, norm)


# Defects


def first_const(program: Any, name: str) -> Any:
    return next(op for op in program.functions["score"].operations if op.name == name)


def refused(program: Any, files: Sequence[WeightFile]) -> str:
    with pytest.raises(ArtifactError, match="This is a defect: please report it") as caught:
        proto.model(program, files, {})
    return str(caught.value)


def test_a_constant_without_a_place_is_refused() -> None:
    program, blobs = parts("fp16")
    first_const(program, "model_norm_weight")._weight_id = None
    assert "model_norm_weight: a constant of 64 elements that is no blob" in refused(program, layout(blobs))


CHANGES: dict[str, Callable[[list[Blob]], list[Blob]]] = {
    "positions: no blob of a weight file": lambda blobs: [b for b in blobs if b.name != "positions"],
    "idle: a blob that no function refers to": lambda blobs: [*blobs, Blob("idle", "data", "F16", (64,))],
    "zeros_64: fp16 [64], a blob F16 [65]": lambda blobs: [
        replace(b, shape=(65,)) if b.name == "zeros_64" else b for b in blobs
    ],
    "model_norm_weight: fp32 [64], a blob F16 [64]": lambda blobs: [
        replace(b, dtype="F16") if b.name == "model_norm_weight" else b for b in blobs
    ],
}


@pytest.mark.parametrize("message", CHANGES)
def test_files_that_are_not_the_programs_are_refused(message: str) -> None:
    program, blobs = parts("int8")
    assert message in refused(program, layout(CHANGES[message](blobs)))


def test_codes_of_another_width_are_refused() -> None:
    """int4 and int8 are both int8 to NumPy."""
    program, blobs = parts("int4")
    wrong = [replace(b, dtype="INT8") if b.dtype == "INT4" else b for b in blobs]
    assert "model_embed_tokens_weight_data" in refused(program, layout(wrong))


def test_what_was_computed_from_placeholders_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions of `score` that the builder has sliced out of zeros."""
    from contextlib import nullcontext

    monkeypatch.setattr(graph, "unknown", nullcontext)
    program, blobs = parts("fp16")
    assert "keys: computed from constants while the program was built" in refused(program, layout(blobs))


def test_constants_too_short_for_a_file_are_refused_by_the_plan() -> None:
    """Eight rows have eight scales, and no bias of eight zeros either."""
    shape = replace(SHAPE, heads=1, kv_heads=1, head_dim=8)
    for name in ("fp16", "int8"):
        with pytest.raises(QuantizationError) as caught:
            parts(name, shape)
        assert "q_proj.weight: 8 rows; a weight file holds biases and scales of 10 or more" in str(caught.value)
        assert "Take another format." in str(caught.value)
