"""Checkpoint -> a Core ML package in one pass, at the memory of a few blocks of rows.

The program names its weights by file and offset, which are known before a weight is read; block by block their bytes go
there.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import PipelineError, gathered, together
from pipeline.files import sha256
from pipeline.formats import TensorHashes, bits_per_weight, carried, tensor_hashes
from pipeline.formats.coreml import arrange, audit, codec, graph, manifest, proto, swift
from pipeline.formats.coreml.layers import refuse_unknown
from pipeline.formats.coreml.names import PART_MULTIPLE, Blob, Piece, pieces
from pipeline.formats.coreml.package import DATA, MODEL, PACKAGE, WEIGHTS
from pipeline.formats.coreml.plan import plan, sizes_of
from pipeline.formats.coreml.schemes import scheme as scheme_of
from pipeline.formats.coreml.tables import tables
from pipeline.formats.coreml.weights import WeightFile, layout
from pipeline.formats.streaming import Rows, check_disk, encode_all, opened, pwrite
from pipeline.models import spec_of
from pipeline.processes import workers
from pipeline.progress import Advance, silent
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import PLAIN, Artifact, ModelSpec, Options

CONFIG = "config.json"
MANIFEST = f"{PACKAGE}/{manifest.FILE}"
PROGRAM = f"{PACKAGE}/{DATA}/{MODEL}"
FOLDER = f"{PACKAGE}/{DATA}/{WEIGHTS}"
"""Places in an artifact's folder."""


def write(
    checkpoint: Checkpoint,
    scheme_name: str,
    folder: Path,
    advance: Advance = silent,
    options: Options = PLAIN,
) -> Artifact:
    """Fill `folder` with a package, the tokenizer's files and LanguageModel.swift; `advance` is told of weights done.

    Of the `options` it takes the sizes (plan.sizes_of). The same checkpoint gives the same bytes.

    Raises:
        PipelineError: several of the following, as far as they are known before a weight is read, but for the disk.
        ParamsError: an unknown scheme, types, an importance matrix, or sizes that no package or this model has.
        CheckpointError: tensors missing, unknown or of another shape, all listed.
        TokenizerError: no tokenizer.json, or one of another checkpoint.
        QuantizationError: a model whose layers no function computes; matrices that do not divide; weights that are not
            finite or beyond float16; all listed.
        OutputError: not enough disk.
        ArtifactError: what was written does not read back as planned.
    """
    scheme = scheme_of(scheme_name, options)
    with together(checkpoint.problems) as problems, gathered(problems):
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        refuse_unknown(spec)  # alone: of a model that no scheme here holds, nothing else needs mending
        with gathered(problems):
            checkpoint.check(spec)
        check(checkpoint, spec, problems)
        with gathered(problems):
            fixed = sizes_of(spec, scheme)
        planned = plan(spec, scheme)
    parts = [piece for p in planned for piece in pieces(p)]
    constants = tables(spec, planned, fixed)
    files = layout([*(blob for part in parts for blob in part.blobs), *constants])
    beside = [checkpoint.path / CONFIG, *carried.files(checkpoint)]
    check_disk(folder, sum(file.length for file in files) + sum(path.stat().st_size for path in beside))
    source = checkpoint.identity()
    stop_ids = checkpoint.tokenizer.stop_ids(checkpoint.config)
    said = manifest.metadata(scheme.label, fixed, checkpoint.name)
    model = proto.model(graph.program(spec, planned, fixed), files, said)
    carried.copy(beside, folder)
    (folder / swift.FILE).write_text(swift.text(scheme.label, checkpoint.name, fixed, stop_ids), encoding="utf-8")
    (folder / FOLDER).mkdir(parents=True)
    (folder / PROGRAM).write_bytes(model.SerializeToString(deterministic=True))  # its maps have no order of their own
    _write_weights(folder / FOLDER, checkpoint, parts, constants, files, advance)
    weight_files = [f"{FOLDER}/{file.name}" for file in files]
    names = [*weight_files, PROGRAM, *(path.name for path in beside), swift.FILE]
    with ThreadPoolExecutor(1) as other:
        tensors = other.submit(_hashes, folder / FOLDER, parts, files)
        hashes = {name: sha256(folder / name) for name in names}
    weights = [hashes[name] for name in weight_files]
    (folder / MANIFEST).write_text(manifest.text(MODEL, hashes[PROGRAM], WEIGHTS, weights), encoding="utf-8")
    hashes[MANIFEST] = sha256(folder / MANIFEST)
    effective = audit.effective_types(folder / PACKAGE, parts, files)
    return Artifact(
        format="coreml",
        scheme=scheme.label,
        files=hashes,
        tensors_sha256=tensors.result().whole,
        size_bytes=sum(file.length for file in files),
        folder_bytes=sum((folder / name).stat().st_size for name in hashes),
        weights=spec.weights,
        bits_per_weight=bits_per_weight(planned),
        effective_types=effective,
        source=source,
        tools={name: version(name) for name in ("coremltools", "numpy")},
        platform=f"{platform.system()} {platform.machine()}",
        tensors=tensors.result().each,
        dropped=arrange.dropped(spec),
    )


