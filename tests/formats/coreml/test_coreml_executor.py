"""States, roundings and several functions: the executor gives what the program says, and refuses what it cannot run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mil_programs import converted, function, mil, model, saved, write

from pipeline.errors import ArtifactError
from pipeline.formats.coreml import executor as executors
from pipeline.formats.coreml.executor import Executor
from pipeline.formats.coreml.package import Package

RNG = np.random.default_rng(3)
NOTHING = {"x": np.zeros(1, np.float32)}
CACHE = (3, 4)


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(ArtifactError) as caught:
        act()
    return str(caught.value)


# states


def row(x: Any, i: int) -> Any:
    mb, _ = mil()
    return mb.slice_by_index(x=x, begin=[i, 0], end=[i + 1, CACHE[1]])


def updated(cache: Any, new: Any, i: int) -> Any:
    mb, _ = mil()
    return mb.slice_update(x=cache, update=new, begin=[i, 0], end=[i + 1, CACHE[1]])


def layers(chained: bool) -> Any:
    """Three layers, each with its row of the cache: x + (what the rows before hold) goes into the next. Each update is
    of what the one before left, or of the state read once more.
    """
    mb, _ = mil()

    def build(x: Any, cache: Any) -> Any:
        latest = mb.read_state(input=cache)
        for i in range(CACHE[0]):
            if not chained and i:
                latest = mb.read_state(input=cache)
            new = mb.add(x=x, y=mb.reduce_sum(x=latest, axes=[0], keep_dims=True), name=f"new{i}")
            latest = mb.coreml_update_state(state=cache, value=updated(latest, new, i))
        return mb.reduce_sum(x=latest, axes=[0], name="sum")

    return function(build, {"x": ((1, CACHE[1]), np.float16)}, {"cache": CACHE})


ONES = {"x": np.ones((1, CACHE[1]), np.float16)}


def calls(package: Package, times: int = 2) -> tuple[list[float], np.ndarray]:
    """The first number of each call's output, and the state after the last."""
    executor = Executor(package, "main")
    state = executor.new_state()
    found = [float(executor(ONES, state)["sum"][0]) for _ in range(times)]
    return found, state["cache"].numpy()[:, 0]


@pytest.mark.parametrize("passes", ["EMPTY", "DEFAULT"])
def test_a_state_carries_over_when_each_update_follows_on_the_last(tmp_path: Path, passes: str):
    found, state = calls(converted(tmp_path / "chained.mlpackage", layers(chained=True), passes))
    assert found == [7, 51]  # rows of 1, 1 + 1, 1 + 3; then of 1 + 7, 1 + 8 + 6, 1 + 8 + 15 + 4
    assert state.tolist() == [8, 15, 28]


def test_a_state_read_once_more_is_stale_after_coremltools_passes(tmp_path: Path):
    right, _ = calls(converted(tmp_path / "kept.mlpackage", layers(chained=False), "EMPTY"))
    merged, state = calls(converted(tmp_path / "merged.mlpackage", layers(chained=False), "DEFAULT"))
    assert right == [7, 51]
    assert merged == [1, 2]  # all updates are of what was read before the first, so that only the last one stays
    assert state.tolist() == [0, 0, 2]


def test_a_chain_of_updates_copies_no_cache(tmp_path: Path):
    executor = Executor(saved(tmp_path / "package", {"main": layers(chained=True)}), "main")
    state = executor.new_state()
    before = state["cache"]
    executor(ONES, state)
    assert state["cache"] is before
    assert [step.run for step in executor._steps if step.call.type == "write_state"] == [executors._keep] * 3


def test_what_was_read_before_an_update_stays_as_it_was(tmp_path: Path):
    mb, _ = mil()

    def build(x: Any, cache: Any) -> Any:
        old = mb.read_state(input=cache)
        first = row(old, 0)  # lies in the cache's memory
        new = mb.coreml_update_state(state=cache, value=updated(old, x, 0))
        return [mb.add(x=first, y=mb.mul(x=row(new, 0), y=np.float16(10)), name="sum"), mb.identity(x=new, name="all")]

    package = saved(
        tmp_path / "package", {"main": function(build, {"x": ((1, CACHE[1]), np.float16)}, {"cache": CACHE})}
    )
    executor = Executor(package, "main")
    state = executor.new_state()
    first, second = executor(ONES, state), executor({"x": ONES["x"] * 2}, state)
    assert (first["sum"][0, 0], second["sum"][0, 0]) == (10, 21)
    assert (first["all"][0, 0], second["all"][0, 0]) == (1, 2)  # outputs are no part of a state that moves on


