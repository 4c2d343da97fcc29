"""Checkpoint -> model.gguf in one pass."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError, PipelineError, gathered, together
from pipeline.files import sha256
from pipeline.formats import CALIBRATION_FILE, bits_per_weight, effective_types, router_types
from pipeline.formats.gguf import arrange, engine, header, importance, kernels, reader
from pipeline.formats.gguf.metadata import check_metadata, metadata
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.plan import plan
from pipeline.formats.gguf.schemes import GGML_TYPES, Scheme
from pipeline.formats.gguf.schemes import scheme as scheme_of
from pipeline.formats.gguf.vocabulary import check_vocabulary
from pipeline.formats.streaming import Rows, check_disk, encode_all, opened, pwrite
from pipeline.models import spec_of
from pipeline.progress import Advance, silent
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import PLAIN, Artifact, ModelSpec, Options, Planned, mix_name

FILE = "model.gguf"


@dataclass(frozen=True)
class _Place:
    """A tensor and the byte of the file where it begins."""

    planned: Planned
    offset: int


def write(
    checkpoint: Checkpoint,
    scheme_name: str,
    folder: Path,
    advance: Advance = silent,
    options: Options = PLAIN,
) -> Artifact:
    """Encode every tensor of the checkpoint into `folder`/model.gguf; `advance` is told of weights done.

    Of the `options`, types are a custom mix's own (schemes.scheme) and imatrix is as llama-quantize's --imatrix; the
    ids of its text, where it says them, go beside model.gguf.

    Memory stays at a few blocks of rows and the vocabulary. Tensor data is byte-identical to what
    `llama_model_quantize` makes.

    Raises:
        PipelineError: several of the following, as far as they are known before a weight is read, but for the disk.
        ParamsError: an unknown scheme, types that name no tensor, or sizes.
        CheckpointError: tensors missing, unknown or of another shape, all listed.
        TokenizerError: a vocabulary or pre-tokenizer that the file cannot carry, or that llama.cpp reads otherwise.
        QuantizationError: weights that are not finite or too large, or tensors that need an importance matrix, all
            tensors listed.
        OutputError: not enough disk.
        ArtifactError: what was written does not read back as planned; an importance matrix of another model.
    """
    scheme = scheme_of(scheme_name, options)
    with together(checkpoint.problems) as problems, gathered(problems):
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        with gathered(problems):
            checkpoint.check(spec)
        check(checkpoint, spec, problems)
        given = None if options.imatrix is None else importance.given(options.imatrix, spec, scheme)
        planned = plan(spec, scheme, given.values if given else None)
    check_disk(folder, sum(p.bytes for p in planned))
    beside = _write_calibration(folder, given)
    path, source = folder / FILE, checkpoint.identity()
    tokenizer = checkpoint.tokenizer
    places, length = _write_header(path, checkpoint, spec, scheme, planned, given.pairs if given else [])
    with ThreadPoolExecutor(1) as second:
        loaded = second.submit(tokenizer.encode, "")  # its library: as long to load as small tensors are to write
        encoded = _encoder(checkpoint, spec, given.values if given else {})
        _write_tensors(path, checkpoint.path, places, length, encoded, advance)
        loaded.result()
    stored = _read_back(path, places, length)
    with ThreadPoolExecutor() as threads:
        hashes = threads.submit(sha256, path), threads.submit(reader.hashes, stored)
        check_vocabulary(path, spec.vocab_size, tokenizer, checkpoint.config)
    return Artifact(
        format="gguf",
        scheme=mix_name(scheme.label, {}, imatrix=given is not None),
        files={FILE: hashes[0].result()} | beside,
        tensors_sha256=hashes[1].result().whole,
        size_bytes=length,
        folder_bytes=length,
        weights=sum(p.tensor.weights for p in planned),
        bits_per_weight=bits_per_weight(planned),
        effective_types=effective_types(planned),
        source=source,
        tools={"llama.cpp": engine.version()},
        platform=f"{platform.system()} {platform.machine()}, {engine.instruction_set()}",
        tensors=hashes[1].result().each,
        dropped=arrange.dropped(spec),
        imatrix=given.used(planned) if given else None,
        routers=router_types(planned),
    )


def check(checkpoint: Checkpoint, spec: ModelSpec, problems: list[PipelineError] | None = None) -> None:
    """What the file must carry besides tensors: vocabulary, pre-tokenizer, special tokens, rope.

    Raises:
        TokenizerError, CheckpointError: the first that it cannot; with `problems` all go there.
    """
    check_metadata(spec, checkpoint, problems)


def _write_calibration(folder: Path, given: importance.Given | None) -> dict[str, str]:
    """Writes the ids int32 [windows, context] of the text of an importance matrix, which is compared with whatever is
    scored later; returns the file's hash by its name.
    """
    if given is None or given.imatrix.calibration is None:
        return {}
    path = folder / CALIBRATION_FILE
    np.save(path, given.imatrix.calibration.ids)
    return {path.name: sha256(path)}


def _write_header(
    path: Path,
    checkpoint: Checkpoint,
    spec: ModelSpec,
    scheme: Scheme,
    planned: list[Planned],
    more: list[header.Pair],
) -> tuple[list[_Place], int]:
    """Header, with `more` keys, and tensor table; returns where each tensor goes and the length of the whole file."""
    name = checkpoint.name.rpartition("/")[2]  # of a Hub id: the folder that it would be cloned to
    pairs = metadata(spec, checkpoint.tokenizer, checkpoint.config, scheme, name)
    rows = [(gguf_name(p.tensor), p.tensor.shape, GGML_TYPES[p.encoding], p.bytes) for p in planned]
    data = header.pack([*pairs, *more], rows)
    path.write_bytes(data)
    *begins, end = (len(data) + offset for offset in header.offsets(p.bytes for p in planned))
    return [_Place(p, begin) for p, begin in zip(planned, begins, strict=True)], end


def _encoder(
    checkpoint: Checkpoint, spec: ModelSpec, values: Mapping[str, NDArray[np.float32]]
) -> Callable[[Rows], NDArray[np.uint8]]:
    """What reads rows of a planned tensor and makes blocks uint8 [rows, row bytes] of them."""
    changes = {part.name: part.change for part in arrange.arranged(spec)}

    def encoded(rows: Rows) -> NDArray[np.uint8]:
        tensor, name = rows.planned.tensor, gguf_name(rows.planned.tensor)
        weights = checkpoint.rows(tensor, rows.start, rows.count)
        if (change := changes[name]) is not None:
            weights = change(weights)
        if name not in values:
            return kernels.quantize(rows.planned.encoding, weights)
        of_each = values[name]
        height = tensor.rows // len(of_each)  # of one expert, whose inputs have an importance of their own
        parts, at = [], 0
        while at < rows.count:
            expert = (rows.start + at) // height
            end = min(rows.count, (expert + 1) * height - rows.start)
            parts.append(kernels.quantize(rows.planned.encoding, weights[at:end], of_each[expert]))
            at = end
        return np.concatenate(parts)

    return encoded


def _write_tensors(
    path: Path,
    source: Path,
    places: list[_Place],
    length: int,
    encoded: Callable[[Rows], NDArray[np.uint8]],
    advance: Advance,
) -> None:
    offsets = {gguf_name(place.planned.tensor): place.offset for place in places}
    with opened(path, length) as descriptor:

        def encode(rows: Rows) -> None:
            blocks = encoded(rows)
            pwrite(descriptor, blocks, offsets[gguf_name(rows.planned.tensor)] + rows.start * blocks.shape[1])

        encode_all(source, [place.planned for place in places], encode, advance)


def _shown(tensor: reader.StoredTensor) -> str:
    return f"{tensor.name} {list(tensor.shape)} {tensor.encoding.name}, {tensor.size} bytes at {tensor.offset}"


def _read_back(path: Path, places: list[_Place], length: int) -> list[reader.StoredTensor]:
    """The tensor table, as ggml reads it: it is the plan's, and the file has its length."""
    wanted = [
        reader.StoredTensor(gguf_name(p.tensor), p.tensor.shape, p.encoding, path, place.offset, p.bytes)
        for place in places
        for p in [place.planned]
    ]
    found = reader.table(path)
    for expected, read in zip(wanted, found, strict=False):
        if expected != read:
            raise ArtifactError(
                f"{path}: expected tensor {_shown(expected)}, read back {_shown(read)}. "
                "This is a defect: please report it."
            )
    if len(found) != len(wanted) or path.stat().st_size != length:
        raise ArtifactError(
            f"{path}: expected {len(wanted)} tensors and {length} bytes, read back {len(found)} and "
            f"{path.stat().st_size}. Is something else writing there?"
        )
    return found
