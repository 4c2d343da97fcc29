"""Runs a function of a saved package in torch, on any machine: states and all, with the types that it declares.

Inside an operation floats are float32. In rounding 'declared' the output of every operation is then rounded to the
type that the program declares for it, and so are states; in 'fp32' nothing is rounded. What it computes is a reference;
its time says nothing about Core ML's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError
from pipeline.formats.coreml import dataflow, ops
from pipeline.formats.coreml.constants import Constants
from pipeline.formats.coreml.dataflow import Flow
from pipeline.formats.coreml.ops import Tensor
from pipeline.formats.coreml.package import DTYPES, Package
from pipeline.formats.coreml.program import (
    FAILURES,
    READ,
    STATES,
    WRITE,
    Call,
    Rounding,
    check,
    failure,
    fits,
    program,
    rounds,
)

FLOATS = {name: DTYPES[name] for name in ("F32", "F16")}

State = dict[str, Tensor]
"""Tensors by the states' names: float32, in rounding 'declared' of values that float16 has."""


@dataclass(frozen=True, slots=True)
class Step:
    """A call made ready. `fixed` are its arguments in order; `moving`, `plain` and `lists` are the places of those that
    are known only when it runs, and the variables they are. `rounded` are the places of the outputs to round, `freed`
    the variables that nothing needs afterwards.
    """

    call: Call
    run: Any
    fixed: tuple[Any, ...]
    moving: tuple[tuple[int, str], ...]
    plain: tuple[tuple[int, str], ...]
    lists: tuple[tuple[int, tuple[str, ...]], ...]
    rounded: tuple[int, ...]
    freed: tuple[str, ...]


