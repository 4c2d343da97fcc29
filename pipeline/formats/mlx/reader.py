"""What lies in MLX folders, whoever made them: the settings of config.json, and every tensor with how it is packed.

The rules are those by which mlx-lm 0.32.2 loads a folder (utils.py: load_model, infer_quant_config), strictly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError, CheckpointError, listed, some
from pipeline.files import read_object, reading
from pipeline.formats.mlx import codec
from pipeline.formats.mlx.arguments import read_spec
from pipeline.formats.mlx.arrange import arranged, is_left_out, is_packable, renamed
from pipeline.formats.mlx.names import Part, parts
from pipeline.formats.mlx.schemes import FLOATS, PACKINGS, Packing
from pipeline.source.safetensors import DTYPES, Stored, read_header, widened
from pipeline.source.shards import INDEX
from pipeline.types import Encoding, ModelSpec, Planned, TensorSpec

WEIGHTS = "model*.safetensors"
STORED = {encoding.name: encoding for encoding in FLOATS.values()}
ENCODINGS = {packing: encoding for encoding, packing in PACKINGS.items()}
DEFAULTS = {"affine": (64, 4), "mxfp4": (32, 4), "mxfp8": (32, 8), "nvfp4": (16, 4)}
"""Group and bits of a mode where config.json says none."""

ONE_BYTE_SCALES = {(4, 16): "nvfp4", (4, 32): "mxfp4", (8, 32): "mxfp8"}
"""Modes by bits and group; affine scales are floats."""


@dataclass(frozen=True)
class MlxTensor:
    """A tensor of the model: how it is packed, and where its parts lie, in the order of names.parts."""

    planned: Planned
    parts: tuple[Stored, ...]


@dataclass(frozen=True)
class MlxFolder:
    """A folder that mlx-lm loads.

    `spec` is the architecture that it builds from `config`, `tensors` are those of arrange.arranged by their names, and
    `stored` are their parts by the names that the files have.
    """

    path: Path
    config: dict[str, Any]
    spec: ModelSpec
    files: tuple[Path, ...]
    stored: dict[str, Stored]
    tensors: dict[str, MlxTensor]


def read(path: Path) -> MlxFolder:
    """Settings and tensor table of a folder.

    Raises:
        ArtifactError: no MLX folder, an absent or broken file, another quantization than MLX's, or tensors that are
            not those of config.json: every problem is listed.
    """
    files = weight_files(path)
    config = read_object(path / "config.json", ArtifactError)
    _refuse(path, config)
    try:
        spec = read_spec(config)
    except ArtifactError as error:
        raise ArtifactError(f"{path}: {error}") from error
    stored = {name: part for name, part in _stored(path, files).items() if not is_left_out(name, spec)}
    if spec.experts or spec.delta:
        _refuse_raw(path, stored)
    named = {renamed(name, spec): part for name, part in stored.items()}
    tensors, problems = {}, []
    for tensor in arranged(spec):
        try:
            tensors[tensor.name] = _tensor(tensor, named, config.get("quantization"))
        except ArtifactError as error:
            problems.append(f"{tensor.name}: {error}")
    known = {part for tensor in arranged(spec) for part in _part_names(tensor.name)}
    problems += [f"{name}: not a tensor of {spec.model_type}" for name in sorted(named.keys() - known)]
    if problems:
        raise ArtifactError(
            f"{path} does not hold what its config.json says:\n{listed(some(problems, 'tensors'))}\n"
            "mlx-lm would not load it. Fetch it again, or convert it again."
        )
    return MlxFolder(path, config, spec, files, stored, tensors)


def weight_files(path: Path) -> tuple[Path, ...]:
    """Every file that mlx-lm takes weights from.

    Raises:
        ArtifactError: no folder with config.json and weights, or an index that names an absent file.
    """
    with reading(path, ArtifactError):
        files = tuple(sorted(path.glob(WEIGHTS))) if path.is_dir() else ()
        is_whole = (path / "config.json").is_file() and bool(files)
    if not is_whole:
        raise ArtifactError(f"{path} is no MLX folder: config.json and {WEIGHTS} are expected. Check the path.")
    if (path / INDEX).exists():
        promised = read_object(path / INDEX, ArtifactError).get("weight_map")
        if not isinstance(promised, dict):
            raise ArtifactError(f"{path / INDEX} has no weight_map. Fetch it again.")
        absent = sorted({str(name) for name in promised.values()} - {file.name for file in files})
        if absent:
            raise ArtifactError(
                f"{path} is incomplete:\n{listed(some(absent, 'files'))}\n{INDEX} names these, and they are absent. "
                "Fetch them again."
            )
    return files


def arrays(tensor: MlxTensor, start: int, count: int) -> tuple[NDArray[Any], ...]:
    """Rows [start, start + count) of each part as it is stored: float32, float16, uint32, uint8, or uint16 for the bits
    of bfloat16. A vector is one row.
    """
    return tuple(_rows(part, tensor.planned.tensor.rows, start, count) for part in tensor.parts)


def rows(tensor: MlxTensor, start: int, count: int) -> NDArray[np.float32]:
    """The weights of rows [start, start + count), dequantized in float32: [count, columns]."""
    stored, packing = arrays(tensor, start, count), PACKINGS.get(tensor.planned.encoding)
    return widened(stored[0]) if packing is None else codec.dequantize(stored, packing)


def whole(tensor: MlxTensor) -> NDArray[np.float32]:
    """All its weights, dequantized in float32, in the tensor's shape."""
    spec = tensor.planned.tensor
    return rows(tensor, 0, spec.rows).reshape(spec.shape)


