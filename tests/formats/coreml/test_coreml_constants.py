"""Weights are what coremltools makes of them; what is known at load is computed once, and shared."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mil_programs import function, mil, saved

from pipeline.formats.coreml.executor import Executor
from pipeline.formats.coreml.package import Package

RNG = np.random.default_rng(11)
ROWS, COLUMNS = 32, 64


def narrow(codes: Any, name: str) -> np.ndarray:
    """Codes as coremltools marks those of less than a byte."""
    _, types = mil()
    return codes.astype(types.nptype_from_builtin(getattr(types, name)))


def scales(*shape: int) -> np.ndarray:
    return (RNG.random(shape) / 100).astype(np.float16)


def tables(groups: tuple[int, ...], bits: int, kind: Any = np.float16) -> np.ndarray:
    return RNG.normal(size=(*groups, 2**bits, 1)).astype(kind)


def codes(low: int, high: int) -> np.ndarray:
    return RNG.integers(low, high, (ROWS, COLUMNS))


def linear(data: np.ndarray, scale: np.ndarray, offset: np.ndarray | None = None) -> Any:
    mb, _ = mil()
    given = {} if offset is None else {"offset": offset}
    return mb.constexpr_blockwise_shift_scale(data=data, scale=scale, **given)


def palette(bits: int, lut: np.ndarray) -> Any:
    mb, _ = mil()
    return mb.constexpr_lut_to_dense(indices=narrow(codes(0, 2**bits), f"uint{bits}"), lut=lut)


WEIGHTS = {
    "int8": lambda: linear(codes(-127, 128).astype(np.int8), scales(ROWS, 1)),
    "int8 float32": lambda: linear(codes(-127, 128).astype(np.int8), scales(ROWS, 1).astype(np.float32)),
    "int8 offset": lambda: linear(
        codes(-128, 128).astype(np.int8), scales(ROWS, 1), RNG.integers(-128, 128, (ROWS, 1)).astype(np.int8)
    ),
    "int4": lambda: linear(narrow(codes(-7, 8), "int4"), scales(ROWS, COLUMNS // 32)),
    "int4 offset": lambda: linear(
        narrow(codes(-8, 8), "int4"), scales(ROWS, 2), narrow(RNG.integers(-8, 8, (ROWS, 2)), "int4")
    ),
    "uint4 in both dimensions": lambda: linear(
        narrow(codes(0, 16), "uint4"), scales(4, 8), narrow(RNG.integers(0, 16, (4, 8)), "uint4")
    ),
    "pal4": lambda: palette(4, tables((ROWS // 16, 1), 4)),
    "pal6": lambda: palette(6, tables((ROWS // 16, 1), 6)),
    "pal4 by columns": lambda: palette(4, tables((1, 4), 4)),
    "pal6 float32": lambda: palette(6, tables((2, 2), 6, np.float32)),
}


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> tuple[Package, list[np.ndarray]]:
    """A package that puts out every weight, and what coremltools makes of each."""
    theirs: list[np.ndarray] = []

    def build(**_: Any) -> list[Any]:
        made = [build() for build in WEIGHTS.values()]
        theirs.extend(var.op.materialized_val_inference() for var in made)
        return made

    return saved(tmp_path_factory.mktemp("weights") / "package", {"main": function(build)}), theirs


@pytest.mark.parametrize("rounding", ["declared", "fp32"])
def test_weights_are_what_coremltools_makes_of_them(unpacked: tuple[Package, list[np.ndarray]], rounding: Any):
    package, theirs = unpacked
    ours = Executor(package, "main", rounding)({"x": np.zeros(1, np.float32)})
    for name, found, expected in zip(WEIGHTS, ours.values(), theirs, strict=True):
        assert found.dtype == np.float32
        rounded = found.astype(expected.dtype)
        np.testing.assert_array_equal(rounded, expected, err_msg=name)
        exact = np.array_equal(found, expected.astype(np.float32))
        assert exact is (rounding == "declared" or name.endswith("float32") or name.startswith("pal")), name


def test_unrounded_weights_are_scale_times_code(tmp_path: Path):
    values, scale = codes(-127, 128).astype(np.int8), scales(ROWS, 1)
    package = saved(tmp_path / "package", {"main": function(lambda **_: linear(values, scale))})
    (found,) = Executor(package, "main", "fp32")({"x": np.zeros(1, np.float32)}).values()
    np.testing.assert_array_equal(found, values.astype(np.float32) * scale.astype(np.float32))


# int16: cast, scaled and cast again at load


def int16(codes: np.ndarray, scale: np.ndarray) -> Any:
    """As the graph has it; `_sym_val` keeps coremltools from folding it."""
    mb, _ = mil()
    data, scales = mb.const(val=codes), mb.const(val=scale)
    data.op.weight_id, scales.op.weight_id = "codes", "scales"
    wide = mb.cast(x=data, dtype="fp32")
    wide._sym_val = None
    return mb.cast(x=mb.mul(x=wide, y=scales), dtype="fp16")


def test_weights_of_16_bits_are_scaled_once_and_shared(tmp_path: Path):
    mb, _ = mil()
    values, scale = codes(-32767, 32768).astype(np.int16), RNG.random((ROWS, 1)).astype(np.float32) / 30000

    def build(x: Any) -> Any:
        return mb.matmul(x=x, y=int16(values, scale), transpose_y=True)

    given = {"x": ((2, COLUMNS), np.float16)}
    package = saved(tmp_path / "package", {"one": function(build, given), "two": function(build, given)})
    one, two = Executor(package, "one"), Executor(package, "two")
    assert [step.call.type for step in one._steps] == ["matmul"]
    assert len(package.shared) == 1  # neither the codes nor what lies between is kept
    (weight,) = package.shared.values()
    expected = (values.astype(np.float32) * scale).astype(np.float16)
    np.testing.assert_array_equal(weight.numpy(), expected.astype(np.float32))
    x = RNG.normal(size=(2, COLUMNS)).astype(np.float16)
    found = [*(executor({"x": x}) for executor in (one, two))]
    np.testing.assert_array_equal(*(outputs.popitem()[1] for outputs in found))
    del one, weight
    gc.collect()
    assert len(package.shared) == 1
    del two
    gc.collect()
    assert not package.shared


def test_each_rounding_has_its_own_weights(tmp_path: Path):
    package = saved(tmp_path / "package", {"main": function(lambda **_: WEIGHTS["int8"]())})
    held = [Executor(package, "main", rounding) for rounding in ("fp32", "declared")]
    assert len(package.shared) == len(held)


def test_one_constant_under_two_names_is_read_once(tmp_path: Path):
    mb, _ = mil()
    table = RNG.normal(size=(ROWS, COLUMNS)).astype(np.float32)

    def build(x: Any) -> list[Any]:
        first, second = (mb.const(val=table, name=name) for name in ("first", "second"))
        first.op.weight_id = second.op.weight_id = "table"
        return [mb.linear(x=x, weight=first), mb.reduce_sum(x=mb.add(x=x, y=second), axes=[0])]

    package = saved(tmp_path / "package", {"main": function(build, {"x": ((ROWS, COLUMNS), np.float32)})})
    held = Executor(package, "main")
    assert held._steps
    assert [tensor.shape for tensor in package.shared.values() if tensor.ndim == 2] == [table.shape]
