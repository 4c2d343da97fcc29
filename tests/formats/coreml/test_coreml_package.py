"""What a package holds is read as coremltools wrote it, and refused with what was expected and what was found."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mil_programs import converted, function, mil, model, saved, write

from pipeline.errors import ArtifactError
from pipeline.formats.coreml.executor import Executor
from pipeline.formats.coreml.package import DATA, MODEL, Package, Tensor
from pipeline.formats.coreml.weights import read_entry

WEIGHT_FILE = f"{DATA}/weights/weight.bin"


def refusal(act: Callable[[], Any]) -> str:
    with pytest.raises(ArtifactError) as caught:
        act()
    return str(caught.value)


def narrow(values: Any, name: str) -> np.ndarray:
    _, types = mil()
    return np.asarray(values).astype(types.nptype_from_builtin(getattr(types, name)))


def weights(x: Any, cache: Any) -> Any:
    """Two weights, one of them of two parts in the file."""
    mb, _ = mil()
    table = mb.const(val=np.arange(64, dtype=np.float16).reshape(4, 16), name="table")
    packed = mb.constexpr_blockwise_shift_scale(
        data=narrow(np.arange(64).reshape(4, 16) % 15 - 7, "int4"),
        scale=np.full((4, 4), 0.5, np.float16),
        name="packed",
    )
    mb.coreml_update_state(state=cache, value=mb.add(x=table, y=packed))
    return mb.linear(x=x, weight=packed, bias=np.ones(4, np.float16), name="y")


def made() -> Any:
    return function(weights, {"x": ((2, 16), np.float16)}, {"cache": (4, 16)})


@pytest.fixture
def package(tmp_path: Path) -> Package:
    return saved(tmp_path / "package", {"main": made()})


def test_functions_tell_their_inputs_states_and_outputs(package: Package):
    main = package.function("main")
    assert main.inputs == (Tensor("x", "F16", (2, 16)),)
    assert main.states == (Tensor("cache", "F16", (4, 16)),)
    assert main.outputs == (Tensor("y", "F16", (2, 4)),)
    assert "it has main" in refusal(lambda: package.function("decode"))


def test_constants_of_weight_files_are_listed(package: Package):
    found = [(c.name, c.op, c.parameter, c.dtype, c.shape) for c in package.constants("main")]
    assert sorted(found) == [
        ("packed", "constexpr_blockwise_shift_scale", "data", "INT4", (4, 16)),
        ("packed", "constexpr_blockwise_shift_scale", "scale", "F16", (4, 4)),
        ("table", "const", "val", "F16", (4, 16)),
    ]
    assert {c.file for c in package.constants("main")} == {"weights/weight.bin"}
    values = {(c.name, c.parameter): package.value(c.value) for c in package.constants("main")}
    np.testing.assert_array_equal(values["table", "val"], np.arange(64, dtype=np.float16).reshape(4, 16))
    np.testing.assert_array_equal(values["packed", "data"], np.arange(64).reshape(4, 16) % 15 - 7)


IMMEDIATES = {
    "float32": np.array([0.1, -2], np.float32),
    "float16": np.array([[0.1], [-2]], np.float16),
    "float16 scalar": np.float16(3.5),
    "int32": np.array([-3, 70000], np.int32),
    "int32 scalar": np.int32(-3),
    "int16": np.array([-3, 300], np.int16),
    "uint16": np.array([3, 60000], np.uint16),
    "int8": np.array([-3, 100], np.int8),
    "uint8": np.array([3, 200], np.uint8),
    "bool": np.array([True, False, True]),
    "bool scalar": True,
    "none": np.zeros((0, 2), np.float32),
}


def test_values_in_the_program_are_read_in_every_type(tmp_path: Path):
    mb, _ = mil()
    given: dict[str, Any] = IMMEDIATES | {"int4": narrow([[-8, 7, 1]], "int4"), "uint6": narrow([1, 63, 0], "uint6")}

    def build(x: Any) -> Any:
        return [x, *(mb.const(val=value, name=f"const {name}") for name, value in given.items())]

    package = saved(tmp_path / "package", {"main": function(build)})
    consts = [op for op in package.function("main").operations if op.type == "const"]
    assert len(consts) == len(given)
    for op, (name, expected) in zip(consts, given.items(), strict=True):
        found = package.value(op.attributes["val"])
        assert isinstance(found, np.ndarray)
        assert found.shape == np.shape(expected), name
        assert found.dtype.itemsize == np.asarray(expected).dtype.itemsize, name
        np.testing.assert_array_equal(found, expected, err_msg=name)


def test_texts_are_read(tmp_path: Path):
    mb, _ = mil()
    build = function(lambda x: mb.cast(x=x, dtype="int32"))
    package = saved(tmp_path / "package", {"main": build})
    (const, _) = package.function("main").operations
    assert package.value(const.attributes["val"]) == "int32"


def test_the_manifest_says_where_the_model_is(tmp_path: Path):
    path = tmp_path / "saved.mlpackage"
    package = converted(path, made(), "EMPTY")
    assert package.model_path == path / DATA / MODEL
    moved = path / DATA / "other.mlmodel"
    package.model_path.rename(moved)
    manifest = path / "Manifest.json"
    manifest.write_text(manifest.read_text().replace(MODEL, moved.name))
    assert Package(path).model_path == moved
    for text in ("{}", manifest.read_text().replace("com.apple.CoreML/other", "../../other")):
        manifest.write_text(text)
        assert "Manifest.json: expected the path of the root model" in refusal(lambda: Package(path))


def test_what_is_no_package_is_refused(tmp_path: Path, package: Package):
    assert "is no Core ML package" in refusal(lambda: Package(tmp_path / "absent"))
    (tmp_path / "empty").mkdir()
    assert "is no Core ML package" in refusal(lambda: Package(tmp_path / "empty"))
    whole = package.model_path.read_bytes()
    package.model_path.write_bytes(whole[: len(whole) // 2])
    assert "is no Core ML model, or cut short" in refusal(lambda: Package(package.path))
    package.model_path.write_bytes(b"")
    assert "expected an ML Program, found no model" in refusal(lambda: Package(package.path))


def test_a_weight_file_cut_short_or_absent_is_refused(package: Package):
    file = package.path / WEIGHT_FILE
    whole = file.read_bytes()
    last = max(c.record for c in package.constants("main"))
    entry = read_entry(file, last)
    for length in (entry.offset + entry.size - 1, last + 10):
        file.write_bytes(whole[:length])
        found = refusal(lambda: Executor(package, "main"))
        assert f"expected the record of a blob at byte {last}" in found
    file.unlink()
    found = refusal(lambda: Executor(package, "main"))
    assert f"{file} cannot be read: No such file" in found


def changed(tmp_path: Path, change: Callable[[Any], Any]) -> Package:
    """A package in whose program the value of 'table' is changed."""
    proto = model(tmp_path / "package", {"main": made()})
    block = proto.mlProgram.functions["main"].block_specializations["CoreML8"]
    change(next(op for op in block.operations if op.outputs[0].name == "table").attributes["val"])
    return write(tmp_path / "package", proto)


def test_a_record_of_another_type_or_size_is_refused(tmp_path: Path):
    def wider(value: Any) -> None:
        value.type.tensorType.dimensions[1].constant.size = 32

    def other(value: Any) -> None:
        value.type.tensorType.dataType = 22  # INT16

    def between(value: Any) -> None:
        value.blobFileValue.offset += 8

    for i, (change, expected) in enumerate(
        (
            (wider, "expected F16 [4, 32], 256 bytes, in the blob at byte 64, found F16, 128 bytes"),
            (other, "expected INT16 [4, 16], 128 bytes, in the blob at byte 64, found F16, 128 bytes"),
            (between, "expected the record of a blob at byte 72"),
        )
    ):
        package = changed(tmp_path / str(i), change)
        assert expected in refusal(lambda found=package: Executor(found, "main"))


@pytest.mark.parametrize(
    "name", ["@model_path/../../secret", "/etc/passwd", "weights/weight.bin", "@model_path//etc/x"]
)
def test_weights_outside_the_package_are_refused(tmp_path: Path, name: str):
    def away(value: Any) -> None:
        value.blobFileValue.fileName = name

    package = changed(tmp_path, away)
    assert f"weights in {name!r}, expected @model_path/weights/" in refusal(lambda: Executor(package, "main"))


def test_types_that_are_not_read_are_named(tmp_path: Path):
    def other(value: Any) -> None:
        value.type.tensorType.dataType = 13  # BFLOAT16

    package = changed(tmp_path, other)
    (table,) = [c for c in package.constants("main") if c.name == "table"]
    assert "a constant is BF16 [4, 16], which is not read" in refusal(lambda: package.value(table.value))
