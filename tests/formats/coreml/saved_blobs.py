"""What a saved package holds, read without the code under test: by coremltools' protobuf, and by hand from the weight
files (coremltools 9.0: mlmodel/src/MILBlob/Blob/StorageFormat.hpp).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, NamedTuple

from pipeline.formats.coreml.engine import tools

CODES = {1: "FLOAT16", 2: "FLOAT32", 4: "INT8", 6: "INT16", 8: "INT4", 11: "UINT4", 13: "UINT6", 14: "INT32"}


class Blob(NamedTuple):
    """`dtype` as the program has it, and as the record has it."""

    dtype: str
    stored: str
    shape: tuple[int, ...]
    data: bytes


def weights_of(out: Path) -> list[Path]:
    return sorted((out / "model.mlpackage" / "Data" / "com.apple.CoreML" / "weights").iterdir())


def records(file: Path) -> list[tuple[str, int]]:
    """Type and bytes of each blob of a weight file, in its order."""
    data = file.read_bytes()
    count, version = struct.unpack_from("<II", data)
    assert version == 2
    found, at = [], 64
    for _ in range(count):
        sentinel, code, size, offset = struct.unpack_from("<IIQQ", data, at)
        assert sentinel == 0xDEADBEEF
        found.append((CODES[code], size))
        at = -(-(offset + size) // 64) * 64
    return found


def spec_of(out: Path) -> Any:
    return tools().utils.load_spec(str(out / "model.mlpackage"))


def blobs(out: Path) -> dict[str, dict[str, Blob]]:
    """By function and name; of a constexpr op by its name and the parameter: 'x.data'."""
    types = tools().proto.MIL_pb2.DataType
    found: dict[str, dict[str, Blob]] = {}
    for name, function in spec_of(out).mlProgram.functions.items():
        own = found.setdefault(name, {})
        for op in function.block_specializations[function.opset].operations:
            values = {"": op.attributes["val"]} if op.type == "const" else {}
            if op.type.startswith("constexpr"):
                values = {f".{parameter}": argument.arguments[0].value for parameter, argument in op.inputs.items()}
            for suffix, value in values.items():
                if value.HasField("blobFileValue"):
                    own[op.outputs[0].name + suffix] = _read(out, value, types)
    return found


def _read(out: Path, value: Any, types: Any) -> Blob:
    place = value.blobFileValue.fileName.replace("@model_path", str(out / "model.mlpackage/Data/com.apple.CoreML"))
    tensor = value.type.tensorType
    with Path(place).open("rb") as file:
        file.seek(value.blobFileValue.offset)
        _, code, size, offset = struct.unpack("<IIQQ", file.read(24))
        file.seek(offset)
        data = file.read(size)
    shape = tuple(dimension.constant.size for dimension in tensor.dimensions)
    return Blob(types.Name(tensor.dataType), CODES[code], shape, data)
