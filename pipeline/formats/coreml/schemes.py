"""The Core ML schemes, how each packs weights, and the fixed sizes of a package.

Ops: coremltools 9.0, opset iOS 18 (constexpr_blockwise_shift_scale, constexpr_lut_to_dense). Core ML has no 16-bit
integer quantization: `int16` is an INT16 constant that the graph itself casts to float32, scales and casts to float16.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

from pipeline.errors import ParamsError, suggestion
from pipeline.formats import refuse_imatrix
from pipeline.types import PLAIN, Encoding, Options, mix_name

RUNS_ON = "Core ML: iOS 18, macOS 15; scored on any machine"

F32 = Encoding("F32", 1, 4)
F16 = Encoding("F16", 1, 2)

CHUNKS = range(64, 513)
"""Tokens that `prefill` may take at once."""


@dataclass(frozen=True)
class Packing:
    """How a matrix is packed: `data` is the type of its codes, by MIL's name, `bits` their width.

    Linear ones have a scale of type `scale` for each row, or for each `block` columns of a row. Palettes have a table
    of 2^bits float16 values for each `group` rows.
    """

    name: str
    data: str
    bits: int
    scale: str | None = None
    block: int | None = None
    group: int | None = None

    def encoding(self, columns: int) -> Encoding:
        """Of rows of `columns`: a scale counts to its block or row, a table to its rows in equal shares."""
        if self.scale is None:
            return Encoding(self.name, columns, columns * self.bits // 8 + 2 * 2**self.bits // (self.group or 1))
        block = self.block or columns
        return Encoding(self.name, block, block * self.bits // 8 + (4 if self.scale == "F32" else 2))


INT16 = Packing("int16", "INT16", 16, scale="F32")
INT8 = Packing("int8", "INT8", 8, scale="F16")
INT4 = Packing("int4-b32", "INT4", 4, scale="F16", block=32)
PAL6 = Packing("pal6-g16", "UINT6", 6, group=16)
PAL4 = Packing("pal4-g16", "UINT4", 4, group=16)

PACKINGS: Mapping[str, Packing] = {packing.name: packing for packing in (INT16, INT8, INT4, PAL6, PAL4)}
"""By the names of their encodings."""


@dataclass(frozen=True)
class Asked:
    """The sizes of a package as a variant or the command line gives them; None leaves one to `plan.sizes_of`."""

    chunk: int | None = None
    max_context: int | None = None
    score_window: int | None = None

    @property
    def given(self) -> dict[str, int]:
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}


@dataclass(frozen=True)
class Scheme:
    """`packing` is that of the matrices, None where they are float16. `base` is its encoding without scales."""

    name: str
    base: Encoding
    packing: Packing | None = None
    asked: Asked = Asked()

    @property
    def label(self) -> str:
        """'int8', or with sizes of its own 'int8+chunk=256'."""
        return mix_name(self.name, self.asked.given)


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("fp16", F16),
        Scheme("int16", Encoding("int16", 1, 2), INT16),
        Scheme("int8", Encoding("int8", 1, 1), INT8),
        Scheme("int4", INT4.encoding(32), INT4),
        Scheme("pal6", Encoding("pal6-g16", 4, 3), PAL6),
        Scheme("pal4", Encoding("pal4-g16", 2, 1), PAL4),
    )
}


def scheme(name: str, options: Options = PLAIN) -> Scheme:
    """A scheme by name, with the sizes of the package that are given.

    Raises:
        ParamsError: no such scheme; types or an importance matrix, which only GGUF schemes take; a size that no
            package has.
    """
    if name not in SCHEMES:
        raise ParamsError(f"coreml has no scheme {name!r}; {suggestion(name, [*SCHEMES])}")
    if options.types:
        raise ParamsError(f"types: coreml schemes take none ({', '.join(options.types)}). Only gguf schemes do.")
    asked = Asked(**options.sizes)
    if asked.chunk is not None and asked.chunk not in CHUNKS:
        raise ParamsError(f"chunk must be {CHUNKS[0]} to {CHUNKS[-1]} tokens, found {asked.chunk}.")
    for key, value in asked.given.items():
        if value < 2:
            raise ParamsError(f"{key} must be at least 2 tokens, found {value}.")
    refuse_imatrix("coreml", options.imatrix)
    base = SCHEMES[name]
    return Scheme(base.name, base.base, base.packing, asked)