Naive = dict[str, np.ndarray]
Plan = list[tuple[str, str, Any]]


def random_plan(rng: np.random.Generator) -> tuple[Plan, list[str]]:
    """Random reads, views, updates and writes of two states, and the variables to put out."""
    plan: Plan = [("read", "start", "k")]
    whole, rows = ["start"], ["x"]
    kinds = ["layer", "layer", "layer", "read", "update", "write", "row", "row", "same", "sum"]
    for i in range(12):
        kind, name, state = str(rng.choice(kinds)), f"v{i}", str(rng.choice(["k", "v"]))
        some, at = str(rng.choice(whole)), int(rng.integers(CACHE[0]))
        one, other = (str(rng.choice(rows)) for _ in range(2))
        match kind:
            case "layer":  # an update in place, unless something still reads what was there
                plan += [("read", f"r{i}", state), ("update", name, (f"r{i}", one, at)), ("write", "", (state, name))]
                whole += [f"r{i}", name] if rng.random() < 0.3 else [name]
            case "read":
                plan.append((kind, name, state))
                whole.append(name)
            case "update":
                plan.append((kind, name, (some, one, at)))
                whole.append(name)
            case "write":
                plan.append((kind, "", (state, some)))
            case "row":
                plan.append((kind, name, (some, at)))
                rows.append(name)
            case "same":
                plan.append((kind, name, some))
                whole.append(name)
            case "sum":
                plan.append((kind, name, (one, other)))
                rows.append(name)
    return plan, [*dict.fromkeys([whole[-1], rows[-1], str(rng.choice(rows))])]


def planned(plan: Plan, shown: list[str]) -> Any:
    mb, _ = mil()

    def build(x: Any, k: Any, v: Any) -> list[Any]:
        made, states = {"x": x}, {"k": k, "v": v}
        for kind, name, what in plan:
            match kind:
                case "read":
                    made[name] = mb.read_state(input=states[what])
                case "update":
                    made[name] = updated(made[what[0]], made[what[1]], what[2])
                case "write":
                    mb.coreml_update_state(state=states[what[0]], value=made[what[1]])
                case "row":
                    made[name] = row(made[what[0]], what[1])
                case "same":
                    made[name] = mb.identity(x=made[what])
                case "sum":
                    made[name] = mb.add(x=made[what[0]], y=made[what[1]])
        return [mb.identity(x=made[name], name=f"out_{name}") for name in shown]

    return function(build, {"x": ((1, CACHE[1]), np.float16)}, {"k": CACHE, "v": CACHE})


def naive(plan: Plan, shown: list[str], x: np.ndarray, states: Naive) -> list[np.ndarray]:
    """The same in NumPy, every step a copy."""
    made = {"x": x}
    for kind, name, what in plan:
        match kind:
            case "read":
                made[name] = states[what].copy()
            case "update":
                made[name] = made[what[0]].copy()
                made[name][what[2]] = made[what[1]][0]
            case "write":
                states[what[0]] = made[what[1]].copy()
            case "row":
                made[name] = made[what[0]][[what[1]]].copy()
            case "same":
                made[name] = made[what].copy()
            case "sum":
                made[name] = made[what[0]] + made[what[1]]
    return [made[name] for name in shown]


def test_updates_in_place_never_change_what_is_read(tmp_path: Path):
    rng = np.random.default_rng(0)
    plans = {f"f{i}": random_plan(rng) for i in range(60)}
    package = saved(tmp_path / "package", {name: planned(*plan) for name, plan in plans.items()})
    writes: Counter[Any] = Counter()
    for name, plan in plans.items():
        executor = Executor(package, name)
        writes.update(step.run for step in executor._steps if step.call.type == "write_state")
        state = executor.new_state()
        theirs = {"k": np.zeros(CACHE, np.float16), "v": np.zeros(CACHE, np.float16)}
        for turn in range(3):
            x = rng.integers(1, 9, (1, CACHE[1])).astype(np.float16)
            found = executor({"x": x}, state)
            for ours, expected in zip(found.values(), naive(*plan, x, theirs), strict=True):
                np.testing.assert_array_equal(ours, expected, err_msg=f"{name}, call {turn}")
            for key, expected in theirs.items():
                np.testing.assert_array_equal(state[key].numpy(), expected, err_msg=f"{name}, call {turn}, {key}")
    assert min(writes[executors._keep], writes[executors._store]) >= 60  # both were tested


