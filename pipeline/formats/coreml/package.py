"""What a saved package holds: its functions, their operations, and the constants of its weight files.

Format: an .mlpackage is a folder whose Manifest.json names the root model, the protobuf Model of coremltools 9.0
(mlmodel/format/Model.proto, MIL.proto). Weight files lie beside it; weights.py reads their records.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError
from pipeline.files import read_object, reading
from pipeline.formats.coreml import codec, engine, weights
from pipeline.formats.coreml.names import BITS

PACKAGE = "model.mlpackage"
DATA = "Data/com.apple.CoreML"
MODEL = "model.mlmodel"
WEIGHTS = "weights"

MODEL_PATH = "@model_path/"  # what a weight file's name begins with: the folder that the model lies in

DTYPES: Mapping[str, Any] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "INT64": np.int64,
    "UINT64": np.uint64,
    "INT32": np.int32,
    "UINT32": np.uint32,
    "INT16": np.int16,
    "UINT16": np.uint16,
    "INT8": np.int8,
    "UINT8": np.uint8,
    "BOOL": np.bool_,
}
"""NumPy's types of the tensors that are read, beside the narrow ones, whose codes are packed."""

NARROW = {name: bits for name, bits in BITS.items() if bits < 8}
"""Bits of a code."""

FLEXIBLE = -1
"""A dimension that the caller chooses."""

AGAIN = "Convert again."


