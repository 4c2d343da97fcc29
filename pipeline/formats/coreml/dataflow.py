"""How long each variable of a function lives, whose memory it may lie in, and which states are updated in place.

A cache of all layers is copied at every update unless that is known to change nothing that is still read.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from pipeline.formats.coreml import ops
from pipeline.formats.coreml.package import Function
from pipeline.formats.coreml.program import READ, STATES, WRITE, Call

UPDATE = "slice_update"


@dataclass(frozen=True)
class Flow:
    """`freed`: after each call, the variables that nothing needs any more. `memory`: the inputs and states whose memory
    a variable may lie in; constants have no entry. `in_place`: places of the updates that change a state's own memory,
    and of the writes after them, which have nothing left to do.
    """

    freed: Sequence[Sequence[str]]
    memory: Mapping[str, frozenset[str]]
    in_place: frozenset[int]


def tensors(call: Call) -> Iterator[tuple[str, str]]:
    """Parameters and variables that a call takes as tensors; states are none."""
    taken = {*ops.table()[call.type].order} - {*ops.table()[call.type].plain} if call.type not in STATES else {"data"}
    yield from ((key, name) for key, names in call.arguments.items() if key in taken for name in names)


def flow(calls: Sequence[Call], function: Function) -> Flow:
    """The flow of those calls of a function that run each time."""
    last = _last_uses(calls, function)
    memory = _memory(calls, function)
    freed: list[list[str]] = [[] for _ in calls]
    for name, at in last.items():
        if at < len(calls):
            freed[at].append(name)
    return Flow(freed, memory, frozenset(_in_place(calls, last, memory)))


def _last_uses(calls: Sequence[Call], function: Function) -> dict[str, int]:
    """The place of the last call that takes a variable, or makes one that nobody takes; outputs are needed beyond."""
    last = {tensor.name: 0 for tensor in function.inputs if calls}
    for i, call in enumerate(calls):
        last |= {output.name: i for output in call.outputs}
        last |= {name: i for names in call.arguments.values() for name in names if name in last}
    return last | {output.name: len(calls) for output in function.outputs}


def _memory(calls: Sequence[Call], function: Function) -> dict[str, frozenset[str]]:
    memory = {tensor.name: frozenset([tensor.name]) for tensor in (*function.inputs, *function.states)}
    for call in calls:
        shared: frozenset[str] = frozenset()
        if call.type == READ:
            shared = memory[call.arguments["input"][0]]
        elif call.type != WRITE and (ops.table()[call.type].shares or call.type == UPDATE):
            shared = frozenset().union(*(memory.get(name, CONSTANT) for _, name in tensors(call)))
        memory |= {output.name: shared for output in call.outputs}
    return memory


CONSTANT = frozenset(["a constant"])


def _in_place(calls: Sequence[Call], last: Mapping[str, int], memory: Mapping[str, frozenset[str]]) -> Iterator[int]:
    """An update may be made in the state's own memory where it is of what was just read from the state and is written
    to the state next, and nothing that may lie in that memory is read afterwards but the update itself.
    """
    made = {output.name: i for i, call in enumerate(calls) for output in call.outputs}
    for i, call in enumerate(calls):
        if call.type != UPDATE:
            continue
        source, new = call.arguments["x"][0], call.outputs[0].name
        read = calls[made[source]] if source in made else None
        if read is None or read.type != READ:
            continue
        state = read.arguments["input"][0]
        after = [j for j in range(made[source] + 1, len(calls)) if _touches(calls[j], state)]
        written = after and calls[after[0]].type == WRITE and calls[after[0]].arguments["data"] == (new,)
        alive = any(state in memory[name] and at < i < last[name] for name, at in made.items())
        overlaps = state in memory.get(call.arguments["update"][0], CONSTANT)
        if written and not alive and not overlaps:
            yield from (i, after[0])


def _touches(call: Call, state: str) -> bool:
    return call.type in STATES and call.arguments["input"][0] == state
