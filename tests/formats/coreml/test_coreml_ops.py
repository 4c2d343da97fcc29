"""Every operation of the table gives what coremltools' own value inference gives, or NumPy where that has none."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from mil_programs import function, mil, saved

from pipeline.formats.coreml import ops
from pipeline.formats.coreml.executor import Executor

RNG = np.random.default_rng(5)
X = RNG.normal(size=(2, 3, 4)).astype(np.float32)
Y = RNG.normal(size=(3, 4)).astype(np.float32)
ABOVE = np.abs(X) + np.float32(0.5)
N, M = RNG.integers(-9, 9, (3, 4)).astype(np.int32), RNG.integers(1, 5, (4,)).astype(np.int32)
TENTH = np.float32(0.1)
LARGE = np.array([1, 300, 40000], np.int32)
YES, NO = X > 0, Y > 0
Q, K, V = (RNG.normal(size=(1, 2, n, 4)).astype(np.float32) for n in (3, 5, 5))
MASK = np.where(np.arange(5) <= np.arange(3)[:, None], np.float32(0), np.float32(-1e4))


@dataclass(frozen=True)
class Case:
    """`tensors` come in as inputs, `plain` are constants. `expected` is for what coremltools does not infer."""

    op: str
    tensors: dict[str, Any] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)
    expected: Any = None
    tolerance: float = 0.0


SMOOTH = ("cos", "exp", "sigmoid", "sin", "tanh")
NUMBERS = ("add", "equal", "greater", "greater_equal", "less", "less_equal", "maximum", "minimum", "mul", "not_equal")
SLICE = {"begin": [0, 1, 0], "end": [2, 3, 4]}

CASES = [
    *(Case(op, {"x": X}, tolerance=1e-6) for op in SMOOTH),
    Case("silu", {"x": X}, expected=X / (1 + np.exp(-X)), tolerance=1e-6),
    *(Case(op, {"x": X}) for op in ("abs", "relu", "square", "identity")),
    *(Case(op, {"x": N}) for op in ("abs", "square")),
    *(Case(op, {"x": X, "y": Y}) for op in (*NUMBERS, "sub", "real_div")),
    *(Case(op, {"x": N, "y": M}) for op in (*NUMBERS, "sub", "mod", "floor_div")),
    Case("equal", {"x": X, "y": X}),
    Case("mod", {"x": X, "y": Y}, tolerance=1e-6),
    Case("floor_div", {"x": X, "y": Y}),
    *(Case(f"logical_{op}", {"x": YES, "y": NO}) for op in ("and", "or", "xor")),
    Case("logical_not", {"x": YES}),
    Case("sqrt", {"x": ABOVE}, tolerance=1e-6),
    Case("pow", {"x": ABOVE, "y": Y}, tolerance=1e-6),
    Case("rsqrt", {"x": ABOVE}, tolerance=1e-6),
    Case("rsqrt", {"x": ABOVE}, {"epsilon": np.float32(0.25)}, tolerance=1e-6),
    Case("rsqrt", {"x": np.zeros((2,), np.float32)}, expected=np.full((2,), 1e6, np.float32), tolerance=1e-6),
    Case("inverse", {"x": X}, expected=1 / (X + np.float32(1e-4)), tolerance=1e-6),
    Case("inverse", {"x": X}, {"epsilon": np.float32(0.5)}, expected=1 / (X + np.float32(0.5)), tolerance=1e-6),
    Case("clip", {"x": X}, {"alpha": np.float32(-0.25), "beta": np.float32(0.5)}),
    *(Case("cast", {"x": x}, {"dtype": to}) for x in (X * 9, N, YES) for to in ("int32", "int8", "fp32", "bool")),
    *(Case("cast", {"x": LARGE}, {"dtype": to}) for to in ("uint8", "int16", "uint16")),
    Case("cast", {"x": np.array([3, -3], np.int16)}, {"dtype": "fp32"}),
    Case("select", {"cond": NO, "a": X, "b": Y}),
    Case("select", {"cond": NO, "a": N, "b": M}),
    # sums
    Case("softmax", {"x": X}, tolerance=1e-6),
    Case("softmax", {"x": X}, {"axis": 1}, tolerance=1e-6),
    *(Case(f"reduce_{op}", {"x": X}, {"axes": [-1], "keep_dims": True}, tolerance=1e-6) for op in ("mean", "sum")),
    *(Case(f"reduce_{op}", {"x": X}, {"axes": [0, 2]}, tolerance=1e-6) for op in ("max", "mean", "min", "sum")),
    *(Case(f"reduce_{op}", {"x": X}, tolerance=1e-6) for op in ("max", "mean", "min", "sum")),
    *(Case(f"reduce_{op}", {"x": N}, {"axes": [1]}) for op in ("max", "min", "sum")),
    Case("layer_norm", {"x": X}, {"axes": [-1]}, tolerance=1e-5),
    Case("layer_norm", {"x": X}, {"axes": [1, 2], "gamma": Y, "beta": Y + 1, "epsilon": TENTH}, tolerance=1e-5),
    Case("linear", {"x": X}, {"weight": Y}, tolerance=1e-6),
    Case("linear", {"x": X}, {"weight": Y, "bias": Y[:, 0]}, tolerance=1e-6),
    Case("matmul", {"x": X, "y": Y}, {"transpose_y": True}, tolerance=1e-6),
    Case("matmul", {"x": X, "y": X + 1}, {"transpose_x": True}, tolerance=1e-6),
    Case("matmul", {"x": X[0, 0], "y": Y.T.copy()}, tolerance=1e-6),
    Case("matmul", {"x": N, "y": N.T.copy()}),
    Case("scaled_dot_product_attention", {"query": Q, "key": K, "value": V}, tolerance=1e-6),
    *(
        Case("scaled_dot_product_attention", {"query": Q, "key": K, "value": V, "attn_mask": mask}, tolerance=1e-6)
        for mask in (MASK, MASK == 0, MASK[None, None])
    ),
    Case(
        "scaled_dot_product_attention",
        {"query": Q[0], "key": K[0], "value": V[0], "attn_mask": MASK},
        tolerance=1e-6,
    ),
    # places
    Case("concat", {"values": [X, X + 1]}, {"axis": -2}),
    Case("concat", {"values": [np.int32(3), np.int32(4)]}, {"axis": 0}),
    Case(
        "concat",
        {"values": [Y, Y + 1]},
        {"axis": -1, "interleave": True},
        expected=np.stack([Y, Y + 1], -1).reshape(3, 8),
    ),
    Case("stack", {"values": [X, X + 1]}, {"axis": 1}),
    Case("stack", {"values": [X, X + 1]}, {"axis": -1}),
    Case("expand_dims", {"x": X}, {"axes": [0, -1, 2]}),
    Case("squeeze", {"x": X[:, None, :, :1]}, {"axes": [1, -1]}),
    Case("squeeze", {"x": X[:, None, :, :1]}),
    Case("squeeze", {"x": X[:, None]}, {"axes": [0, 1]}, expected=X),
    Case("reshape", {"x": X}, {"shape": [4, -1]}),
    Case("reshape", {"x": X}, {"shape": [1, 0, -1, 0]}),
    Case("reshape", {"x": Y}, {"shape": [0, 0, -1, 0]}),
    Case("transpose", {"x": X}, {"perm": [-1, 0, 1]}),
    Case("tile", {"x": X}, {"reps": [2, 1, 3]}),
    Case("split", {"x": X}, {"num_splits": 2, "axis": -1}),
    Case("split", {"x": X}, {"split_sizes": [1, 3], "axis": 2}),
    Case("gather", {"x": X, "indices": np.array([[2, 0], [1, 1]], np.int32)}, {"axis": 1}),
    Case("gather", {"x": X, "indices": np.array([1], np.int32)}, {"axis": -1, "validate_indices": True}),
    Case("gather", {"x": Y, "indices": np.int32(1)}),
    Case("gather", {"x": N.astype(np.int16), "indices": np.array([1, 2], np.int16)}),
    Case("gather", {"x": X, "indices": np.array([[2, 0, 0], [1, 1, 2]], np.int32)}, {"axis": 1, "batch_dims": 1}),
    Case("slice_by_size", {"x": X}, {"begin": [1, -2, 0], "size": [1, 2, -1]}),
    *(
        Case("slice_by_index", {"x": X}, where)
        for where in (
            SLICE,
            {"begin": [-1, -3, -4], "end": [2, -1, 4]},
            SLICE | {"stride": [1, 1, 3]},
            {"begin": [1, 2, 3], "end": [0, 0, 0], "stride": [-1, -2, -1], "end_mask": [True, False, False]},
            SLICE | {"begin_mask": [True, True, False], "end_mask": [False, True, False]},
            SLICE | {"squeeze_mask": [True, False, False]},
            SLICE | {"begin": [-1, 0, -2], "end_mask": [False, True, False], "squeeze_mask": [True, False, True]},
            SLICE | {"begin": [1, 2, 0], "begin_mask": [True, False, False], "squeeze_mask": [True, False, False]},
            {"begin": [0, 9, 0], "end": [9, 9, 9]},
        )
    ),
    Case("slice_update", {"x": X, "update": X[:, 1:, :2] + 1}, {"begin": [0, 1, 0], "end": [2, 3, 2]}),
    Case("slice_update", {"x": X, "update": X[:, 1:2]}, SLICE | {"stride": [1, 2, 1]}),
    Case(
        "slice_update",
        {"x": X, "update": X[:, 1:3]},
        {"begin": [0, 2, 3], "end": [2, 0, 0], "stride": [1, -1, -1], "end_mask": [False, False, True]},
    ),
    Case(
        "slice_update",
        {"x": X, "update": Y},
        SLICE | {"begin_mask": [True] * 3, "end_mask": [True] * 3, "squeeze_mask": [True, False, False]},
    ),
    # makers
    Case("fill", {}, {"shape": [2, 3], "value": np.float32(1.5)}),
    Case("fill", {}, {"shape": [2], "value": np.int32(7)}),
    Case("fill", {}, {"shape": [2], "value": True}),
    Case("fill", {}, {"shape": [2]}, expected=np.zeros(2, np.float32)),
    Case("range_1d", {}, {"start": np.int32(2), "end": np.int32(9), "step": np.int32(3)}),
    Case("range_1d", {}, {"start": np.float32(0), "end": np.float32(1), "step": np.float32(0.25)}),
    Case("shape", {"x": X}),
]


def test_every_operation_has_a_case():
    constexpr = {op for op in ops.table() if op.startswith("constexpr_")}  # test_coreml_constants.py
    assert {case.op for case in CASES} == ops.table().keys() - constexpr


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> list[list[np.ndarray]]:
    """The outputs of each case: one function holds them all."""
    inputs = {name: array for i, case in enumerate(CASES) for name, array in flat(case, i).items()}
    shapes = {name: (array.shape, array.dtype) for name, array in inputs.items()}
    counts: list[int] = []

    def build(**given: Any) -> list[Any]:
        outputs = []
        for i, case in enumerate(CASES):
            made = built(case, {name: given[name] for name in flat(case, i)}, f"case{i}")
            outputs += made
            counts.append(len(made))
        return outputs

    package = saved(tmp_path_factory.mktemp("ops") / "package", {"main": function(build, shapes)})
    found = [*Executor(package, "main", "fp32")({name: np.asarray(a) for name, a in inputs.items()}).values()]
    starts = np.cumsum([0, *counts])
    return [found[start : start + count] for start, count in zip(starts, counts, strict=False)]


def flat(case: Case, i: int) -> dict[str, np.ndarray]:
    """The tensors of a case by names of their own."""
    return {
        f"in{i}_{key}_{j}": np.asarray(array)
        for key, given in case.tensors.items()
        for j, array in enumerate(given if key == "values" else [given])
    }


def built(case: Case, given: dict[str, Any], name: str) -> list[Any]:
    """The operation on variables by the names of `flat`."""
    mb, _ = mil()
    tensors = {key: [var for at, var in given.items() if f"_{key}_" in at] for key in case.tensors}
    tensors = {key: found if key == "values" else found[0] for key, found in tensors.items()}
    made = getattr(mb, case.op)(**tensors, **case.plain, name=name)
    return [*made] if isinstance(made, list | tuple) else [made]


def inferred(case: Case) -> list[np.ndarray]:
    """What coremltools computes while it builds the operation on constants."""
    mb, _ = mil()
    found: list[np.ndarray] = []

    def build(**_: Any) -> Any:
        made = built(case, {name: mb.const(val=array[()]) for name, array in flat(case, 0).items()}, "case")
        found.extend(np.asarray(var.val) for var in made)
        return made

    function(build)
    return found


@pytest.mark.parametrize("i", range(len(CASES)), ids=lambda i: f"{CASES[i].op}-{i}")
def test_an_operation_gives_what_coremltools_infers(i: int, computed: list[list[np.ndarray]]):
    case = CASES[i]
    expected = inferred(case) if case.expected is None else [case.expected]
    assert len(computed[i]) == len(expected)
    for ours, theirs in zip(computed[i], expected, strict=True):
        assert ours.shape == theirs.shape
        assert ours.dtype.kind == theirs.dtype.kind
        np.testing.assert_allclose(ours, theirs, rtol=case.tolerance, atol=case.tolerance)
