"""What each operation of an ML Program computes, in torch.

Source: the operations of coremltools 9.0, opsets iOS 17 and 18 (converters/mil/mil/ops/defs). Parameters bear MIL's
names and have MIL's defaults. Floats are float32 tensors, whatever their declared type: the executor rounds.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any

import numpy as np

from pipeline.formats.coreml import codec

Tensor = Any

REQUIRED: Any = object()
LIST = "values"

OPSETS = ("CoreML7", "CoreML8")
"""iOS 17 and 18. In older ones some operations mean something else."""

CASTS = {"fp16": "F16", "fp32": "F32", "int32": "INT32", "int16": "INT16", "uint16": "UINT16", "int8": "INT8"}
CASTS |= {"uint8": "UINT8", "bool": "BOOL"}

REGION = {
    "begin": REQUIRED,
    "end": REQUIRED,
    "stride": None,
    "begin_mask": None,
    "end_mask": None,
    "squeeze_mask": None,
}
"""The parameters of a slice. Masks: where `begin` or `end` is ignored, and where one index is taken."""

GATHER = {"axis": 0, "batch_dims": 0, "validate_indices": False}


@dataclass(frozen=True)
class Op:
    """`run` takes `tensors`, then `optional` ones, which may be None, then `plain` ones as Python's numbers, lists and
    texts, whose defaults are here. LIST is a list of tensors.

    moves: it only moves or chooses among its inputs' values, so that nothing is left to round.
    shares: its output may share memory with them.
    """

    run: Callable[..., Any]
    tensors: tuple[str, ...]
    optional: tuple[str, ...] = ()
    plain: Mapping[str, Any] = field(default_factory=dict)
    moves: bool = False
    shares: bool = False

    @cached_property
    def order(self) -> dict[str, Any]:
        """The parameters in the order that `run` takes them in, with their defaults."""
        return dict.fromkeys(self.tensors, REQUIRED) | dict.fromkeys(self.optional) | {**self.plain}


@cache
def dtypes() -> dict[str, Any]:
    """Torch's type of each type of MIL. Narrow codes take a byte each; torch computes little in uint16."""
    import torch

    floats = {"F32": torch.float32, "F16": torch.float32}
    signed = {"INT32": torch.int32, "INT16": torch.int16, "INT8": torch.int8, "INT4": torch.int8}
    unsigned = {"UINT16": torch.int32, "UINT8": torch.uint8, "UINT6": torch.uint8, "UINT4": torch.uint8}
    return {**floats, **signed, **unsigned, "BOOL": torch.bool}


def rounded(x: Tensor) -> Tensor:
    """Float32 values of float16's, ties to even; what is too large becomes infinite."""
    return x.half().float()