def check(checkpoint: Checkpoint, spec: ModelSpec, problems: list[PipelineError] | None = None) -> None:
    """What the folder must carry besides tensors: a tokenizer.

    Raises:
        TokenizerError: no tokenizer.json, or one of another checkpoint; with `problems` it goes there.
    """
    carried.check(checkpoint, spec, problems)


@dataclass(frozen=True)
class _Place:
    """Where the data of a blob begins."""

    descriptor: int
    offset: int


def _write_weights(
    folder: Path,
    checkpoint: Checkpoint,
    parts: Sequence[Piece],
    tables: Mapping[Blob, NDArray[Any]],
    files: Sequence[WeightFile],
    advance: Advance,
) -> None:
    of_tensor: dict[str, list[Piece]] = {}
    for part in parts:
        of_tensor.setdefault(part.planned.tensor.name, []).append(part)
    with ExitStack() as stack:
        places: dict[str, _Place] = {}
        for file in files:
            (folder / file.name).touch()
            descriptor = stack.enter_context(opened(folder / file.name, file.length))
            for offset, data in file.head():
                pwrite(descriptor, np.frombuffer(data, np.uint8), offset)
            places |= {name: _Place(descriptor, offset) for name, offset in file.data.items()}
        for blob, array in tables.items():
            pwrite(places[blob.name].descriptor, np.ascontiguousarray(array), places[blob.name].offset)

        encoded = stack.enter_context(_encoder(parts))

        def encode(rows: Rows) -> None:
            weights = checkpoint.rows(rows.planned.tensor, rows.start, rows.count)
            own = of_tensor[rows.planned.tensor.name]
            arrays = encoded(weights, own[0].packing, own[0].blobs[0].dtype)
            for part in own:
                for blob, array in zip(part.blobs, arrays, strict=True):
                    place = places[blob.name]
                    _write_share(place, blob, part, rows, array)

        planned = [own[0].planned for own in of_tensor.values()]
        encode_all(checkpoint.path, planned, encode, advance, multiple=PART_MULTIPLE)


@contextmanager
def _encoder(parts: Sequence[Piece]) -> Iterator[Callable[..., list[NDArray[Any]]]]:
    """codec.encode, for palettes in as many processes as there are cores: their k-means holds Python's lock."""
    if any(part.packing is not None and part.packing.group for part in parts):
        with workers("palettizing") as call:
            yield partial(call, codec.encode)
    else:
        yield codec.encode


def _write_share(place: _Place, blob: Blob, part: Piece, rows: Rows, array: NDArray[Any]) -> None:
    """What of a block of rows, encoded as `array`, is of a part of its tensor. Bytes are in proportion to rows."""
    begin, end = max(rows.start, part.start), min(rows.start + rows.count, part.start + part.count)
    if begin < end:
        data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        first, last = (data.size * (at - rows.start) // rows.count for at in (begin, end))
        pwrite(place.descriptor, data[first:last], place.offset + blob.size * (begin - part.start) // part.count)


def _hashes(folder: Path, parts: Sequence[Piece], files: Sequence[WeightFile]) -> TensorHashes:
    """See tensor_hashes; of what the tensors are stored as, without tables: these go by the sizes of the inputs."""
    blobs = {blob.name: blob for part in parts for blob in part.blobs}
    places = {name: (folder / file.name, offset) for file in files for name, offset in file.data.items()}
    return tensor_hashes((name, blob.dtype, *places[name], blob.size) for name, blob in blobs.items())
