"""A local checkpoint folder: config.json, safetensors in one file or many, read lazily in blocks of rows."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from dataclasses import replace
from pathlib import Path, PurePosixPath
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import CheckpointError, listed
from pipeline.files import cached_sha256, read_json, read_object, reading
from pipeline.source.safetensors import BYTES, DTYPES, Stored, pread, read_header, widened
from pipeline.types import ModelSpec, SourceIdentity, TensorSpec

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""What readers of a folder take a tokenizer, its template and its stop tokens from. GGUF reads a few of them, an MLX
folder holds them all.
"""

SIDE_FILES = ("config.json", *TOKENIZER_FILES)
PICKLES = {".bin", ".pt", ".pth", ".ckpt"}

SCALES = "weight_scale_inv"
"""How the names of FP8 blocks' scales end: one float per 128 x 128 weights."""

NO_FP8 = "They are not read yet: give the bf16 checkpoint that it was made from."


class Checkpoint:
    """Tensors by name, opened once and read by `pread`: memory does not grow with the checkpoint. Use as a context
    manager. `name` and `revision` are a Hub snapshot's, whose folder bears a commit; else the folder's name is taken.

    Raises:
        CheckpointError: not a folder with config.json and safetensors; an already quantized source; an absent shard.
    """

    def __init__(self, path: Path, name: str | None = None, revision: str | None = None) -> None:
        with reading(path, CheckpointError):
            is_folder = path.is_dir()
        if not is_folder:
            raise CheckpointError(
                f"{path} is not a folder. Give the folder that holds config.json and model.safetensors."
            )
        self.path = path
        folder_name = os.fsencode(path.resolve().name).decode(errors="replace")  # it may be no UTF-8
        self.name = folder_name if name is None else name
        self.revision = revision
        self.config: dict[str, Any] = read_object(path / "config.json", CheckpointError)
        refuse_quantized(path, self.config)
        with reading(path, CheckpointError):
            names = {file.name for file in path.iterdir() if file.exists()}
            self.shards = {name: path / name for name in weight_files(path, names, path)}
            self.tensors = _tensors(path, self.shards)
        _refuse_fp8(path, self.tensors)
        self._descriptors: dict[Path, int] = {}

    def __enter__(self) -> Self:
        for shard in self.shards.values():
            with reading(shard, CheckpointError):
                self._descriptors[shard] = os.open(shard, os.O_RDONLY)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self._descriptors.values():
            os.close(descriptor)
        self._descriptors = {}

    def rows(self, name: str, start: int, count: int) -> NDArray[np.float32]:
        """Rows [start, start + count) of a matrix, or a whole vector as one row: float32 [count, columns]."""
        return widened(self.stored_rows(name, start, count))

    def stored_rows(self, name: str, start: int, count: int) -> NDArray[Any]:
        """The same as they are stored: float32, float16, or uint16 for the bits of bfloat16."""
        return self._rows(self.tensors[name], start, count)

    def _rows(self, stored: Stored, start: int, count: int) -> NDArray[Any]:
        width = stored.shape[-1] * BYTES[stored.dtype]
        data = pread(self._descriptors[stored.file], count * width, stored.offset + start * width)
        return np.frombuffer(data, DTYPES[stored.dtype]).reshape(count, stored.shape[-1])

    def tensor(self, name: str) -> NDArray[np.float32]:
        """A whole tensor in its shape."""
        shape = self.tensors[name].shape
        return self.rows(name, 0, int(np.prod(shape[:-1], initial=1))).reshape(shape)

    def typed(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the dtype that each tensor is stored as; `check` comes first."""
        return replace(spec, tensors=tuple(replace(t, dtype=self.tensors[t.name].dtype) for t in spec.tensors))

    def check(self, spec: ModelSpec) -> None:
        """Every tensor of `spec` is here with its shape and a dtype that is read, and nothing else is.

        Raises:
            CheckpointError: listing every problem at once.
        """
        problems = [problem for tensor in spec.tensors for problem in self._problems(tensor)]
        unknown = sorted(self.tensors.keys() - {tensor.name for tensor in spec.tensors})
        if spec.tied and "lm_head.weight" in unknown:
            unknown.remove("lm_head.weight")
            problems += self._head_problems(spec)
        problems += [f"{name}: not a tensor of {spec.model_type}, {list(self.tensors[name].shape)}" for name in unknown]
        if problems:
            raise CheckpointError(
                f"{self.path} is not a whole {spec.model_type} checkpoint:\n{listed(problems)}\n"
                "Nothing is dropped or guessed: fetch the checkpoint again, or take these tensors out of it."
            )

    def _problems(self, tensor: TensorSpec) -> Iterable[str]:
        stored = self.tensors.get(tensor.name)
        if stored is None:
            yield f"{tensor.name}: missing, expected {list(tensor.shape)}"
        elif stored.shape != tensor.shape:
            yield f"{tensor.name}: expected {list(tensor.shape)}, found {list(stored.shape)}"
        elif stored.dtype not in BYTES:
            yield f"{tensor.name}: dtype {stored.dtype} is not read, only {', '.join(BYTES)}"

    def _head_problems(self, spec: ModelSpec) -> Iterable[str]:
        """A tied checkpoint may hold the head as well, where it is the embedding again."""
        head, embedding = self.tensors["lm_head.weight"], self.tensors.get("model.embed_tokens.weight")
        if embedding is None or len(embedding.shape) != 2:
            return  # said of the embedding itself
        readable = {head.dtype, embedding.dtype} <= BYTES.keys()
        if head.shape != embedding.shape or (readable and not self._same(head, embedding)):
            yield "lm_head.weight: differs from model.embed_tokens.weight, but config.json says tie_word_embeddings"

    def _same(self, a: Stored, b: Stored) -> bool:
        step = max(1, (1 << 20) // a.shape[1])
        for start in range(0, a.shape[0], step):
            count = min(step, a.shape[0] - start)
            if not np.array_equal(widened(self._rows(a, start, count)), widened(self._rows(b, start, count))):
                return False
        return True

    def identity(self) -> SourceIdentity:
        """Name and sha256 of every file that decides an artifact, without machine paths."""
        files = [
            *self.shards.values(),
            *(self.path / name for name in (*SIDE_FILES, INDEX) if (self.path / name).exists()),
        ]
        digests = cached_sha256(sorted(set(files)))
        named = {path.relative_to(self.path).as_posix(): digest for path, digest in digests.items()}
        return SourceIdentity(self.name, self.revision, named)


def refuse_quantized(path: Path | str, config: dict[str, Any]) -> None:
    """GPTQ, AWQ, bitsandbytes, FP8 … say `quantization_config`, MLX says `quantization`.

    Raises:
        CheckpointError: the source `path` is quantized.
    """
    for key in ("quantization_config", "quantization"):
        if found := config.get(key):
            method = found.get("quant_method", "MLX") if isinstance(found, dict) else found
            if method == "fp8":
                raise CheckpointError(f"{path}: its weights are FP8 blocks (config.json: {key}, fp8). {NO_FP8}")
            raise CheckpointError(
                f"{path} is already quantized (config.json: {key}, {method}). Quantizing twice loses quality unseen: "
                "give the original bf16, f16 or f32 checkpoint."
            )


def _refuse_fp8(path: Path, tensors: dict[str, Stored]) -> None:
    """FP8 blocks that config.json does not speak of: they show in the tensors themselves."""
    found = [name for name, stored in tensors.items() if stored.dtype.startswith("F8_") or name.endswith(SCALES)]
    if found:
        raise CheckpointError(f"{path}: its weights are FP8 blocks ({_some(sorted(found))}). {NO_FP8}")


def weight_files(folder: Path, names: Collection[str], source: Path | str) -> list[str]:
    """The weight files of a `source` whose files are `names` and whose index, where it has one, lies in `folder`.

    Raises:
        CheckpointError: no safetensors, two sets of them, or an index that leaves the folder.
    """
    if INDEX not in names:
        if SINGLE in names:
            return [SINGLE]
        pickled = sorted(name for name in names if PurePosixPath(name).suffix in PICKLES)
        hint = f" It holds {_some(pickled)}: pickles are not read." if pickled else ""
        raise CheckpointError(f"{source} holds neither {SINGLE} nor {INDEX}.{hint} Save it as safetensors.")
    shards = sorted(set(_weight_map(folder / INDEX).values()))
    if SINGLE in names and SINGLE not in shards:
        raise CheckpointError(
            f"{source} holds both {SINGLE} and {INDEX} of other files: two sets of weights. Move one of them away."
        )
    for name in shards:
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            raise CheckpointError(
                f"{folder / INDEX} names {name!r}, which lies outside the checkpoint folder. Do not trust this file."
            )
    return shards


def _weight_map(index: Path) -> dict[str, str]:
    raw = read_json(index, CheckpointError)
    weight_map = raw.get("weight_map") if isinstance(raw, dict) else None
    if not isinstance(weight_map, dict) or not weight_map or not all(isinstance(v, str) for v in weight_map.values()):
        raise CheckpointError(f"{index} has no weight_map. Fetch it again.")
    return weight_map


def _tensors(path: Path, shards: dict[str, Path]) -> dict[str, Stored]:
    index = path / INDEX
    promised = _weight_map(index) if index.exists() else {}
    present = {name: read_header(shard) for name, shard in shards.items() if shard.exists()}
    problems = [
        f"{shard} is absent; {INDEX} puts {_some([n for n, s in promised.items() if s == shard])} there"
        for shard in shards.keys() - present.keys()
    ]
    tensors: dict[str, Stored] = {}
    for shard, header in present.items():
        problems += [
            f"{name} is in two shards, {tensors[name].file.relative_to(path)} and {shard}"
            for name in header.keys() & tensors.keys()
        ]
        tensors |= header
    problems += [
        f"{name} is in no shard; {INDEX} puts it in {shard}"
        for name, shard in promised.items()
        if shard in present and name not in present[shard]
    ]
    if problems:
        raise CheckpointError(f"{path} is incomplete:\n{listed(sorted(problems))}\nFetch the checkpoint again.")
    return tensors


def _some(names: list[str]) -> str:
    return f"{', '.join(names[:3])} and {len(names) - 3} more" if len(names) > 3 else ", ".join(names)
