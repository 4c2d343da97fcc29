"""Small ML Programs, built by coremltools' builder and saved as packages: by its exporter alone, or by ct.convert."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.formats.coreml import engine
from pipeline.formats.coreml.package import DATA, MODEL, WEIGHTS, Package

SPECIFICATION = 9

Inputs = Mapping[str, tuple[tuple[int, ...], Any]]
"""Shape and NumPy type of each input."""

Build = Callable[..., Any]
"""From the function's inputs by name to its output, or outputs."""


def mil() -> tuple[Any, Any]:
    """The builder, and MIL's types."""
    engine.tools()
    from coremltools.converters.mil import Builder
    from coremltools.converters.mil.mil import types

    return Builder, types


def function(build: Build, inputs: Inputs | None = None, states: Mapping[str, tuple[int, ...]] | None = None) -> Any:
    """A function whose states are float16. What `build` returns are its outputs."""
    mb, types = mil()
    from coremltools.converters.mil.mil import Function

    given = {
        name: mb.placeholder(shape, types.numpy_type_to_builtin_type(np.dtype(dtype)), allow_rank0_input=True)
        for name, (shape, dtype) in (inputs or {"x": ((1,), np.float32)}).items()
    }
    given |= {name: mb.state_tensor_placeholder(shape, types.fp16) for name, shape in (states or {}).items()}
    with Function(given, opset_version=engine.tools().target.iOS18) as made:
        found = build(**{name: made.inputs[name] for name in given})
        made.set_outputs([*found] if isinstance(found, list | tuple) else [found])
    return made


def model(folder: Path, functions: Mapping[str, Any]) -> Any:
    """The protobuf of functions, as the exporter makes it; weights go into `folder`."""
    engine.tools()
    from coremltools.converters.mil.backend.mil.load import MILProtoExporter
    from coremltools.converters.mil.mil import Program

    program = Program()
    for name, made in functions.items():
        program.add_function(name, made)
    weights = folder / DATA / WEIGHTS
    weights.mkdir(parents=True)
    exporter = MILProtoExporter(program, str(weights), SPECIFICATION)
    proto = engine.tools().proto.Model_pb2.Model(specificationVersion=SPECIFICATION)
    proto.mlProgram.CopyFrom(exporter.export())
    return proto


def write(folder: Path, proto: Any) -> Package:
    """A package of a protobuf, read; it has no manifest."""
    (folder / DATA / MODEL).write_bytes(proto.SerializeToString(deterministic=True))
    return Package(folder)


def saved(folder: Path, functions: Mapping[str, Any]) -> Package:
    return write(folder, model(folder, functions))


def converted(path: Path, made: Any, passes: str) -> Package:
    """What ct.convert makes of a function, with its pass pipeline of that name."""
    ct = engine.tools()
    from coremltools.converters.mil.mil import Program

    program = Program()
    program.add_function("main", made)
    with warnings.catch_warnings(action="ignore"):
        ct.convert(
            program,
            convert_to="mlprogram",
            minimum_deployment_target=ct.target.iOS18,
            compute_precision=ct.precision.FLOAT32,
            skip_model_load=True,
            pass_pipeline=getattr(ct.PassPipeline, passes),
        ).save(str(path))
    return Package(path)