@dataclass(frozen=True)
class Tensor:
    """A variable: `dtype` is MIL's type as names.BITS spells it, or 'STRING'."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {['?' if n == FLEXIBLE else n for n in self.shape]}".replace("'", "")


@dataclass(frozen=True)
class Value:
    """A value in the program, or the place of one in a weight file. `tensor` bears no name."""

    tensor: Tensor
    proto: Any
    file: str | None = None
    record: int = 0

    @property
    def identity(self) -> tuple[object, ...]:
        """The same for the same value."""
        at = (self.file, self.record) if self.file is not None else (self.proto.SerializeToString(),)
        return (*at, self.tensor.dtype, self.tensor.shape)


@dataclass(frozen=True)
class Operation:
    """`inputs` are the arguments of each parameter: names of variables, or values. `name` is that of its output."""

    type: str
    name: str
    inputs: Mapping[str, tuple[str | Value, ...]]
    attributes: Mapping[str, Value]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Function:
    name: str
    opset: str
    inputs: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    operations: tuple[Operation, ...]


@dataclass(frozen=True)
class Constant:
    """A constant of a weight file: the argument `parameter` of an operation of type `op`, whose record is at `record`.

    `name` is the output of that operation: the constant itself where it is a 'const'. `file` is its path beside the
    model, 'weights/weight.bin'; `value` is for Package.value.
    """

    name: str
    op: str
    parameter: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    record: int
    value: Value


class Package:
    """A saved package.

    Raises:
        ArtifactError: no package, one that is not whole, or of another kind than an ML Program.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.model_path = _root_model(path)
        from google.protobuf.message import DecodeError

        with reading(self.model_path, ArtifactError):
            data = self.model_path.read_bytes()
        self.model = engine.tools().proto.Model_pb2.Model()
        try:
            self.model.ParseFromString(data)
        except DecodeError as error:
            raise ArtifactError(f"{self.model_path} is no Core ML model, or cut short ({error}). {AGAIN}") from error
        if (kind := self.model.WhichOneof("Type")) != "mlProgram":
            raise ArtifactError(f"{self.model_path}: expected an ML Program, found {kind or 'no model'}. {AGAIN}")
        self.shared: WeakValueDictionary[int, Any] = WeakValueDictionary()
        self._identities: dict[tuple[object, ...], int] = {}

    @cached_property
    def functions(self) -> dict[str, Function]:
        """By their names.

        Raises:
            ArtifactError: a variable of a kind that is not read.
        """
        return {name: self._function(name, proto) for name, proto in sorted(self.model.mlProgram.functions.items())}

    def function(self, name: str) -> Function:
        """Raises: ArtifactError: no such function."""
        if name not in self.functions:
            raise ArtifactError(f"{self.path} has no function {name!r}; it has {', '.join(self.functions)}.")
        return self.functions[name]

    def constants(self, function: str) -> list[Constant]:
        """Those that lie in weight files, in the program's order, one for each use by a constexpr operation.

        Raises:
            ArtifactError: no such function.
        """
        return [
            Constant(
                op.name,
                op.type,
                parameter,
                value.tensor.dtype,
                value.tensor.shape,
                value.file.removeprefix(MODEL_PATH),
                value.record,
                value,
            )
            for op in self.function(function).operations
            for parameter, value in _values(op)
            if value.file is not None
        ]

    def value(self, value: Value) -> NDArray[Any] | str:
        """The array in its type and shape; codes of less than 8 bits as int8 or uint8. A text as str.

        Raises:
            ArtifactError: a weight file that is absent or cut short, a record of another type or size than the
                program says, or a type that is not read.
        """
        tensor = value.tensor
        is_text = tensor.dtype == "STRING" and not tensor.shape
        if not is_text and tensor.dtype not in {*DTYPES, *NARROW}:
            raise ArtifactError(f"{self.model_path}: a constant is {tensor}, which is not read. {AGAIN}")
        return self._immediate(value) if value.file is None else self._stored(value)

    def identity(self, key: tuple[object, ...]) -> int:
        """A number for a key, so that keys can be made of others and stay short."""
        return self._identities.setdefault(key, len(self._identities))

    def weight_file(self, name: str) -> Path:
        """Where the weight file that a program calls `name` lies.

        Raises:
            ArtifactError: a name that leads out of the package.
        """
        inner = Path(name.removeprefix(MODEL_PATH))
        if not name.startswith(MODEL_PATH) or ".." in inner.parts or inner.is_absolute():
            raise ArtifactError(f"{self.model_path}: weights in {name!r}, expected {MODEL_PATH}{WEIGHTS}/…. {AGAIN}")
        return self.model_path.parent / inner

    def _stored(self, value: Value) -> NDArray[Any]:
        assert value.file is not None
        tensor, path = value.tensor, self.weight_file(value.file)
        entry = weights.read_entry(path, value.record)
        size = _size(tensor)
        if (entry.dtype, entry.size) != (tensor.dtype, size):
            raise ArtifactError(
                f"{path}: expected {tensor}, {size} bytes, in the blob at byte {value.record}, found {entry.dtype}, "
                f"{entry.size} bytes. {AGAIN}"
            )
        with reading(path, ArtifactError):
            data = np.fromfile(path, np.uint8, size, offset=entry.offset)
        if len(data) < size:
            raise ArtifactError(f"{path} was cut short while it was read. {AGAIN}")
        return _array(data, tensor)

    def _immediate(self, value: Value) -> NDArray[Any] | str:
        tensor, proto = value.tensor, value.proto.immediateValue.tensor
        kind = proto.WhichOneof("value")
        found: Any = getattr(proto, kind).values if kind else ()
        expected = _size(tensor) if kind == "bytes" else prod(tensor.shape)
        if len(found) != expected:
            what = "bytes" if kind == "bytes" else "values"
            raise ArtifactError(
                f"{self.model_path}: expected {tensor}, {expected} {what}, in a constant, found {len(found)}. {AGAIN}"
            )
        if tensor.dtype == "STRING":
            return str(found[0])
        if kind == "bytes":
            return _array(np.frombuffer(found, np.uint8), tensor)
        return np.array(found, DTYPES[tensor.dtype]).reshape(tensor.shape)

    def _function(self, name: str, proto: Any) -> Function:
        if proto.opset not in proto.block_specializations:
            raise ArtifactError(f"{self.model_path}: {name} has no block for its opset {proto.opset}. {AGAIN}")
        block = proto.block_specializations[proto.opset]
        inputs = [(self._tensor(i.name, i.type), i.type.WhichOneof("type")) for i in proto.inputs]
        operations = tuple(self._operation(op) for op in block.operations)
        known = {t.name: t for op in operations for t in op.outputs} | {t.name: t for t, _ in inputs}
        if absent := [output for output in block.outputs if output not in known]:
            raise ArtifactError(f"{self.model_path}: {name} gives {', '.join(absent)}, which nothing makes. {AGAIN}")
        return Function(
            name,
            proto.opset,
            tuple(tensor for tensor, kind in inputs if kind != "stateType"),
            tuple(tensor for tensor, kind in inputs if kind == "stateType"),
            tuple(known[output] for output in block.outputs),
            operations,
        )

    def _operation(self, proto: Any) -> Operation:
        attributes = {key: self._value(value) for key, value in proto.attributes.items() if key != "name"}
        outputs = tuple(self._tensor(output.name, output.type) for output in proto.outputs)
        given = proto.attributes["name"].immediateValue.tensor.strings.values if "name" in proto.attributes else ()
        inputs = {
            parameter: tuple(
                binding.name if binding.WhichOneof("binding") == "name" else self._value(binding.value)
                for binding in argument.arguments
            )
            for parameter, argument in sorted(proto.inputs.items())
        }
        name = outputs[0].name if outputs else (given[0] if given else proto.type)
        return Operation(proto.type, name, inputs, attributes, outputs)

    def _value(self, proto: Any) -> Value:
        tensor = self._tensor("", proto.type)
        if proto.WhichOneof("value") == "blobFileValue":
            return Value(tensor, proto, proto.blobFileValue.fileName, proto.blobFileValue.offset)
        return Value(tensor, proto)

    def _tensor(self, name: str, proto: Any) -> Tensor:
        kind = proto.WhichOneof("type")
        if kind == "stateType":
            return self._tensor(name, proto.stateType.wrappedType)
        if kind != "tensorType":
            raise ArtifactError(f"{self.model_path}: {name or 'a constant'} is of kind {kind}: only tensors are read.")
        dtype = engine.tools().proto.MIL_pb2.DataType.Name(proto.tensorType.dataType).replace("FLOAT", "F")
        return Tensor(name, dtype, tuple(_dimension(d) for d in proto.tensorType.dimensions))