@cache
def table() -> dict[str, Op]:
    """The operations that are run, by MIL's names: read_state and write_state are the executor's own."""
    import torch

    nn = torch.nn.functional

    def reduction(run: Callable[[Tensor, tuple[int, ...], bool], Tensor]) -> Op:
        def over(x: Tensor, axes: list[int] | None, keep_dims: bool) -> Tensor:
            return run(x, tuple(range(x.ndim)) if axes is None else tuple(axes), keep_dims)

        return Op(over, ("x",), plain={"axes": None, "keep_dims": False})

    def view(run: Callable[..., Any], **plain: Any) -> Op:
        return Op(run, ("x",), plain=plain, moves=True, shares=True)

    unary = {
        "abs": torch.abs,
        "cos": torch.cos,
        "exp": torch.exp,
        "logical_not": torch.logical_not,
        "relu": torch.relu,
        "sigmoid": torch.sigmoid,
        "silu": nn.silu,
        "sin": torch.sin,
        "sqrt": torch.sqrt,
        "square": torch.square,
        "tanh": torch.tanh,
    }
    binary = {
        "add": torch.add,
        "equal": torch.eq,
        "floor_div": torch.floor_divide,
        "greater": torch.gt,
        "greater_equal": torch.ge,
        "less": torch.lt,
        "less_equal": torch.le,
        "logical_and": torch.logical_and,
        "logical_or": torch.logical_or,
        "logical_xor": torch.logical_xor,
        "maximum": torch.maximum,
        "minimum": torch.minimum,
        "mod": torch.remainder,
        "mul": torch.mul,
        "not_equal": torch.ne,
        "pow": torch.pow,
        "real_div": torch.true_divide,
        "sub": torch.sub,
    }
    return {
        **{name: Op(run, ("x",)) for name, run in unary.items()},
        **{name: Op(run, ("x", "y")) for name, run in binary.items()},
        # numbers
        "cast": Op(_cast, ("x",), plain={"dtype": REQUIRED}, shares=True),
        "clip": Op(torch.clamp, ("x",), plain={"alpha": REQUIRED, "beta": REQUIRED}),
        "inverse": Op(lambda x, epsilon: (x + epsilon).reciprocal(), ("x",), plain={"epsilon": 1e-4}),
        "rsqrt": Op(lambda x, epsilon: (x + epsilon).rsqrt(), ("x",), plain={"epsilon": 1e-12}),
        "select": Op(torch.where, ("cond", "a", "b"), moves=True),
        # sums
        "layer_norm": Op(_layer_norm, ("x",), ("gamma", "beta"), {"axes": None, "epsilon": 1e-5}),
        "linear": Op(nn.linear, ("x", "weight"), ("bias",)),
        "matmul": Op(_matmul, ("x", "y"), plain={"transpose_x": False, "transpose_y": False}),
        "reduce_max": reduction(torch.amax),
        "reduce_mean": reduction(torch.mean),
        "reduce_min": reduction(torch.amin),
        "reduce_sum": reduction(lambda x, axes, keep: torch.sum(x, axes, keep, dtype=x.dtype)),
        "scaled_dot_product_attention": Op(_attention, ("query", "key", "value"), ("attn_mask",)),
        "softmax": Op(torch.softmax, ("x",), plain={"axis": -1}),
        # places
        "concat": Op(_concat, (LIST,), plain={"axis": REQUIRED, "interleave": False}, moves=True),
        "expand_dims": view(_expand_dims, axes=REQUIRED),
        "gather": Op(_gather, ("x", "indices"), plain=GATHER, moves=True),
        "identity": view(lambda x: x),
        "reshape": view(_reshape, shape=REQUIRED),
        "slice_by_index": view(_slice_by_index, **REGION),
        "slice_by_size": view(_slice_by_size, begin=REQUIRED, size=REQUIRED),
        "slice_update": Op(
            lambda x, *rest: update_in_place(x.clone(), *rest), ("x", "update"), plain=REGION, moves=True
        ),
        "split": view(_split, axis=REQUIRED, num_splits=None, split_sizes=None),
        "squeeze": view(lambda x, axes: x.squeeze() if axes is None else x.squeeze(tuple(axes)), axes=None),
        "stack": Op(torch.stack, (LIST,), plain={"axis": REQUIRED}, moves=True),
        "tile": Op(lambda x, reps: x.repeat(reps), ("x",), plain={"reps": REQUIRED}, moves=True),
        "transpose": view(lambda x, perm: x.permute(perm), perm=REQUIRED),
        # makers
        "fill": Op(_fill, (), plain={"shape": REQUIRED, "value": 0.0}, moves=True),
        "range_1d": Op(_range, (), plain={"start": REQUIRED, "end": REQUIRED, "step": REQUIRED}),
        "shape": Op(lambda x: torch.tensor(x.shape, dtype=torch.int32), ("x",), moves=True),
        # weights
        "constexpr_blockwise_shift_scale": Op(_blockwise_shift_scale, ("data", "scale"), ("offset",)),
        "constexpr_lut_to_dense": Op(_lut_to_dense, ("indices", "lut")),
    }


def region(
    shape: Sequence[int],
    begin: Sequence[int],
    end: Sequence[int],
    stride: Sequence[int] | None,
    begin_mask: Sequence[bool] | None,
    end_mask: Sequence[bool] | None,
    squeeze_mask: Sequence[bool] | None,
) -> tuple[tuple[slice, ...], list[int], list[int]]:
    """What a slice names, by NumPy's rules: slices with steps of 1 or more, the dimensions to turn around after them,
    and those to drop.
    """
    slices, turned, dropped = [], [], []
    for i, size in enumerate(shape):
        first = None if begin_mask and begin_mask[i] else begin[i]
        step = stride[i] if stride else 1
        if squeeze_mask and squeeze_mask[i]:
            dropped.append(i)
            at = slice(first, None).indices(size)[0]
            slices.append(slice(at, at + 1))
            continue
        found = range(size)[first : None if end_mask and end_mask[i] else end[i] : step]
        if step < 0:
            turned.append(i)
            found = found[::-1]
        slices.append(slice(found.start, max(found.start, found.stop), found.step))
    return tuple(slices), turned, dropped


def _slice_by_index(x: Tensor, *where: Any) -> Tensor:
    slices, turned, dropped = region(x.shape, *where)
    found = x[slices]
    if turned:
        found = found.flip(turned)
    return found.squeeze(dropped) if dropped else found


def update_in_place(x: Tensor, update: Tensor, *where: Any) -> Tensor:
    """`x` itself, a slice of it replaced."""
    slices, turned, _ = region(x.shape, *where)
    target = x[slices]
    update = update.reshape(target.shape)
    target.copy_(update.flip(turned) if turned else update)
    return x


