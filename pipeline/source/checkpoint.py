"""A local checkpoint folder: config.json, safetensors in one file or many, read lazily in blocks of rows."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import CheckpointError, PipelineError, gathered, listed
from pipeline.files import cached_sha256, read_object, reading
from pipeline.source import fp8
from pipeline.source.safetensors import BYTES, DTYPES, SIZES, Stored, pread, widened
from pipeline.source.shards import INDEX, promised, stored_tensors, weight_files
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import ModelSpec, SourceIdentity, Span, TensorSpec

TOKENIZER_FILES = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json"),
    *("merges.txt", "chat_template.jinja", "chat_template.json", "generation_config.json"),
)
"""What readers of a folder take a tokenizer, its template and its stop tokens from. GGUF reads a few of them, an MLX
folder holds them all.
"""

SIDE_FILES = ("config.json", *TOKENIZER_FILES)

HEAD = "lm_head.weight"

FEW = 40
"""Up to so many tensors are told one by one: of another kind or number of layers, a checkpoint has hundreds."""

READ = f"{', '.join(BYTES)}, and {fp8.DTYPE} in blocks"


class Checkpoint:
    """Tensors by name, opened once and read by `pread`: memory does not grow with the checkpoint. Use as a context
    manager. `name` and `revision` are a Hub snapshot's, whose folder bears a commit; else the folder's name is taken.

    With `problems`, what is wrong goes there instead of being raised, as far as one can go on, and is kept as the
    Checkpoint's own `problems`: to look at, not to read.

    Raises:
        CheckpointError: not a folder with config.json and safetensors; an already quantized source; an absent shard.
    """

    def __init__(
        self,
        path: Path,
        name: str | None = None,
        revision: str | None = None,
        problems: list[PipelineError] | None = None,
    ) -> None:
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
        self.shards: dict[str, Path] = {}
        self.tensors: dict[str, Stored] = {}
        self.absent: set[str] = set()  # names of tensors that the index has and no shard
        quantization = None
        with gathered(problems):
            refuse_quantized(path, self.config)
            quantization = next(_quantizations(self.config), None)
        with gathered(problems), reading(path, CheckpointError):
            names = {file.name for file in path.iterdir() if file.exists()}
            self.shards = {name: path / name for name in weight_files(path, names, path)}
            self.tensors = stored_tensors(path, self.shards, problems)
        with gathered(problems):
            _check_fp8(path, quantization, self.tensors)
        if problems:
            with suppress(PipelineError):  # which is among them
                self.absent = promised(path).keys() - self.tensors.keys()
            opened = {stored.file for stored in self.tensors.values()}
            self.shards = {name: shard for name, shard in self.shards.items() if shard in opened}
        self.problems = tuple(problems or ())
        self._block = fp8.block_of(quantization[1] if quantization else None)
        self._scales: dict[str, NDArray[np.float32]] = {}  # of FP8 tensors, as far as they were read
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

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of every stored tensor but FP8 tensors' scales, by name: what `spec_of` takes the layout from. Of an absent
        tensor (0), which has no weights: it tells the layout by its name.
        """
        return self._stored_shapes() | dict.fromkeys(self.absent, (0,))

    def _stored_shapes(self) -> dict[str, tuple[int, ...]]:
        """Of what is there, without FP8 tensors' scales."""
        scales = {f"{name}{fp8.SUFFIX}" for name, stored in self.tensors.items() if stored.dtype == fp8.DTYPE}
        return {name: stored.shape for name, stored in self.tensors.items() if name not in scales}

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """Its own.

        Raises:
            TokenizerError: as Tokenizer.
        """
        return Tokenizer(self.path)

    def rows(self, tensor: TensorSpec, start: int, count: int) -> NDArray[np.float32]:
        """Rows [start, start + count) of a matrix, or a whole vector as one row: float32 [count, columns]."""
        return widened(self.stored_rows(tensor, start, count))

    def stored_rows(self, tensor: TensorSpec, start: int, count: int) -> NDArray[Any]:
        """The same as they are stored: float32, float16, or uint16 for the bits of bfloat16; float32 where they are
        FP8, or the spans of a tensor are of several dtypes.
        """
        spans = tensor.taken([(start, count)]) or (replace(tensor.stored[0], count=0),)
        parts = [self._rows(span.name, span.start, span.count) for span in _joined(spans)]
        if len(parts) == 1:
            return parts[0]
        if len({part.dtype for part in parts}) > 1:
            parts = [widened(part) for part in parts]
        return np.concatenate(parts)

    def _rows(self, name: str, start: int, count: int) -> NDArray[Any]:
        stored = self.tensors[name]
        width = stored.shape[-1] * SIZES[stored.dtype]
        data = pread(self._descriptors[stored.file], count * width, stored.offset + start * width)
        found = np.frombuffer(data, DTYPES[stored.dtype]).reshape(count, stored.shape[-1])
        if stored.dtype == fp8.DTYPE:
            return fp8.decoded(found, start, stored.shape[-2], self._scales_of(name), self._block)
        return found

    def _scales_of(self, name: str) -> NDArray[np.float32]:
        """Of an FP8 tensor, float32 [matrices, block rows, block columns]: few, and read once."""
        if name not in self._scales:
            companion = f"{name}{fp8.SUFFIX}"
            shape = self.tensors[companion].shape
            scales = widened(self._rows(companion, 0, prod(shape[:-1])))
            self._scales[name] = scales.reshape(-1, *shape[-2:])
        return self._scales[name]

    def tensor(self, tensor: TensorSpec) -> NDArray[np.float32]:
        """A whole tensor in its shape."""
        return self.rows(tensor, 0, tensor.rows).reshape(tensor.shape)

    def typed(self, spec: ModelSpec) -> ModelSpec:
        """`spec` with the dtype that each tensor is read as; `check` comes first."""

        def typed(tensor: TensorSpec) -> TensorSpec:
            dtypes = {self.tensors[span.name].dtype for span in tensor.stored}
            return replace(tensor, dtype=dtypes.pop() if len(dtypes) == 1 and dtypes <= BYTES.keys() else "F32")

        return replace(spec, tensors=tuple(map(typed, spec.tensors)), mtp=tuple(map(typed, spec.mtp)))

    def check(self, spec: ModelSpec) -> None:
        """Every tensor of `spec` is here with its shape and a dtype that is read, and nothing else is. Where no file
        could be read, `problems` have that, and it is not said of each tensor again.

        Raises:
            CheckpointError: listing every problem at once.
        """
        if self.problems and not self.tensors:
            return
        spans = [span for tensor in (*spec.tensors, *spec.mtp) for span in tensor.stored]
        shapes = {span.name: span.shape for span in spans}
        problems = [problem for name, shape in shapes.items() for problem in self._problems(name, shape)]
        dropped = {name for part in spec.dropped for name in part.tensors}
        scales = {f"{name}{fp8.SUFFIX}" for name in self.absent}  # of tensors that are absent with their shard
        unknown = sorted(self._stored_shapes().keys() - shapes.keys() - dropped - scales)
        if spec.tied and (head := next((name for name in unknown if name.endswith(HEAD)), None)) is not None:
            unknown.remove(head)
            problems += self._head_problems(head, spans[0].name)
        problems += (self._unknown(name, spec.model_type) for name in unknown)
        if problems:
            raise CheckpointError(
                f"{self.path} is not a whole {spec.model_type} checkpoint:\n{listed(_grouped(problems))}\n"
                "Nothing is dropped or guessed: fetch the checkpoint again, or take these tensors out of it."
            )

    def _problems(self, name: str, shape: tuple[int, ...]) -> Iterable[str]:
        stored = self.tensors.get(name)
        if name in self.absent:
            return  # with its shard
        if stored is None:
            yield f"{name}: missing, expected {list(shape)}"
        elif stored.shape != shape:
            yield f"{name}: expected {list(shape)}, found {list(stored.shape)}"
        elif stored.dtype == fp8.DTYPE:
            yield from self._scale_problems(name, shape)
        elif stored.dtype not in BYTES:
            yield f"{name}: dtype {stored.dtype} is not read, only {READ}"

    def _scale_problems(self, name: str, shape: tuple[int, ...]) -> Iterable[str]:
        companion, expected = f"{name}{fp8.SUFFIX}", fp8.scales_shape(shape, self._block)
        scales = self.tensors.get(companion)
        if expected is None:
            yield f"{name}: FP8 is read of matrices only, found {list(shape)}"
        elif companion in self.absent:
            return  # with its shard
        elif scales is None:
            yield f"{name}: FP8 without scales of its blocks: {companion} is missing, expected {list(expected)}"
        elif scales.shape != expected:
            blocks = " x ".join(map(str, self._block))
            yield f"{companion}: expected {list(expected)}, by blocks of {blocks}, found {list(scales.shape)}"
        elif scales.dtype not in BYTES:
            yield f"{companion}: dtype {scales.dtype} is not read of scales, only {', '.join(BYTES)}"

    def _unknown(self, name: str, model_type: str) -> str:
        weight = name.removesuffix(fp8.SUFFIX)
        if weight == name:
            return f"{name}: not a tensor of {model_type}, {list(self.tensors[name].shape)}"
        found = f"is {self.tensors[weight].dtype}" if weight in self.tensors else "is missing"
        return f"{name}: scales of {weight}, which {found}, expected {fp8.DTYPE}"

    def _head_problems(self, head_name: str, embedding_name: str) -> Iterable[str]:
        """A tied checkpoint may hold the head as well, where it is the embedding again."""
        head, embedding = self.tensors[head_name], self.tensors.get(embedding_name)
        if embedding is None or len(embedding.shape) != 2:
            return  # said of the embedding itself
        shape = embedding.shape
        unread = [*self._problems(embedding_name, shape), *self._problems(head_name, head.shape)]
        if head.shape != shape or (not unread and not self._same(head_name, embedding_name, shape)):
            yield f"{head_name}: differs from {embedding_name}, but config.json says tie_word_embeddings"

    def _same(self, a: str, b: str, shape: tuple[int, ...]) -> bool:
        step = max(1, (1 << 20) // shape[1])
        for start in range(0, shape[0], step):
            count = min(step, shape[0] - start)
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


def _grouped(problems: Sequence[str]) -> list[str]:
    """'NAME: what is wrong', or of many problems those together that only differ in the numbers of names."""
    if len(problems) <= FEW:
        return [*problems]
    groups: dict[tuple[str, str], list[str]] = {}
    for problem in problems:
        name, _, what = problem.partition(": ")
        key = re.sub(r"\d+", "N", name), re.sub(r"(?<=\.)\d+(?=\.)", "N", what)
        groups.setdefault(key, []).append(problem)
    return [
        f"{name}, {len(alike)} tensors: {what}" if len(alike) > 1 else alike[0]
        for (name, what), alike in groups.items()
    ]


def _joined(spans: Iterable[Span]) -> list[Span]:
    """With what lies one behind the other in a stored tensor as one span, which is one read."""
    joined: list[Span] = []
    for span in spans:
        last = joined[-1] if joined else None
        if last is not None and last.name == span.name and last.start + last.count == span.start:
            joined[-1] = replace(last, count=last.count + span.count)
        else:
            joined.append(span)
    return joined


def refuse_quantized(path: Path | str, config: dict[str, Any]) -> None:
    """GPTQ, AWQ, bitsandbytes, FP8 … say `quantization_config`, MLX says `quantization`. FP8 in blocks is read.

    Raises:
        CheckpointError: the source `path` is quantized in a way that is not read.
    """
    for key, found in _quantizations(config):
        method = found.get("quant_method", "MLX") if isinstance(found, dict) else found
        if method != "fp8":
            raise CheckpointError(
                f"{path} is already quantized (config.json: {key}, {method}). Quantizing twice loses quality unseen: "
                "give the original bf16, f16 or f32 checkpoint."
            )
        problem = fp8.problem(found) if isinstance(found, dict) else "it has no settings"
        if problem is not None:
            raise CheckpointError(
                f"{path}: its FP8 weights are not read (config.json: {key}, fp8): {problem}. "
                "Give the bf16 checkpoint that it was made from."
            )


def _quantizations(config: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What config.json says of quantization, and where: of a larger model, its text part may say it."""
    for at, part in (("", config), ("text_config.", config.get("text_config"))):
        if isinstance(part, dict):
            yield from ((at + key, part[key]) for key in ("quantization_config", "quantization") if part.get(key))


def _check_fp8(path: Path, quantization: tuple[str, Any] | None, tensors: Mapping[str, Stored]) -> None:
    """Refuse FP8 that config.json speaks of where no tensor is of it."""
    if quantization is not None and tensors and all(stored.dtype != fp8.DTYPE for stored in tensors.values()):
        raise CheckpointError(
            f"{path}: config.json says {quantization[0]}, fp8, but no tensor is {fp8.DTYPE}. Fetch the checkpoint "
            "again, or take this out of its config.json if the weights were widened."
        )