def _root_model(path: Path) -> Path:
    """The model that the manifest names; the usual one where there is no manifest."""
    usual = Path(DATA) / MODEL
    manifest = path / "Manifest.json"
    with reading(path, ArtifactError):
        if not path.is_dir() or not (manifest.exists() or (path / usual).exists()):
            raise ArtifactError(
                f"{path} is no Core ML package: a folder with Manifest.json is expected. Check the path."
            )
        if not manifest.exists():
            return path / usual
    read = read_object(manifest, ArtifactError)
    match read:
        case {"rootModelIdentifier": str(root), "itemInfoEntries": dict(items)}:
            match items.get(root):
                case {"path": str(inner)} if ".." not in Path(inner).parts and not Path(inner).is_absolute():
                    return path / "Data" / inner
    raise ArtifactError(f"{manifest}: expected the path of the root model, found none. {AGAIN}")


def _values(op: Operation) -> Iterator[tuple[str, Value]]:
    """Values that an operation holds itself, with their parameters; 'val' is a const's own."""
    yield from op.attributes.items()
    for parameter, arguments in op.inputs.items():
        yield from ((parameter, argument) for argument in arguments if isinstance(argument, Value))


def _dimension(proto: Any) -> int:
    return int(proto.constant.size) if proto.WhichOneof("dimension") == "constant" else FLEXIBLE


def _size(tensor: Tensor) -> int:
    """Bytes of its values."""
    bits = NARROW.get(tensor.dtype) or np.dtype(DTYPES[tensor.dtype]).itemsize * 8
    return -(-prod(tensor.shape) * bits // 8)


def _array(data: NDArray[np.uint8], tensor: Tensor) -> NDArray[Any]:
    narrow = tensor.dtype in NARROW
    array: NDArray[Any] = (
        codec.unpack(data, prod(tensor.shape), tensor.dtype) if narrow else data.view(DTYPES[tensor.dtype])
    )
    return array.reshape(tensor.shape)
