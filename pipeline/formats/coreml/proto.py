"""MIL program -> the Model protobuf of a package, whose constants refer to weight files that others write.

coremltools writes none: every constant of its program that is no literal has a place in a weight file, or it is a
defect. Bytes depend on the program, the files and the metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pipeline.errors import ArtifactError, listed, some
from pipeline.formats.coreml import engine, graph
from pipeline.formats.coreml.mil import types_of_blobs
from pipeline.formats.coreml.names import Blob
from pipeline.formats.coreml.plan import FEWEST
from pipeline.formats.coreml.weights import WeightFile

SPECIFICATION = 9  # iOS 18, macOS 15

DESCRIPTIONS: Mapping[str, Mapping[str, str]] = {
    graph.PREFILL: {
        graph.INPUT_IDS: "A chunk of the prompt's token ids; what is behind `length` is ignored.",
        graph.POSITION: "Tokens before the chunk: 0 for the first.",
        graph.LENGTH: "How many tokens of the chunk count: 1 to all.",
        graph.LOGITS: "Of the token that follows the last one that counts.",
    },
    graph.DECODE: {
        graph.INPUT_IDS: "The next token's id.",
        graph.POSITION: "Tokens before it.",
        graph.LOGITS: "Of the token that follows.",
    },
    graph.SCORE: {
        graph.INPUT_IDS: "Token ids of a window, without a state.",
        graph.LOGITS: "Of the token that follows each one.",
    },
}
"""What Xcode shows of inputs and outputs, by function."""

REPORT = "This is a defect: please report it."

STATE = "Of all tokens before `position`: one state for prefill and decode."


def model(program: Any, files: Sequence[WeightFile], metadata: Mapping[str, str]) -> Any:
    """The coremltools Model protobuf of `graph.program`. `metadata`: user-defined, of the model as a whole.

    Serialize it with deterministic=True.

    Raises:
        ArtifactError: constants that the files do not hold as they are, or that nothing refers to.
    """
    engine.tools()
    from coremltools.converters.mil.backend.mil import load

    _check(program, files)
    exporter = load.MILProtoExporter(program, "", SPECIFICATION)
    exporter.weight_id_to_file_value |= _places(files)
    functions = exporter.export()
    if exporter.blob_writers:
        raise ArtifactError(f"coremltools wrote weights to {', '.join(exporter.blob_writers)}. {REPORT}")
    made = load.CoreMLProtoExporter(
        program, functions, None, None, None, "mlprogram", "milinternal", SPECIFICATION
    ).export(SPECIFICATION)
    for function in made.description.functions:
        texts = DESCRIPTIONS[function.name]
        for feature in (*function.input, *function.output):
            feature.shortDescription = texts[feature.name]
        for feature in function.state:
            feature.shortDescription = STATE
    made.description.metadata.userDefined.update(metadata)
    return made


def _places(files: Sequence[WeightFile]) -> dict[str, Any]:
    """Where each blob's record is, as the protobuf says it."""
    from coremltools.converters.mil.backend.mil import helper
    from coremltools.converters.mil.mil import types

    kinds = {name: types.BUILTIN_TO_PROTO_TYPES[kind] for name, kind in types_of_blobs().items()}
    return {
        blob.name: helper.create_file_value_tensor(
            f"@model_path/weights/{file.name}", file.records[blob.name], blob.shape, kinds[blob.dtype]
        )
        for file in files
        for blob in file.blobs
    }


def _check(program: Any, files: Sequence[WeightFile]) -> None:
    """Each constant of 10 or more elements is a blob of the files in type and shape, each blob is such a constant, and
    nothing was computed from placeholders while the program was built.
    """
    blobs = {blob.name: blob for file in files for blob in file.blobs}
    seen: set[str] = set()
    problems: list[str] = []
    for function in program.functions.values():
        for op in function.operations:
            problems += _problems(op, blobs, seen)
    problems += [f"{name}: a blob that no function refers to" for name in blobs if name not in seen]
    if problems:
        shown = listed(some(problems, "constants"))
        raise ArtifactError(f"the program and its weight files differ:\n{shown}\n{REPORT}")


def _problems(op: Any, blobs: Mapping[str, Blob], seen: set[str]) -> Iterator[str]:
    if op.op_type != "const":
        if any(var.val is not None for var in op.outputs):
            yield f"{op.name}: computed from constants while the program was built"
        return
    (var,) = op.outputs
    size = getattr(var.val, "size", 1)
    if op.weight_id is None:
        if size >= FEWEST:
            yield f"{op.name}: a constant of {size} elements that is no blob"
        return
    seen.add(op.weight_id)
    blob = blobs.get(op.weight_id)
    if blob is None:
        yield f"{op.name}: no blob of a weight file"
    elif blob.shape != tuple(var.shape) or types_of_blobs()[blob.dtype] != var.dtype:
        yield f"{op.name}: {var.dtype.__name__} {list(var.shape)}, a blob {blob.dtype} {list(blob.shape)}"
    elif size < FEWEST:
        yield f"{op.name}: {size} elements, which coremltools puts into the program"
