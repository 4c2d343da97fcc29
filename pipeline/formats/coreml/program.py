"""A function of a package as calls of known operations: what cannot be run is refused before anything runs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pipeline.errors import ArtifactError, listed, some
from pipeline.formats.coreml import ops
from pipeline.formats.coreml.package import FLEXIBLE, Function, Operation, Package, Tensor, Value

Rounding = Literal["fp32", "declared"]
"""Whether floats keep float32, or every operation's output is rounded to the type that the program declares."""

READ, WRITE = "read_state", "write_state"
STATES: Mapping[str, tuple[str, ...]] = {READ: ("input",), WRITE: ("data", "input")}
"""The operations of states, and their parameters."""

FAILURES = (RuntimeError, IndexError, TypeError, ValueError)


@dataclass(frozen=True)
class Call:
    """An operation whose arguments are all variables: `arguments` are their names by parameter."""

    type: str
    name: str
    arguments: Mapping[str, tuple[str, ...]]
    outputs: tuple[Tensor, ...]


@dataclass(frozen=True)
class Program:
    """`values` are by the variable that holds each, in the program's order."""

    calls: tuple[Call, ...]
    values: Mapping[str, Value]


def program(package: Package, function: Function) -> Program:
    """The calls of a function.

    Raises:
        ArtifactError: operations, parameters or types that are not run: every one is listed with how often it occurs.
    """
    if problems := Counter(_problems(function)):
        found = [f"{problem} ({count} times)" if count > 1 else problem for problem, count in problems.items()]
        raise ArtifactError(
            f"{package.path}: the executor cannot run {function.name}:\n{listed(some(found, 'kinds', 20))}\n"
            "Take a package that this version of quantgate converted."
        )
    values = {op.name: op.attributes["val"] for op in function.operations if op.type == "const"}
    calls = []
    for op in function.operations:
        if op.type == "const":
            continue
        arguments = {}
        for parameter, given in op.inputs.items():
            names = [a if isinstance(a, str) else f"value {package.identity(a.identity)}" for a in given]
            values |= {name: a for name, a in zip(names, given, strict=True) if isinstance(a, Value)}
            arguments[parameter] = tuple(names)
        calls.append(Call(op.type, op.name, arguments, op.outputs))
    return Program(tuple(calls), values)


def results(found: Any, call: Call, rounding: Rounding) -> list[Any]:
    """What a call gave, as its outputs' tensors, checked and rounded.

    Raises:
        ValueError: tensors that are not what the program declares.
    """
    tensors = [*found] if isinstance(found, list | tuple) else [found]
    check(tensors, call.outputs)
    return [ops.rounded(t) if rounds(call, out, rounding) else t for t, out in zip(tensors, call.outputs, strict=True)]


def rounds(call: Call, output: Tensor, rounding: Rounding) -> bool:
    """Whether an output is to be rounded to float16."""
    return rounding == "declared" and output.dtype == "F16" and not ops.table()[call.type].moves


def check(tensors: Sequence[Any], declared: Sequence[Tensor]) -> None:
    """Raises: ValueError: another number, shape or type than is declared."""
    if len(tensors) != len(declared):
        raise ValueError(f"expected {len(declared)} outputs, found {len(tensors)}")
    for tensor, output in zip(tensors, declared, strict=True):
        if not fits(tensor.shape, output.shape) or tensor.dtype != ops.dtypes()[output.dtype]:
            raise ValueError(f"expected {output.name} to be {output}, found {tensor.dtype} {list(tensor.shape)}")


def fits(shape: Sequence[int], declared: Sequence[int]) -> bool:
    return len(shape) == len(declared) and all(n in (size, FLEXIBLE) for size, n in zip(shape, declared, strict=True))


def failure(package: Package, call: Call, error: Exception) -> ArtifactError:
    """What torch says against a call, one of FAILURES, as an error of ours."""
    return ArtifactError(f"{package.path}: {call.type} {call.name!r} fails: {error}. Convert again.")


def _problems(function: Function) -> Iterator[str]:
    if function.opset not in ops.OPSETS:
        yield f"opset {function.opset}: only {', '.join(ops.OPSETS)} are run"
    given = (*function.inputs, *function.states)
    yield from _types(given)
    made = {tensor.name for tensor in given}
    states = {state.name for state in function.states}
    for op in function.operations:
        yield from _of_operation(op, states)
        for argument in (a for given in op.inputs.values() for a in given):
            if isinstance(argument, str) and argument not in made:
                yield f"{op.type} of {argument!r}, which nothing before it makes"
        made |= {tensor.name for tensor in op.outputs}


def _of_operation(op: Operation, states: set[str]) -> Iterator[str]:
    if op.type == "const":
        if [*op.attributes] != ["val"] or op.inputs or len(op.outputs) != 1:
            yield f"const with {', '.join((*op.attributes, *op.inputs)) or 'no value'}"
        elif op.attributes["val"].tensor.dtype != "STRING":
            yield from _types(op.outputs)
        return
    if op.type not in ops.table() and op.type not in STATES:
        yield f"operation {op.type}"
        return
    if op.type in STATES:
        required = known = [*STATES[op.type]]
        if any(name not in states for name in op.inputs.get("input", ())):
            yield f"{op.type} of what is no state"
    else:
        known = [*ops.table()[op.type].order]
        required = [name for name, default in ops.table()[op.type].order.items() if default is ops.REQUIRED]
    yield from (f"{op.type}: parameter {name}" for name in (*op.inputs, *op.attributes) if name not in known)
    yield from (f"{op.type} without {name}" for name in required if name not in op.inputs)
    yield from (
        f"{op.type}: {len(given)} arguments as {name}"
        for name, given in op.inputs.items()
        if len(given) != 1 and name != ops.LIST
    )
    if not op.outputs and op.type != WRITE:
        yield f"{op.type} without an output"
    yield from _types(op.outputs)
    yield from _special(op)


def _types(tensors: Sequence[Tensor]) -> Iterator[str]:
    yield from (f"tensors of type {tensor.dtype}" for tensor in tensors if tensor.dtype not in ops.dtypes())


def _special(op: Operation) -> Iterator[str]:
    """What an operation does in a case that is not run."""
    inner = {name: given[0].tensor for name, given in op.inputs.items() if given and isinstance(given[0], Value)}
    match op.type:
        case "constexpr_blockwise_shift_scale" if "offset" in inner and inner["offset"].dtype in ("F16", "F32"):
            yield f"{op.type} with an offset of {inner['offset'].dtype}"
        case "constexpr_lut_to_dense" if "lut" in inner and inner["lut"].shape[-1:] != (1,):
            yield f"{op.type} with vectors of {inner['lut'].shape[-1]} in a table"