# several functions


def test_functions_share_a_state(tmp_path: Path):
    mb, _ = mil()

    def build(count: int) -> Any:
        def of(x: Any, position: Any, cache: Any) -> Any:
            begin = mb.concat(values=[position, [0]], axis=0)
            end = mb.add(x=begin, y=[count, CACHE[1]])
            new = mb.slice_update(x=mb.read_state(input=cache), update=x, begin=begin, end=end)
            return mb.reduce_sum(x=mb.coreml_update_state(state=cache, value=new), axes=[1], name="sums")

        inputs = {"x": ((count, CACHE[1]), np.float16), "position": ((1,), np.int32)}
        return function(of, inputs, {"cache": CACHE})

    package = saved(tmp_path / "package", {"two": build(2), "one": build(1)})
    assert [*package.functions] == ["one", "two"]
    two, one = Executor(package, "two"), Executor(package, "one")
    state = two.new_state()
    x = RNG.integers(0, 9, CACHE).astype(np.float16)
    two({"x": x[:2], "position": np.array([0], np.int32)}, state)
    found = one({"x": x[2:], "position": np.array([2], np.int32)}, state)
    np.testing.assert_array_equal(found["sums"], x.astype(np.float32).sum(1))
    beyond = refusal(lambda: one({"x": x[2:], "position": np.array([3], np.int32)}, state))
    assert "slice_update" in beyond
    assert "fails" in beyond


# rounding


def test_declared_types_round_every_operation_and_fp32_none(tmp_path: Path):
    mb, _ = mil()

    def build(x: Any, y: Any, cache: Any) -> Any:
        third = mb.real_div(x=x, y=np.float16(3), name="third")
        mb.coreml_update_state(state=cache, value=third)
        return [
            third,
            mb.mul(x=third, y=third, name="square"),
            mb.add(x=mb.cast(x=third, dtype="fp32"), y=y, name="wide"),
        ]

    inputs = {"x": ((1, 3), np.float16), "y": ((1, 3), np.float32)}
    package = saved(tmp_path / "package", {"main": function(build, inputs, {"cache": (1, 3)})})
    x, y = np.array([[1, 100, 60000]], np.float16), np.array([[1e-4, 1e-3, 0.1]], np.float32)
    third = x.astype(np.float32) / np.float32(3)
    for rounding, value in (("fp32", third), ("declared", third.astype(np.float16).astype(np.float32))):
        executor = Executor(package, "main", rounding)  # type: ignore[arg-type]
        state = executor.new_state()
        found = executor({"x": x, "y": y}, state)
        square = value * value
        if rounding == "declared":
            with np.errstate(over="ignore"):
                square = square.astype(np.float16).astype(np.float32)
        np.testing.assert_array_equal(found["third"], value)
        np.testing.assert_array_equal(found["square"], square)
        np.testing.assert_array_equal(found["wide"], value + y)
        np.testing.assert_array_equal(state["cache"].numpy(), value)
        assert np.isinf(found["square"][0, 2]) == (rounding == "declared")


def test_an_unknown_rounding_is_a_defect(tmp_path: Path):
    with pytest.raises(ValueError, match="fp16"):
        Executor(saved(tmp_path / "package", {"main": function(lambda x: x)}), "main", "fp16")  # type: ignore[arg-type]


def test_inputs_of_float16_are_rounded_where_types_are_declared(tmp_path: Path):
    mb, _ = mil()
    build = function(lambda x: mb.identity(x=x, name="y"), {"x": ((1,), np.float16)})
    package = saved(tmp_path / "package", {"main": build})
    x = np.array([1 / 3], np.float32)
    assert Executor(package, "main", "fp32")({"x": x})["y"] == x
    assert Executor(package, "main")({"x": x})["y"] == x.astype(np.float16)


# what is refused


@pytest.fixture(scope="module")
def stateful(tmp_path_factory: pytest.TempPathFactory) -> Package:
    return saved(tmp_path_factory.mktemp("stateful") / "package", {"main": layers(chained=True)})


@pytest.mark.parametrize(
    ("inputs", "expected"),
    [
        ({}, "main: expected inputs x, found none"),
        (ONES | {"y": np.ones(1)}, "main: expected inputs x, found x, y"),
        ({"x": np.ones((2, 4), np.float16)}, "expected x to be F16 [1, 4], found float16 [2, 4]"),
        ({"x": np.ones((1, 4), np.int32)}, "expected x to be F16 [1, 4], found int32 [1, 4]"),
    ],
)
def test_inputs_other_than_the_functions_are_refused(stateful: Package, inputs: Any, expected: str):
    executor = Executor(stateful, "main")
    assert expected in refusal(lambda: executor(inputs, executor.new_state()))


