"""Checkpoint -> model.gguf in one pass."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from pipeline.errors import ArtifactError
from pipeline.files import sha256
from pipeline.formats import bits_per_weight, effective_types
from pipeline.formats.gguf import engine, header, kernels, reader
from pipeline.formats.gguf.metadata import metadata
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.plan import plan
from pipeline.formats.gguf.schemes import GGML_TYPES, SCHEMES, Scheme
from pipeline.formats.gguf.schemes import scheme as scheme_of
from pipeline.formats.gguf.vocabulary import check_vocabulary
from pipeline.formats.streaming import Rows, check_disk, encode_all, opened, pwrite
from pipeline.models import spec_of
from pipeline.progress import Advance, silent
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import Artifact, ModelSpec, Planned

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
    types: Mapping[str, str] | None = None,
    sizes: Mapping[str, int] | None = None,
) -> Artifact:
    """Encode every tensor of the checkpoint into `folder`/model.gguf; `advance` is told of weights done.

    `types` are a custom mix's own, by pattern (schemes.scheme).

    Memory stays at a few blocks of rows and the vocabulary. Tensor data is byte-identical to what
    `llama_model_quantize` makes.

    Raises:
        ParamsError: an unknown scheme, or types that name no tensor.
        CheckpointError: tensors missing, unknown or of another shape, all listed.
        TokenizerError: a vocabulary or pre-tokenizer that the file cannot carry, or that llama.cpp reads otherwise.
        QuantizationError: weights that are not finite or too large, all tensors listed.
        OutputError: not enough disk.
        ArtifactError: what was written does not read back as planned.
    """
    scheme = scheme_of(scheme_name, types, sizes)
    spec = spec_of(checkpoint.config)
    checkpoint.check(spec)
    planned = plan(spec, scheme)
    check_disk(folder, sum(p.bytes for p in planned))
    path, source = folder / FILE, checkpoint.identity()
    tokenizer = Tokenizer(checkpoint.path)
    places, length = _write_header(path, checkpoint, tokenizer, spec, scheme, planned)
    with ThreadPoolExecutor(1) as beside:
        loaded = beside.submit(tokenizer.encode, "")  # its library: as long to load as small tensors are to write
        _write_tensors(path, checkpoint, places, length, advance)
        loaded.result()
    stored = _read_back(path, places, length)
    with ThreadPoolExecutor() as threads:
        hashes = threads.submit(sha256, path), threads.submit(reader.hashes, stored)
        check_vocabulary(path, spec.vocab_size, tokenizer, checkpoint.config)
    return Artifact(
        format="gguf",
        scheme=scheme.label,
        files={FILE: hashes[0].result()},
        tensors_sha256=hashes[1].result().whole,
        size_bytes=length,
        folder_bytes=length,
        weights=spec.weights,
        bits_per_weight=bits_per_weight(planned),
        effective_types=effective_types(planned),
        source=source,
        tools={"llama.cpp": engine.version()},
        platform=f"{platform.system()} {platform.machine()}, {engine.instruction_set()}",
        tensors=hashes[1].result().each,
    )


def check(checkpoint: Checkpoint, spec: ModelSpec) -> None:
    """What the file must carry besides tensors: vocabulary, pre-tokenizer, special tokens, rope.

    Raises:
        TokenizerError, CheckpointError: the first that it cannot.
    """
    metadata(spec, Tokenizer(checkpoint.path), checkpoint.config, SCHEMES["f32"], "")


def _write_header(
    path: Path, checkpoint: Checkpoint, tokenizer: Tokenizer, spec: ModelSpec, scheme: Scheme, planned: list[Planned]
) -> tuple[list[_Place], int]:
    """Header and tensor table; returns where each tensor goes and the length of the whole file."""
    name = checkpoint.name.rpartition("/")[2]  # of a Hub id: the folder that it would be cloned to
    pairs = metadata(spec, tokenizer, checkpoint.config, scheme, name)
    rows = [(gguf_name(p.tensor), p.tensor.shape, GGML_TYPES[p.encoding], p.bytes) for p in planned]
    data = header.pack(pairs, rows)
    path.write_bytes(data)
    *begins, end = (len(data) + offset for offset in header.offsets(p.bytes for p in planned))
    return [_Place(p, begin) for p, begin in zip(planned, begins, strict=True)], end


def _write_tensors(path: Path, checkpoint: Checkpoint, places: list[_Place], length: int, advance: Advance) -> None:
    offsets = {place.planned.tensor.name: place.offset for place in places}
    with opened(path, length) as descriptor:

        def encode(rows: Rows) -> None:
            name = rows.planned.tensor.name
            blocks = kernels.quantize(rows.planned.encoding, checkpoint.rows(name, rows.start, rows.count))
            pwrite(descriptor, blocks, offsets[name] + rows.start * blocks.shape[1])

        encode_all(checkpoint.path, [place.planned for place in places], encode, advance)


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
