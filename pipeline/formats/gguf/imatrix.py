"""Importance matrices in the GGUF format of llama.cpp: of each matrix, the sums of squares of what it is multiplied
with.

Format: tools/imatrix/imatrix.cpp of llama.cpp 0c1e57098 writes it, common/imatrix-loader.cpp reads it: per matrix
NAME two float32 tensors, NAME.in_sum2 [matrices, columns] and NAME.counts [matrices, 1], one row for each expert. What
a quantizer is given of them is in tools/quantize/quantize.cpp, load_imatrix. llama.cpp reads no other keys than its
own, so that ours, of the text it was computed from, lie beside them.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError, listed, some
from pipeline.files import new_file, reading, sha256
from pipeline.formats.gguf import header, reader
from pipeline.formats.gguf.schemes import F32, GGML_TYPES
from pipeline.types import Calibration, ExpertUse, Sums, UsedImatrix

SUMS, COUNTS = ".in_sum2", ".counts"
CHUNKS, CHUNK_SIZE, DATASETS = "imatrix.chunk_count", "imatrix.chunk_size", "imatrix.datasets"
OWN = "quantgate.calibration."
EMBEDDING = "token_embd.weight"
LAYER = re.compile(r"blk\.(\d+)\.")

MAKE = "Make one by `quantgate imatrix`, or by llama-imatrix."
LARGEST = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Imatrix:
    """An importance matrix: sums by the name of the GGUF tensor, over chunks of `chunk_size` tokens of `datasets`.

    `calibration` is None in files that others made: which text they are of is not known.
    """

    tensors: Mapping[str, Sums]
    datasets: tuple[str, ...]
    chunks: int
    chunk_size: int
    calibration: Calibration | None = None


def read(path: Path) -> Imatrix:
    """The importance matrix of a GGUF file, by whomever it was made.

    Raises:
        ArtifactError: no such file, one that llama-quantize would refuse or misread, or one of values that no sums of
            squares can be; everything wrong with its tensors listed.
    """
    _refuse_others(path)
    content = reader.content(path, texts=(DATASETS,), ints=(f"{OWN}ids",))
    keys, stored = content.keys, {tensor.name: tensor for tensor in content.tensors}
    missing = [key for key in (CHUNKS, CHUNK_SIZE) if type(keys.get(key)) is not int]
    missing += [DATASETS] * (DATASETS not in content.texts)
    names = sorted({name.removesuffix(end) for name in stored for end in (SUMS, COUNTS) if name.endswith(end)})
    if missing or not names:
        what = f"a GGUF file of type {keys['general.type']}" if "general.type" in keys else "a GGUF file"
        lacks = f"without {', '.join(missing)}" if missing else "that holds no sums"
        raise ArtifactError(f"{path} is {what} {lacks}: no importance matrix. {MAKE}")
    problems: list[str] = []
    tensors = {}
    for name in names:
        found = _sums(name, stored, problems)
        if found is not None:
            tensors[name] = found
    if problems:
        shown = listed(some(problems, "like these"))
        raise ArtifactError(f"{path} is no sound importance matrix:\n{shown}\nFetch it again. {MAKE}")
    calibration = _calibration(keys, content.ints.get(f"{OWN}ids", []), keys[CHUNK_SIZE])
    return Imatrix(tensors, tuple(content.texts[DATASETS]), keys[CHUNKS], keys[CHUNK_SIZE], calibration)


def write(path: Path, imatrix: Imatrix) -> None:
    """The file of an importance matrix, its tensors in the order of their names, as llama-imatrix writes it.

    Raises:
        OutputError: it cannot be written.
    """
    pairs = [
        ("general.type", header.text("imatrix")),
        (DATASETS, header.texts(imatrix.datasets)),
        (CHUNKS, header.uint32(imatrix.chunks)),
        (CHUNK_SIZE, header.uint32(imatrix.chunk_size)),
        *_own(imatrix.calibration),
    ]
    arrays: list[tuple[str, NDArray[np.float32]]] = []
    for name, found in sorted(imatrix.tensors.items()):
        arrays += [(name + SUMS, found.sums), (name + COUNTS, found.tokens.astype(np.float32)[:, None])]
    rows = [(name, array.shape, GGML_TYPES[F32], array.nbytes) for name, array in arrays]
    with new_file(path) as partial, partial.open("wb") as file:
        file.write(header.pack(pairs, rows))
        for _, array in arrays:
            file.write(np.ascontiguousarray(array, "<f4").data)
            file.write(bytes(header.aligned(array.nbytes) - array.nbytes))


def check(place: Path, imatrix: Imatrix, shapes: Mapping[str, Sequence[int]]) -> None:
    """Whether it is of a model with matrices of `shapes`, [out, in] or [experts, out, in] by the names of GGUF tensors.

    As llama-quantize, another size is refused but of the embedding, which then goes without. A matrix that it does not
    have goes without too, which `used` tells; what it has beside them is not used.

    Raises:
        ArtifactError: every tensor of another size, or no matrix that it has.
    """
    if not imatrix.tensors.keys() & shapes.keys():
        raise ArtifactError(
            f"{place} has none of the model's matrices: it has {next(iter(imatrix.tensors))}, the model "
            f"{next(iter(shapes))}. Give the importance matrix of this model. {MAKE}"
        )
    problems = [
        f"{name}: expected {_inputs(columns, several)}, found {_inputs(found.sums.shape[1], len(found.sums))}"
        for name, found in imatrix.tensors.items()
        if name in shapes and name != EMBEDDING and not fits(found, shapes[name])
        for several, columns in [(prod(shapes[name][:-2]), shapes[name][-1])]
    ]
    if problems:
        shown = listed(some(problems, "tensors of another size"))
        raise ArtifactError(f"{place} is of another model:\n{shown}\nGive the importance matrix of this model. {MAKE}")


def used(path: Path, imatrix: Imatrix, quantized: Sequence[str], have: Container[str]) -> UsedImatrix:
    """What artifact.json says of the importance matrix of a file: `quantized` are the tensors that were rounded, `have`
    those that it had data for.
    """
    without = tuple(name for name in quantized if name not in have)
    return UsedImatrix(
        sha256=sha256(path),
        datasets=imatrix.datasets,
        chunks=imatrix.chunks,
        chunk_size=imatrix.chunk_size,
        text_sha256=imatrix.calibration.text_sha256 if imatrix.calibration else None,
        tokenizer_sha256=imatrix.calibration.tokenizer_sha256 if imatrix.calibration else None,
        matrices=len(quantized) - len(without),
        without=without,
        experts=experts(imatrix),
    )


def experts(imatrix: Imatrix) -> tuple[ExpertUse, ...]:
    """How the tokens were spread over each layer's experts, as far as the file tells."""
    layers: dict[int, NDArray[np.int64]] = {}
    for name, found in imatrix.tensors.items():
        at = LAYER.match(name)
        if at and len(found.tokens) > 1:
            layer = int(at[1])
            layers[layer] = np.minimum(layers.get(layer, found.tokens), found.tokens)
    return tuple(
        ExpertUse(layer, len(tokens), int((tokens > 0).sum()), int(tokens.min()))
        for layer, tokens in sorted(layers.items())
    )


