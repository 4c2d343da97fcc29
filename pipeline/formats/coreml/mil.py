"""A function of a MIL program while it is built: every op gets a name, equal literals are one constant, and weights are
placeholders, which take no memory: a constant names its blob, and its values are never read.

The names are ours throughout: those that coremltools makes up depend on what the process has built before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np

from pipeline.formats.coreml import engine
from pipeline.formats.coreml.names import Blob, Piece

Var = Any
"""coremltools' Var: an input, or what an op puts out."""


@cache
def builder() -> Any:
    """coremltools' Builder."""
    engine.tools()
    from coremltools.converters.mil import Builder

    return Builder


@cache
def types_of_blobs() -> Mapping[str, Any]:
    """coremltools' types, by the names that blobs have for them."""
    engine.tools()
    from coremltools.converters.mil.mil import types

    floats = {"F16": types.fp16, "F32": types.fp32}
    codes = {"INT4": types.int4, "UINT4": types.uint4, "UINT6": types.uint6}
    return floats | codes | {"INT32": types.int32, "INT16": types.int16, "INT8": types.int8}


def _numpy_type(blob: Blob) -> Any:
    """A type of less than a byte is marked in what NumPy keeps beside its own."""
    from coremltools.converters.mil.mil import types

    return types.nptype_from_builtin(types_of_blobs()[blob.dtype])


@dataclass(frozen=True)
class Body:
    """The ops of one function. `constants` are the weights that it has made, `literals` the small values, by what they
    are.
    """

    constants: dict[str, Var] = field(default_factory=dict)
    literals: dict[tuple[str, tuple[int, ...], bytes], Var] = field(default_factory=dict)

    def op(self, kind: str, name: str, **inputs: Any) -> Var:
        """What the op puts out: one Var, or as many as it has outputs. Inputs that are no Vars become literals: int is
        int32, floats must be of a NumPy type. An input that is left out must have no default.
        """
        return getattr(builder(), kind)(name=name, **{key: self._var(value) for key, value in inputs.items()})

    def constant(self, blob: Blob) -> Var:
        """A blob as a constant of zeros that take no room."""
        if blob.name not in self.constants:
            placeholder = np.broadcast_to(np.zeros((), _numpy_type(blob)), blob.shape)
            var = builder().const(val=placeholder, name=blob.name)
            var.op.weight_id = blob.name
            self.constants[blob.name] = var
        return self.constants[blob.name]

    def weight(self, piece: Piece) -> Var:
        """A piece as one float16 or float32 weight, unpacked by a constexpr op where it is packed."""
        if piece.packing is None:
            return self.constant(piece.blobs[0])
        if piece.name not in self.constants:
            data, other = (self.constant(blob) for blob in piece.blobs)
            if piece.packing.scale is not None:
                var = self.op("constexpr_blockwise_shift_scale", piece.name, data=data, scale=other)
            else:
                var = self.op("constexpr_lut_to_dense", piece.name, indices=data, lut=other)
            self.constants[piece.name] = var
        return self.constants[piece.name]

    def _var(self, value: Any) -> Var:
        if _is_var(value):
            return value
        if isinstance(value, Sequence) and any(_is_var(item) for item in value):
            return [self._var(item) for item in value]
        return self._literal(value)

    def _literal(self, value: Any) -> Var:
        if isinstance(value, str):
            key = ("str", (), value.encode())
        else:
            array = np.asarray(value)
            if array.dtype == np.float64:
                raise TypeError(f"{value}: a literal is float16 or float32")
            array = array.astype(np.int32) if array.dtype == np.int64 else array
            key, value = (array.dtype.str, array.shape, array.tobytes()), array[()]
        if key not in self.literals:
            self.literals[key] = builder().const(val=value, name=f"c{len(self.literals)}")
        return self.literals[key]


@contextmanager
def unknown(var: Var) -> Iterator[Var]:
    """A placeholder whose values are hidden, so that an op on it is not computed from zeros while it is built."""
    value, var._sym_val = var._sym_val, None
    try:
        yield var
    finally:
        var._sym_val = value


def _is_var(value: Any) -> bool:
    return hasattr(value, "sym_type")