def _rows(part: Stored, rows: int, start: int, count: int) -> NDArray[Any]:
    width = part.size // rows
    with reading(part.file, ArtifactError), part.file.open("rb", buffering=0) as file:
        file.seek(part.offset + start * width)
        data = file.read(count * width)
    if len(data) < count * width:
        raise ArtifactError(f"{part.file} was cut short while it was read. Fetch it again.")
    return np.frombuffer(data, DTYPES[part.dtype]).reshape(count, -1)


def _refuse(path: Path, config: dict[str, Any]) -> None:
    """What is not MLX's own quantization, or not the weights' alone."""
    if config.get("model_file") is not None:
        raise ArtifactError(
            f"{path}: config.json names code of its own (model_file: {config['model_file']!r}), which is never run. "
            "Take a conversion without it."
        )
    if config.get("quantize_activations"):
        raise ArtifactError(
            f"{path}: config.json says quantize_activations: what is measured here are quantized weights alone."
        )
    quantization, other = config.get("quantization"), config.get("quantization_config")
    if quantization is None and (other or (path / "hf_quant_config.json").exists()):
        method = other.get("quant_method") if isinstance(other, dict) else other
        raise ArtifactError(
            f"{path} is quantized by {method or 'ModelOpt'}, not by MLX (config.json has no quantization). "
            "Give a folder that mlx_lm.convert made."
        )
    match quantization:
        case None | {"group_size": int(), "bits": int()} if _is_mode(quantization):
            return
    raise ArtifactError(
        f"{path}: config.json: quantization must hold group_size, bits and a mode ({', '.join(DEFAULTS)}), found "
        f"{str(quantization)[:200]}. Fetch it again."
    )


def _is_mode(quantization: dict[str, Any] | None) -> bool:
    mode = (quantization or {}).get("mode", "affine")
    return isinstance(mode, str) and mode in DEFAULTS


def _stored(path: Path, files: Sequence[Path]) -> dict[str, Stored]:
    stored: dict[str, Stored] = {}
    for file in files:
        try:
            header = read_header(file)
        except CheckpointError as error:
            raise ArtifactError(str(error)) from error
        if twice := sorted(header.keys() & stored.keys()):
            raise ArtifactError(
                f"{path}: {twice[0]} is in {stored[twice[0]].file.name} and in {file.name}: two sets of weights. "
                "Move one of them away."
            )
        stored |= header
    return stored


def _refuse_raw(path: Path, stored: Mapping[str, Stored]) -> None:
    """Tensors as transformers arranges them; dense models have them as mlx-lm does."""
    raw = [
        name
        for name, part in stored.items()
        if ".experts." in name or (name.endswith("conv1d.weight") and part.shape[-1:] != (1,))
    ]
    if raw:
        raise ArtifactError(
            f"{path} holds tensors as a checkpoint does, which mlx-lm rearranges whenever it loads them:\n"
            f"{listed(some(sorted(raw), 'tensors'))}\nConvert it, and give the folder that comes of it."
        )


def _part_names(name: str) -> Iterator[str]:
    yield name
    if name.endswith(".weight"):
        stem = name.removesuffix(".weight")
        yield from (f"{stem}.scales", f"{stem}.biases")