class Executor:
    """One function of a package. Executors of one package share its weights. Threads are torch's.

    Raises:
        ArtifactError: no such function, operations that are not run (all are listed), or weight files that are not what
            the program says.
    """

    def __init__(self, package: Package, function: str, rounding: Rounding = "declared") -> None:
        if rounding not in get_args(Rounding):
            raise ValueError(f"rounding {rounding!r}: expected one of {', '.join(get_args(Rounding))}")
        self.function = package.function(function)
        self._package = package
        self._rounding: Rounding = rounding
        made = program(package, self.function)
        constants = Constants(package, made, rounding)
        calls = [call for call in made.calls if call.type in STATES or call.outputs[0].name not in constants]
        outputs = [output.name for output in self.function.outputs]
        flow = dataflow.flow(calls, self.function)
        used = {*outputs, *(name for call in calls for key, name in dataflow.tensors(call))}
        self._constants = constants.tensors(name for name in used if name in constants)
        self._copied = {name for name in outputs if flow.memory.get(name, True)}
        self._steps = [self._step(call, i, flow, constants) for i, call in enumerate(calls)]
        self._checked = False

    def new_state(self) -> State:
        """Zeros for each state of the function; a call changes them."""
        import torch

        return {state.name: torch.zeros(state.shape, dtype=ops.dtypes()[state.dtype]) for state in self.function.states}

    def __call__(self, inputs: Mapping[str, NDArray[Any]], state: State | None = None) -> dict[str, NDArray[Any]]:
        """The function's outputs by their names: floats as float32, the rest as it is declared. `state` is changed in
        place.

        Raises:
            ArtifactError: inputs or states other than the function's, or an operation that fails.
        """
        import torch

        state = {} if state is None else state
        self._check_states(state)
        found = self._constants | self._given(inputs)
        with torch.inference_mode():
            for step in self._steps:
                try:
                    self._run(step, found, state)
                except FAILURES as error:
                    raise failure(self._package, step.call, error) from error
        self._checked = True
        types = {
            output.name: DTYPES["F32" if output.dtype in FLOATS else output.dtype] for output in self.function.outputs
        }
        return {name: found[name].numpy().astype(kind, copy=name in self._copied) for name, kind in types.items()}

    def _run(self, step: Step, found: dict[str, Tensor], state: State) -> None:
        call = step.call
        if call.type == READ:
            found[call.outputs[0].name] = state[call.arguments["input"][0]]
        elif call.type == WRITE:
            step.run(state, call.arguments["input"][0], found[call.arguments["data"][0]])
        else:
            arguments = [*step.fixed]
            for i, name in step.moving:
                arguments[i] = found[name]
            for i, name in step.plain:
                arguments[i] = found[name].tolist()
            for i, names in step.lists:
                arguments[i] = [found[name] for name in names]
            made = step.run(*arguments)
            tensors = [*made] if isinstance(made, list | tuple) else [made]
            if not self._checked:
                check(tensors, call.outputs)
            for i in step.rounded:
                tensors[i] = ops.rounded(tensors[i])
            for output, tensor in zip(call.outputs, tensors, strict=True):
                found[output.name] = tensor
        for name in step.freed:
            del found[name]

    def _step(self, call: Call, i: int, flow: Flow, constants: Constants) -> Step:
        freed = tuple(flow.freed[i])
        if call.type in STATES:
            write = _keep if i in flow.in_place else _store
            return Step(call, write if call.type == WRITE else None, (), (), (), (), (), freed)
        op = ops.table()[call.type]
        fixed: list[Any] = []
        moving, plain, lists = [], [], []
        for at, (key, default) in enumerate(op.order.items()):
            names = call.arguments.get(key, ())
            fixed.append(default)
            if not names:
                continue
            if key == ops.LIST:
                lists.append((at, names))
            elif key in op.plain:
                if names[0] in constants:
                    fixed[at] = constants.plain(names[0])
                else:
                    plain.append((at, names[0]))
            elif names[0] in constants:
                fixed[at] = self._constants[names[0]]
            else:
                moving.append((at, names[0]))
        rounded = tuple(at for at, out in enumerate(call.outputs) if rounds(call, out, self._rounding))
        run = ops.update_in_place if i in flow.in_place else op.run
        return Step(call, run, tuple(fixed), tuple(moving), tuple(plain), tuple(lists), rounded, freed)

    def _given(self, inputs: Mapping[str, NDArray[Any]]) -> dict[str, Tensor]:
        import torch

        expected = {tensor.name: tensor for tensor in self.function.inputs}
        if inputs.keys() != expected.keys():
            raise self._mismatch(f"inputs {', '.join(expected) or 'none'}", ", ".join(inputs) or "none")
        tensors = {}
        for name, tensor in expected.items():
            array = np.asarray(inputs[name])
            types = FLOATS if tensor.dtype in FLOATS else {tensor.dtype: DTYPES[tensor.dtype]}
            if array.dtype not in types.values() or not fits(array.shape, tensor.shape):
                raise self._mismatch(f"{name} to be {tensor}", f"{array.dtype} {list(array.shape)}")
            dtype = ops.dtypes()[tensor.dtype]
            tensors[name] = torch.from_numpy(np.array(array, order="C")).to(dtype)
            if tensor.dtype == "F16" and self._rounding == "declared":
                tensors[name] = ops.rounded(tensors[name])
        return tensors

    def _check_states(self, state: State) -> None:
        expected = {tensor.name: tensor for tensor in self.function.states}
        if state.keys() != expected.keys():
            raise self._mismatch(f"states {', '.join(expected) or 'none'}", ", ".join(state) or "none")
        for name, tensor in expected.items():
            found = state[name]
            if found.dtype != ops.dtypes()[tensor.dtype] or not fits(found.shape, tensor.shape):
                raise self._mismatch(f"the state {name} to be {tensor}", f"{found.dtype} {list(found.shape)}")

    def _mismatch(self, expected: str, found: str) -> ArtifactError:
        return ArtifactError(f"{self._package.path}: {self.function.name}: expected {expected}, found {found}.")


def _store(state: State, name: str, data: Tensor) -> None:
    """Its own memory, so that an update in place changes nothing else."""
    state[name] = data.clone()


def _keep(state: State, name: str, data: Tensor) -> None:
    """The state was updated in place."""
    if data is not state[name]:
        raise ValueError(f"the state {name} was not updated in place")
