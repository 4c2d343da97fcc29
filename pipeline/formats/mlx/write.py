"""Checkpoint -> an MLX folder in one pass: what mlx_lm.convert makes, at the memory of a few blocks of rows."""

from __future__ import annotations

import platform
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError, PipelineError, QuantizationError, gathered, together
from pipeline.files import sha256
from pipeline.formats import bits_per_weight, carried, effective_types, router_types
from pipeline.formats.mlx import codec, kernels
from pipeline.formats.mlx.arrange import dropped, is_offset
from pipeline.formats.mlx.config import config_text, normalised
from pipeline.formats.mlx.folder import Shard, hashes, index_text, shards
from pipeline.formats.mlx.names import parts
from pipeline.formats.mlx.plan import float_of, plan
from pipeline.formats.mlx.schemes import NVFP4, PACKINGS, Scheme
from pipeline.formats.mlx.schemes import scheme as scheme_of
from pipeline.formats.streaming import Rows, check_disk, encode_all, opened, pwrite
from pipeline.models import spec_of
from pipeline.progress import Advance, silent
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.safetensors import Stored, read_header, widened
from pipeline.source.shards import INDEX
from pipeline.types import PLAIN, Artifact, Encoding, ModelSpec, Options, Planned

FLOAT32_MAX = float(np.finfo(np.float32).max)
"""Half of it is the most that packs: the range of a group, from its lowest weight to its highest, is a float32."""

MOST_OF_NVFP4 = 6.0 * 448.0
"""The largest code times the largest scale; MLX writes whatever is larger as this, or as 0."""


def write(
    checkpoint: Checkpoint,
    scheme_name: str,
    folder: Path,
    advance: Advance = silent,
    options: Options = PLAIN,
) -> Artifact:
    """Fill `folder` with what mlx-lm loads; `advance` is told of weights done. No MLX scheme takes `options`.

    Memory stays at a few blocks of rows and the vocabulary. Tensors, shards, index and config.json are byte-identical
    to what `mlx_lm.convert` makes of a checkpoint that it reads as transformers does (config.normalised), but for
    routers and decays (plan); the index counts all weights.

    Raises:
        PipelineError: several of the following, as far as they are known before a weight is read, but for the disk.
        ParamsError: an unknown scheme, or any options.
        CheckpointError: tensors missing, unknown or of another shape, all listed; a config that mlx-lm cannot follow.
        TokenizerError: no tokenizer.json, or one of another checkpoint.
        QuantizationError: rows that do not divide into groups; weights that are not finite or too large; all listed.
        OutputError: not enough disk.
        ArtifactError: what was written does not read back as planned.
    """
    scheme = scheme_of(scheme_name, options)
    with together(checkpoint.problems) as problems, gathered(problems):
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        with gathered(problems):
            checkpoint.check(spec)
        spec = spec if problems else checkpoint.typed(spec)
        check(checkpoint, spec, problems)
        planned = plan(spec, scheme)
    generation = checkpoint.tokenizer.generation or {}
    files = shards(part for p in planned for part in parts(p))
    texts = {
        "config.json": config_text(checkpoint.config, generation, spec, scheme, planned),
        INDEX: index_text(files, spec.weights),
    }
    beside = carried.files(checkpoint)
    check_disk(folder, sum(shard.length for shard in files) + sum(path.stat().st_size for path in beside))
    source = checkpoint.identity()
    carried.copy(beside, folder)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    _write_tensors(folder, checkpoint.path, planned, files, _encoder(checkpoint, spec, scheme), advance)
    stored = _read_back(folder, files)
    written = [*(shard.name for shard in files), *texts, *(path.name for path in beside)]
    with ThreadPoolExecutor(1) as other:
        tensors = other.submit(hashes, stored)
        files_sha256 = {name: sha256(folder / name) for name in written}
    return Artifact(
        format="mlx",
        scheme=scheme.label,
        files=files_sha256,
        tensors_sha256=tensors.result().whole,
        size_bytes=sum(shard.length for shard in files),
        folder_bytes=sum((folder / name).stat().st_size for name in written),
        weights=spec.weights,
        bits_per_weight=bits_per_weight(planned),
        effective_types=effective_types(planned),
        source=source,
        tools=kernels.tools(),
        platform=f"{platform.system()} {platform.machine()}",
        tensors=tensors.result().each,
        dropped=dropped(spec),
        routers=router_types(planned),
    )