def _slice_by_size(x: Tensor, begin: Sequence[int], size: Sequence[int]) -> Tensor:
    for i, (first, count) in enumerate(zip(begin, size, strict=True)):
        start = first + x.shape[i] if first < 0 else first
        x = x.narrow(i, start, x.shape[i] - start if count == -1 else count)
    return x


def _cast(x: Tensor, dtype: str) -> Tensor:
    found = x.to(dtypes()[CASTS[dtype]])
    return found & 0xFFFF if dtype == "uint16" else found


def _layer_norm(x: Tensor, gamma: Tensor, beta: Tensor, axes: Sequence[int] | None, epsilon: float) -> Tensor:
    axes = [*range(x.ndim)] if axes is None else [axis % x.ndim for axis in axes]
    shape = [size if i in axes else 1 for i, size in enumerate(x.shape)]
    centered = x - x.mean(axes, keepdim=True)
    y = centered / (centered.square().mean(axes, keepdim=True) + epsilon).sqrt()
    y = y if gamma is None else y * gamma.reshape(shape)
    return y if beta is None else y + beta.reshape(shape)


def _matmul(x: Tensor, y: Tensor, transpose_x: bool, transpose_y: bool) -> Tensor:
    return (x.mT if transpose_x and x.ndim > 1 else x) @ (y.mT if transpose_y and y.ndim > 1 else y)


def _attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """softmax(query · keyᵀ / √width + mask) · value; a mask of truth values leaves out what is false."""
    import torch

    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask)


def _concat(values: Sequence[Tensor], axis: int, interleave: bool) -> Tensor:
    import torch

    if values[0].ndim == 0:
        return torch.stack([*values])
    if not interleave:
        return torch.cat([*values], axis)
    axis %= values[0].ndim
    return torch.stack([*values], axis + 1).flatten(axis, axis + 1)


def _expand_dims(x: Tensor, axes: Sequence[int]) -> Tensor:
    rank = x.ndim + len(axes)
    for axis in sorted(axis % rank for axis in axes):
        x = x.unsqueeze(axis)
    return x


def _gather(x: Tensor, indices: Tensor, axis: int, batch_dims: int, validate_indices: bool) -> Tensor:
    """Indices are validated always: what one out of bounds gives, MIL leaves open."""
    import torch

    axis %= x.ndim
    if batch_dims:
        batch = x.shape[:batch_dims]
        pairs = zip(x.flatten(0, batch_dims - 1), indices.flatten(0, batch_dims - 1), strict=True)
        found = [_gather(row, at, axis - batch_dims, 0, validate_indices) for row, at in pairs]
        return torch.stack(found).unflatten(0, batch)
    found = x.index_select(axis, indices.reshape(-1).int())
    return found.reshape(*x.shape[:axis], *indices.shape, *x.shape[axis + 1 :])


def _reshape(x: Tensor, shape: Sequence[int]) -> Tensor:
    """A 0 stands for the dimension of `x` as far from the right, or 1 where there is none."""
    lead = x.ndim - len(shape)
    sizes = [size or (x.shape[lead + i] if lead + i >= 0 else 1) for i, size in enumerate(shape)]
    return x.reshape(sizes)


def _split(x: Tensor, axis: int, num_splits: int | None, split_sizes: Sequence[int] | None) -> Sequence[Tensor]:
    found: Sequence[Tensor] = x.split(split_sizes or x.shape[axis] // (num_splits or 1), axis)
    return found


def _fill(shape: Sequence[int], value: float | bool) -> Tensor:
    import torch

    return torch.full(shape, value, dtype=_type_of(value))


def _range(start: float, end: float, step: float) -> Tensor:
    import torch

    return torch.arange(start, end, step, dtype=_type_of(start))


def _type_of(value: float | bool) -> Any:
    """The type that a plain value came from."""
    return dtypes()[{bool: "BOOL", int: "INT32", float: "F32"}[type(value)]]


def _blockwise_shift_scale(data: Tensor, scale: Tensor, offset: Tensor) -> Tensor:
    """scale · (data − offset), block by block along every axis; an offset has the type of the codes."""
    import torch

    codes = data.numpy()
    if offset is not None:
        codes = codes.astype(np.int16)
        for axis, (size, count) in enumerate(zip(codes.shape, offset.shape, strict=True)):
            offset = offset.repeat_interleave(size // count, axis)
        codes -= offset.numpy()
    return torch.from_numpy(codec.dequantize(codes, scale.numpy()))


def _lut_to_dense(indices: Tensor, lut: Tensor) -> Tensor:
    """Entries of tables, one for each block: lut [blocks along every axis of `indices` …, 2^bits, 1]."""
    import torch

    return torch.from_numpy(codec.dequantize(indices.numpy(), lut.numpy()))