def test_states_other_than_the_functions_are_refused(stateful: Package):
    executor = Executor(stateful, "main")
    assert "expected states cache, found none" in refusal(lambda: executor(ONES))
    short = {"cache": executor.new_state()["cache"][:2]}
    assert "expected the state cache to be F16 [3, 4], found torch.float32 [2, 4]" in refusal(
        lambda: executor(ONES, short)
    )


def test_all_that_cannot_be_run_is_listed_at_once(tmp_path: Path):
    mb, _ = mil()

    def build(x: Any) -> Any:
        x = mb.cumsum(x=mb.cumsum(x=x))
        return mb.silu(x=mb.softplus(x=x), name="last")

    proto = model(tmp_path / "package", {"main": function(build, {"x": ((2, 3), np.float32)})})
    block = proto.mlProgram.functions["main"].block_specializations["CoreML8"]
    last = next(op for op in block.operations if op.type == "silu")
    last.inputs["beta"].CopyFrom(last.inputs["x"])
    last.attributes["mode"].CopyFrom(last.attributes["name"])
    last.inputs["x"].arguments[0].name = "nowhere"
    found = refusal(lambda: Executor(write(tmp_path / "package", proto), "main"))
    assert found.splitlines()[1:-1] == [
        "  - operation cumsum (2 times)",
        "  - operation softplus",
        "  - silu: parameter beta",
        "  - silu: parameter mode",
        "  - silu of 'nowhere', which nothing before it makes",
    ]


def test_offsets_of_float_and_vectors_in_tables_are_refused(tmp_path: Path):
    mb, types = mil()

    def build(x: Any) -> Any:
        data = np.zeros((4, 4), np.int8)
        lut = np.zeros((1, 1, 16, 2), np.float16)
        indices = np.zeros((4, 4)).astype(types.nptype_from_builtin(types.uint4))
        one = np.ones((4, 1), np.float16)
        return [
            mb.constexpr_blockwise_shift_scale(data=data, scale=one, offset=one),
            mb.constexpr_lut_to_dense(indices=indices, lut=lut, vector_axis=np.int32(0)),
        ]

    found = refusal(lambda: Executor(saved(tmp_path / "package", {"main": function(build)}), "main"))
    assert "constexpr_blockwise_shift_scale with an offset of F16" in found
    assert "constexpr_lut_to_dense: parameter vector_axis" in found
    assert "constexpr_lut_to_dense with vectors of 2" in found


def test_older_opsets_mean_something_else(tmp_path: Path):
    proto = model(tmp_path / "package", {"main": function(lambda x: x)})
    made = proto.mlProgram.functions["main"]
    made.block_specializations["CoreML5"].CopyFrom(made.block_specializations["CoreML8"])
    made.opset = "CoreML5"
    found = refusal(lambda: Executor(write(tmp_path / "package", proto), "main"))
    assert "opset CoreML5: only CoreML7, CoreML8 are run" in found


def test_an_operation_that_fails_is_named(tmp_path: Path):
    mb, _ = mil()
    table = np.zeros((4, 3), np.float32)

    def build(x: Any) -> Any:
        return mb.gather(x=table, indices=x, name="rows")

    package = saved(tmp_path / "package", {"main": function(build, {"x": ((1,), np.int32)})})
    executor = Executor(package, "main")
    assert executor({"x": np.array([3], np.int32)})["rows"].shape == (1, 3)
    for outside in (4, -1):
        assert "gather 'rows' fails" in refusal(lambda at=outside: executor({"x": np.array([at], np.int32)}))


def test_a_result_of_another_shape_than_declared_is_an_error(tmp_path: Path):
    mb, _ = mil()
    build = function(lambda x: mb.identity(x=x, name="y"), {"x": ((2, 3), np.float32)})
    proto = model(tmp_path / "package", {"main": build})
    (op,) = proto.mlProgram.functions["main"].block_specializations["CoreML8"].operations
    op.outputs[0].type.tensorType.dimensions[1].constant.size = 4
    executor = Executor(write(tmp_path / "package", proto), "main")
    found = refusal(lambda: executor({"x": np.zeros((2, 3), np.float32)}))
    assert "expected y to be F32 [2, 4], found torch.float32 [2, 3]" in found