def check(checkpoint: Checkpoint, spec: ModelSpec, problems: list[PipelineError] | None = None) -> None:
    """What the folder must carry besides tensors: a tokenizer, and a config that mlx-lm can follow.

    Raises:
        TokenizerError, CheckpointError: the first that it cannot; with `problems` all go there.
    """
    carried.check(checkpoint, spec, problems)
    with gathered(problems):
        normalised(checkpoint.config, spec)


@dataclass(frozen=True)
class _Place:
    """Where a part begins."""

    descriptor: int
    offset: int


def _encoder(checkpoint: Checkpoint, spec: ModelSpec, scheme: Scheme) -> Callable[[Rows], Sequence[NDArray[Any]]]:
    """What reads rows of a planned tensor and makes those of each part of them."""

    def encoded(rows: Rows) -> Sequence[NDArray[Any]]:
        tensor = rows.planned.tensor
        stored = checkpoint.stored_rows(tensor, rows.start, rows.count)
        return _encoded(rows.planned, float_of(tensor, spec, scheme), stored, is_offset(tensor, spec))

    return encoded


def _write_tensors(
    folder: Path,
    source: Path,
    planned: Sequence[Planned],
    files: Sequence[Shard],
    encoded: Callable[[Rows], Sequence[NDArray[Any]]],
    advance: Advance,
) -> None:
    with ExitStack() as stack:
        places: dict[str, _Place] = {}
        for shard in files:
            (folder / shard.name).write_bytes(shard.header)
            descriptor = stack.enter_context(opened(folder / shard.name, shard.length))
            places |= {name: _Place(descriptor, offset) for name, offset in shard.offsets.items()}

        def encode(rows: Rows) -> None:
            for part, array in zip(parts(rows.planned), encoded(rows), strict=True):
                place = places[part.name]
                pwrite(place.descriptor, array, place.offset + rows.start * array[0].nbytes)

        encode_all(source, planned, encode, advance, kernels.SPARE)


def _encoded(planned: Planned, own: Encoding, stored: NDArray[Any], offset: bool) -> Sequence[NDArray[Any]]:
    """The rows of each part: weights as the checkpoint stores them, with 1 added in float32 where they are `offset`,
    are cast to their `own` float type, then packed.
    """
    largest = _largest(stored)
    if not largest < np.inf:
        raise QuantizationError("weights that are not finite", int((~np.isfinite(widened(stored))).sum()))
    if offset or planned.tensor.dtype != own.name:
        stored = codec.narrow(widened(stored) + np.float32(1) if offset else widened(stored), own)
        largest = _largest(stored)
    packing = PACKINGS.get(planned.encoding)
    most = FLOAT32_MAX if packing is None else MOST_OF_NVFP4 if planned.encoding == NVFP4 else FLOAT32_MAX / 2
    if largest > most:
        count = int((np.abs(widened(stored)) > most).sum())
        raise QuantizationError(f"weights too large for {planned.encoding.name}", count)
    if packing is None:
        return [stored]
    arrays = kernels.quantize(stored, packing, own)
    if groups := codec.ruined(stored, arrays, packing):
        raise QuantizationError(
            f"weights too small for the scales of {planned.encoding.name}, which MLX would make huge",
            groups * packing.group,
        )
    return arrays


def _largest(stored: NDArray[Any]) -> float:
    """Without its sign; NaN, or infinity, where there is one. Magnitudes of bfloat16 are ordered as their bits are."""
    if stored.dtype == np.uint16:
        return float(widened((stored & 0x7FFF).max(keepdims=True)).item())
    weights = widened(stored)
    return float(np.maximum(weights.max(), -weights.min()))


def _read_back(folder: Path, files: Sequence[Shard]) -> dict[str, Stored]:
    """Every tensor as the headers have it: it is the plan's, and the files have their lengths."""
    found: dict[str, Stored] = {}
    for shard in files:
        path = folder / shard.name
        wanted = {p.name: Stored(path, p.dtype, p.shape, shard.offsets[p.name], p.size) for p in shard.parts}
        read = read_header(path)
        if differing := [name for name in {**wanted, **read} if wanted.get(name) != read.get(name)]:
            name = differing[0]
            raise ArtifactError(
                f"{path}: expected tensor {name} {_shown(wanted.get(name))}, read back {_shown(read.get(name))}. "
                "This is a defect: please report it."
            )
        if (length := path.stat().st_size) != shard.length:
            raise ArtifactError(
                f"{path}: expected {shard.length} bytes, read back {length}. Is something else writing there?"
            )
        found |= read
    return found


def _shown(stored: Stored | None) -> str:
    return f"{stored.dtype} {list(stored.shape)}, {stored.size} bytes at {stored.offset}" if stored else "nothing"