def fits(found: Sums | None, shape: Sequence[int]) -> bool:
    """Whether sums, where there are any, are for a matrix [out, in] or matrices [experts, out, in] of a shape."""
    several, columns = prod(shape[:-2]), shape[-1]
    return found is not None and found.sums.size == several * columns and len(found.sums) in {1, several}


def _refuse_others(path: Path) -> None:
    with reading(path, ArtifactError):
        is_file = path.is_file()
    if not is_file:
        raise ArtifactError(f"{path} is not a file. Give the path of an importance matrix. {MAKE}")
    with reading(path, ArtifactError), path.open("rb") as file:
        magic = file.read(4)
    if magic != b"GGUF":
        raise ArtifactError(
            f"{path} is no GGUF file. If it is an importance matrix of the older kind (.dat), convert it: "
            f"llama-imatrix --in-file {path.name} -o {path.stem}.gguf"
        )


def _sums(name: str, stored: Mapping[str, reader.StoredTensor], problems: list[str]) -> Sums | None:
    """One tensor's; None where something is wrong with it, which goes to `problems`."""
    parts = [stored.get(name + end) for end in (SUMS, COUNTS)]
    if None in parts:
        absent = next(end for end, part in zip((SUMS, COUNTS), parts, strict=True) if part is None)
        problems.append(f"{name}: {name}{absent} is absent")
        return None
    kinds = [part.encoding.name for part in parts if part is not None]
    if kinds != ["F32", "F32"]:
        problems.append(f"{name}: expected F32, found {' and '.join(kinds)}")
        return None
    sums, counts = (_floats(part) for part in parts if part is not None)
    if not len(counts) or not len(sums) or len(sums) % len(counts):
        problems.append(f"{name}: {len(sums)} sums do not divide into {len(counts)} matrices")
        return None
    for what, array in (("sums", sums), ("counts", counts)):
        if wrong := int((~((array >= 0) & (array <= LARGEST))).sum()):
            problems.append(f"{name}: {wrong} of {len(array)} {what} are negative or not finite")
            return None
    # as C's lround: halves away from zero
    return Sums(sums.reshape(len(counts), -1), np.floor(counts.astype(np.float64) + 0.5).astype(np.int64))


def _inputs(columns: int, several: int) -> str:
    return f"{columns} inputs of {several} {'matrix' if several == 1 else 'matrices'}"


def _floats(tensor: reader.StoredTensor) -> NDArray[np.float32]:
    return np.fromfile(tensor.file, "<f4", tensor.size // 4, offset=tensor.offset)


def _own(calibration: Calibration | None) -> Iterable[header.Pair]:
    if calibration is None:
        return
    for key in ("name", "text_sha256", "tokenizer_sha256"):
        yield OWN + key, header.text(getattr(calibration, key))
    yield f"{OWN}ids", header.int32s(calibration.ids.ravel().tolist())


def _calibration(keys: Mapping[str, object], ids: list[int], context: int) -> Calibration | None:
    texts = [keys.get(OWN + key) for key in ("name", "text_sha256", "tokenizer_sha256")]
    if not ids or not context or len(ids) % context:
        return None
    match texts:
        case [str(name), str(text_sha256), str(tokenizer_sha256)]:
            return Calibration(name, text_sha256, tokenizer_sha256, np.array(ids, np.int32).reshape(-1, context))
    return None
