"""What a function knows before it runs: its constants, and all that is computed of constants alone, once.

Tensors are shared by the executors of a package as long as one of them holds them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipeline.formats.coreml import ops
from pipeline.formats.coreml.ops import Tensor
from pipeline.formats.coreml.package import Package, Value
from pipeline.formats.coreml.program import FAILURES, STATES, Call, Program, Rounding, failure, results


class Constants:
    """The variables of a program that no input and no state changes.

    Each has an identity, which is that of all variables of the package's functions with the same value.
    """

    def __init__(self, package: Package, program: Program, rounding: Rounding) -> None:
        self._package = package
        self._rounding: Rounding = rounding
        self._identities: dict[str, int] = {}
        self._makers: dict[int, Value | Call] = {}
        self._calls: dict[str, Call] = {}  # by their names, in the program's order
        self._plain: dict[int, Any] = {}
        for name, value in program.values.items():
            self._add(name, value, value.identity)
        for call in program.calls:
            names = [name for given in call.arguments.values() for name in given]
            if call.type not in STATES and all(name in self for name in names):
                self._calls[call.name] = call
                made_of = tuple((key, *map(self._identities.get, given)) for key, given in call.arguments.items())
                for i, output in enumerate(call.outputs):
                    self._add(output.name, call, (call.type, made_of, i, output.dtype, rounding))

    def __contains__(self, name: str) -> bool:
        return name in self._identities

    def _add(self, name: str, maker: Value | Call, key: tuple[object, ...]) -> None:
        self._identities[name] = identity = self._package.identity(key)
        self._makers.setdefault(identity, maker)

    def plain(self, name: str) -> Any:
        """A variable as Python's numbers, lists or text."""
        identity = self._identities[name]
        if identity not in self._plain:
            maker = self._makers[identity]
            value = self._package.value(maker) if isinstance(maker, Value) else self.tensors([name])[name]
            self._plain[identity] = value if isinstance(value, str) else value.tolist()
        return self._plain[identity]

    def tensors(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Variables as tensors. What is only needed on the way is read late and freed early.

        Raises:
            ArtifactError: a weight file that is not what the program says, or an operation that fails.
        """
        identities = {name: self._identities[name] for name in names}
        wanted = set(identities.values())
        live, needed = self._needed(wanted)
        uses = Counter(identity for call in needed for identity in self._inputs(call))
        for call in needed:
            inputs = self._inputs(call)
            live |= {identity: self._read(identity) for identity in inputs - live.keys()}
            made = self._run(call, live)
            live |= {self._identities[output.name]: t for output, t in zip(call.outputs, made, strict=True)}
            uses.subtract(inputs)
            live = {identity: t for identity, t in live.items() if uses[identity] or identity in wanted}
        live |= {identity: self._read(identity) for identity in wanted - live.keys()}
        self._package.shared.update(live)
        return {name: live[identity] for name, identity in identities.items()}

    def _needed(self, wanted: set[int]) -> tuple[dict[int, Tensor], list[Call]]:
        """What is there already, and the calls that make the rest, in order."""
        live, names, pending = {}, set(), [*wanted]
        while pending:
            identity = pending.pop()
            maker = self._makers[identity]
            if (there := self._package.shared.get(identity)) is not None:
                live[identity] = there
            elif isinstance(maker, Call) and maker.name not in names:
                names.add(maker.name)
                pending += self._inputs(maker)
        return live, [call for name, call in self._calls.items() if name in names]

    def _inputs(self, call: Call) -> set[int]:
        plain = ops.table()[call.type].plain
        return {self._identities[name] for key, given in call.arguments.items() if key not in plain for name in given}

    def _read(self, identity: int) -> Tensor:
        import torch

        value = self._makers[identity]
        assert isinstance(value, Value)
        array = self._package.value(value)
        assert not isinstance(array, str)
        dtype = {np.float16: np.float32, np.uint16: np.int32}.get(array.dtype.type, array.dtype)
        return torch.from_numpy(np.require(array.astype(dtype, copy=False), requirements=["C", "W"]))

    def _run(self, call: Call, live: Mapping[int, Tensor]) -> list[Tensor]:
        op = ops.table()[call.type]

        def argument(key: str, default: Any) -> Any:
            if key not in call.arguments:
                return default
            names = call.arguments[key]
            if key in op.plain:
                return self.plain(names[0])
            tensors = [live[self._identities[name]] for name in names]
            return tensors if key == ops.LIST else tensors[0]

        arguments = [argument(key, default) for key, default in op.order.items()]
        try:
            return results(op.run(*arguments), call, self._rounding)
        except FAILURES as error:
            raise failure(self._package, call, error) from error