def _tensor(tensor: TensorSpec, stored: Mapping[str, Stored], quantization: dict[str, Any] | None) -> MlxTensor:
    """Raises: ArtifactError, without the tensor's name."""
    encoding = _encoding(tensor, stored, quantization)
    planned = Planned(tensor, encoding, "")
    expected = parts(planned)
    for part in expected:
        if part.name not in stored:
            raise ArtifactError(f"{part.name} is missing, expected {_said(part)}")
        found = stored[part.name]
        if (found.dtype, found.shape) != (part.dtype, part.shape):
            raise ArtifactError(
                f"expected {_said(part)}{_of(part, tensor)}, found {_said(Part(part.name, found.dtype, found.shape))}"
            )
    extra = [name for name in _part_names(tensor.name) if name in stored and name not in {p.name for p in expected}]
    if extra:
        raise ArtifactError(f"{', '.join(extra)} beside it, which {encoding.name} does not have")
    return MlxTensor(planned, tuple(stored[part.name] for part in expected))


def _said(part: Part) -> str:
    return f"{list(part.shape)} {part.dtype}"


def _of(part: Part, tensor: TensorSpec) -> str:
    return "" if part.name == tensor.name else f" for {part.name}"


def _encoding(tensor: TensorSpec, stored: Mapping[str, Stored], quantization: dict[str, Any] | None) -> Encoding:
    """How a tensor is packed: as config.json says of its path, else as its shapes show; or not at all."""
    stem, weight = tensor.name.removesuffix(".weight"), stored.get(tensor.name)
    if weight is None:
        raise ArtifactError(f"missing, expected {list(tensor.shape)}")
    scales = stored.get(f"{stem}.scales")
    own = (quantization or {}).get(stem)
    is_matrix = is_packable(tensor)
    packed = quantization is not None and is_matrix and (scales is not None if own is None else bool(own))
    if not packed:
        if weight.dtype not in STORED:
            why = "config.json says that it is not quantized" if is_matrix else "only matrices are packed"
            raise ArtifactError(f"{weight.dtype} {list(weight.shape)} is not {', '.join(STORED)}, and {why}")
        return STORED[weight.dtype]
    if scales is None:
        raise ArtifactError(f"config.json says that it is quantized, but {stem}.scales is missing")
    mode, bits, group = _packing(own, quantization or {}) if own is not None else _inferred(tensor, weight, scales)
    scale = None if mode in ONE_BYTE_SCALES.values() else STORED.get(scales.dtype)
    encoding = ENCODINGS.get(Packing(mode, bits, group, scale))
    if encoding is None:
        raise ArtifactError(f"{bits} bits in groups of {group}, {mode}, with {scales.dtype} scales is not read")
    if tensor.shape[-1] % group:
        raise ArtifactError(f"rows of {tensor.shape[-1]} weights do not divide into groups of {group}")
    return encoding


def _packing(own: object, quantization: dict[str, Any]) -> tuple[str, int, int]:
    """Mode, bits and group that config.json gives a path."""
    settings = quantization if own is True else own
    if not isinstance(settings, dict) or not _is_mode(settings):
        raise ArtifactError(f"config.json: quantization says {str(own)[:80]} of it: expected group_size, bits and mode")
    mode = settings.get("mode", "affine")
    group, bits = (
        default if settings.get(key) is None else settings[key]
        for key, default in zip(("group_size", "bits"), DEFAULTS[mode], strict=True)
    )
    if not all(type(n) is int and n > 0 for n in (group, bits)):  # a group of 0 would end MLX's process
        raise ArtifactError(f"config.json: quantization says {str(own)[:80]} of it: expected whole numbers above 0")
    return mode, bits, group


def _inferred(tensor: TensorSpec, weight: Stored, scales: Stored) -> tuple[str, int, int]:
    """Mode, bits and group that the shapes show: mlx_lm.utils.infer_quant_config."""
    columns, width, groups = tensor.shape[-1], (weight.shape or (0,))[-1], (scales.shape or (0,))[-1]
    if not groups:
        raise ArtifactError(f"its scales are {list(scales.shape)}")
    bits, group = width * 32 // columns, columns // groups
    if scales.dtype != "U8":
        return "affine", bits, group
    if (bits, group) not in ONE_BYTE_SCALES:
        raise ArtifactError(f"{bits} bits in groups of {group} with scales of one byte is no mode of MLX")
    return ONE_BYTE_SCALES[bits, group], bits, group
