"""A saved package against its plan: type, shape and bytes of every weight of every function, as they lie on disk.

coremltools folds constants where it can, and then a weight of few bits comes out as floats: nothing else would show it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from math import prod
from pathlib import Path

from pipeline import formats
from pipeline.errors import ArtifactError, listed, some
from pipeline.formats.coreml.names import Blob, Piece
from pipeline.formats.coreml.package import WEIGHTS, Function, Package, Value
from pipeline.formats.coreml.plan import FEWEST
from pipeline.formats.coreml.schemes import PACKINGS
from pipeline.formats.coreml.weights import WeightFile, read_entry
from pipeline.types import EffectiveType, Planned

ENCODINGS = {packing.data: packing.name for packing in PACKINGS.values()}
"""By the type of their codes; weights without codes are of their own type, F16 or F32."""

At = tuple[str, int]
"""A weight file, by its path beside the model, and the byte where a record begins."""


def effective_types(path: Path, parts: Sequence[Piece], files: Sequence[WeightFile]) -> dict[str, EffectiveType]:
    """Tensors and weights by encoding as the package at `path` holds them, the most weights first.

    `parts` are the plan's weights; `files` hold those, and tables beside them.

    Raises:
        ArtifactError: weights or tables that are missing, of another type, shape or size, or in no plan: all listed.
    """
    package = Package(path)
    wanted = {(_called(file), file.records[blob.name]): blob for file in files for blob in file.blobs}
    found: dict[At, str] = {}
    problems: list[str] = []
    for _, function in sorted(package.functions.items()):
        own, said = _of_function(package, function, wanted, {blob.name for part in parts for blob in part.blobs})
        found |= own
        problems += [f"{function.name}: {problem}" for problem in said]
    problems += [f"{blob.name} is in no function" for at, blob in wanted.items() if at not in found]
    problems += _of_files(package, files)
    if problems:
        raise ArtifactError(
            f"{path} does not hold what was planned:\n{listed(some(problems, 'constants', 20))}\n"
            "This is a defect: please report it."
        )
    types = {blob.name: found[at] for at, blob in wanted.items()}
    measured: dict[str, Planned] = {}
    for part in parts:
        dtype = types[part.blobs[0].name]
        encoding = replace(part.planned.encoding, name=ENCODINGS.get(dtype, dtype))
        measured[part.planned.tensor.name] = replace(part.planned, encoding=encoding)
    return formats.effective_types([*measured.values()])


def _called(file: WeightFile) -> str:
    return f"{WEIGHTS}/{file.name}"


def _of_files(package: Package, files: Sequence[WeightFile]) -> Iterator[str]:
    """What differs in the weight files: their records, their lengths, other files beside them."""
    folder = package.model_path.parent / WEIGHTS
    for file in files:
        place = folder / file.name
        if (length := place.stat().st_size) != file.length:
            yield f"{file.name}: expected {file.length} bytes, found {length}"
        for blob in file.blobs:
            try:
                entry = read_entry(place, file.records[blob.name])
            except ArtifactError as error:  # collected: all blobs are named in one error
                yield f"{blob.name}: {error}"
                continue
            if (entry.dtype, entry.size, entry.offset) != (blob.dtype, blob.size, file.data[blob.name]):
                yield (
                    f"{blob.name}: expected {blob.dtype}, {blob.size} bytes at {file.data[blob.name]} of {file.name}, "
                    f"found {entry.dtype}, {entry.size} bytes at {entry.offset}"
                )
    for name in sorted({path.name for path in folder.iterdir()} - {file.name for file in files}):
        yield f"{name} was not planned"


def _of_function(
    package: Package, function: Function, wanted: Mapping[At, Blob], needed: set[str]
) -> tuple[dict[At, str], list[str]]:
    """The type of each constant of a function, by its place, and what differs."""
    found: dict[At, str] = {}
    problems = [*_inline(function)]
    for constant in package.constants(function.name):
        at = (constant.file, constant.record)
        found[at] = constant.dtype
        blob = wanted.get(at)
        if blob is None:
            problems.append(f"{constant.name}: {constant.dtype} {[*constant.shape]} at byte {at[1]} was not planned")
        elif (constant.dtype, constant.shape) != (blob.dtype, blob.shape):
            problems.append(
                f"{blob.name}: expected {blob.dtype} {[*blob.shape]}, found {constant.dtype} {[*constant.shape]}"
            )
    present = {wanted[at].name for at in found if at in wanted}
    return found, problems + [f"{name} is missing" for name in sorted(needed - present)]


def _inline(function: Function) -> Iterator[str]:
    """Constants in the program that are long enough to be weights."""
    for op in function.operations:
        for values in (tuple(op.attributes.values()), *op.inputs.values()):
            for value in values:
                if isinstance(value, Value) and value.file is None and prod(value.tensor.shape) >= FEWEST:
                    yield f"{op.name}: {value.tensor} lies in the program itself"
