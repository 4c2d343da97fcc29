"""GGUF files that others made: what they are, and whether they are of the checkpoint they are to be compared with."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path

from pipeline.errors import ArtifactError, listed, some
from pipeline.files import cached_sha256
from pipeline.formats import bits_per_weight, effective_types
from pipeline.formats.gguf import arrange, engine, importance, reader
from pipeline.formats.gguf.architecture import architecture
from pipeline.formats.gguf.reader import GgufFile
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import Artifact, Dropped, ModelSpec, Planned, TensorSpec

NOT_COMPUTED = {"I8", "I16", "I32", "I64", "F64", "Q8_1", "Q8_K"}
"""ggml types that no matrix of a model can have: llama.cpp loads it and aborts the process at its first product."""


def hashes(path: Path) -> dict[str, str]:
    """sha256 by name of the file, or of every file of its split set; computed once for a file that does not change.

    Raises:
        ArtifactError: a file is absent.
    """
    return {file.name: digest for file, digest in cached_sha256(list(reader.files_of(path))).items()}


def describe(path: Path, checkpoint: Checkpoint | None) -> Artifact:
    """The artifact that a GGUF file is, or a split set of them; `scheme` is what it says of itself.

    Raises:
        ArtifactError: no GGUF file, of types that do not run, or of another model than the checkpoint: every
            difference in vocabulary, architecture and shapes is listed.
    """
    found = reader.read(path)
    _check_types(found, path)
    spec = None if checkpoint is None else spec_of(checkpoint.config, checkpoint.shapes)
    if checkpoint is not None and spec is not None:
        _check(found, path, checkpoint, spec)
    tensors = [
        Planned(TensorSpec(tensor.name, "", None, tensor.shape), tensor.encoding, "")
        for tensor in found.tensors.values()
    ]
    stored = reader.hashes(found.tensors.values())
    size = sum(file.stat().st_size for file in found.files)
    return Artifact(
        format="gguf",
        scheme=_scheme(found),
        files=hashes(path),
        tensors_sha256=stored.whole,
        size_bytes=size,
        folder_bytes=size,
        weights=sum(p.tensor.weights for p in tensors),
        bits_per_weight=bits_per_weight(tensors),
        effective_types=effective_types(tensors),
        source=None if checkpoint is None else checkpoint.identity(),
        tools={},
        platform="made elsewhere",
        tensors=stored.each,
        path=str(path),
        dropped=() if spec is None else _dropped(found, spec),
        imatrix=importance.said(found.keys),
    )


def _check_types(found: GgufFile, path: Path) -> None:
    """llama.cpp has norms and biases in F32 only, and some types are none of matrices: it would abort the process."""
    problems = [
        f"{tensor.name} is {tensor.encoding.name}"
        for tensor in found.tensors.values()
        if tensor.encoding.name in NOT_COMPUTED or (len(tensor.shape) == 1 and tensor.encoding.name != "F32")
    ]
    if problems:
        raise ArtifactError(
            f"{path} cannot be run:\n{listed(some(problems, 'tensors'))}\n"
            "llama.cpp computes with F32 vectors, and matrices of floats or quantized weights. Make the file again."
        )


def _check(found: GgufFile, path: Path, checkpoint: Checkpoint, spec: ModelSpec) -> None:
    problems = [*_architecture(found, spec)]
    if not problems:  # the tensors and keys of another architecture bear other names
        problems = [*_sizes(found, spec), *_shapes(found, spec), *_vocabulary(found, spec, checkpoint)]
    if problems:
        raise ArtifactError(
            f"{path} is not of the checkpoint {checkpoint.name}:\n{listed(problems)}\n"
            "Figures on its tokens would mean nothing: compare it with the checkpoint that it was made from."
        )


def _architecture(found: GgufFile, spec: ModelSpec) -> Iterator[str]:
    arch = found.keys.get("general.architecture")
    if arch != architecture(spec):
        yield f"architecture: expected {architecture(spec)}, found {arch}"


def _mtp_layers(found: GgufFile, spec: ModelSpec) -> int:
    """The file's own: others may write those of a checkpoint or not, and no logits depend on them."""
    count = found.keys.get(f"{architecture(spec)}.nextn_predict_layers", 0)
    return count if isinstance(count, int) else 0


def _dropped(found: GgufFile, spec: ModelSpec) -> tuple[Dropped, ...]:
    if _mtp_layers(found, spec) or not spec.mtp:
        return spec.dropped
    return (*spec.dropped, spec.dropped_mtp("the file was made without them"))


def _sizes(found: GgufFile, spec: ModelSpec) -> Iterator[str]:
    """What shapes do not show: heads, the experts used, and layers, of which llama.cpp trusts the key (0 would abort
    it).
    """
    more = [] if spec.experts is None else [("expert_used_count", spec.experts.used, None)]
    if spec.delta is not None:
        more += [("ssm.group_count", spec.delta.k_heads, None), ("ssm.time_step_rank", spec.delta.v_heads, None)]
    for key, expected, default in (
        ("block_count", spec.n_layers + _mtp_layers(found, spec), None),
        ("attention.head_count", spec.n_heads, None),
        ("attention.head_count_kv", spec.n_kv_heads, spec.n_heads),
        *more,
    ):
        size = found.keys.get(f"{architecture(spec)}.{key}", default)
        if size != expected:
            yield f"{key}: expected {expected}, found {size}"


def _shapes(found: GgufFile, spec: ModelSpec) -> Iterator[str]:
    parts = {part.name: part.tensor for part in arrange.arranged(spec)}
    expected = {
        name: tensor.shape for name, tensor in parts.items() if tensor.layer is None or tensor.layer < spec.n_layers
    }
    if spec.tied and "output.weight" in found.tensors:  # some converters write the head of a tied checkpoint as well
        expected["output.weight"] = expected["token_embd.weight"]
    guessing = range(spec.n_layers, spec.n_layers + _mtp_layers(found, spec))
    for name in found.tensors:
        if any(name.startswith(f"blk.{layer}.") for layer in guessing):
            expected[name] = parts[name].shape if name in parts else found.tensors[name].shape
    problems = [
        f"{name}: missing, expected {list(shape)}"
        if name not in found.tensors
        else f"{name}: expected {list(shape)}, found {list(found.tensors[name].shape)}"
        for name, shape in expected.items()
        if name not in found.tensors or found.tensors[name].shape != shape
    ]
    problems += [f"{name}: not a tensor of {spec.model_type}" for name in found.tensors.keys() - expected.keys()]
    yield from some(sorted(problems), "tensors")


def _vocabulary(found: GgufFile, spec: ModelSpec, checkpoint: Checkpoint) -> Iterator[str]:
    if len(found.tokens) != spec.vocab_size:
        yield f"vocabulary: expected {spec.vocab_size} tokens, found {len(found.tokens)}"
    yield from some(Tokenizer(checkpoint.path).differing(found.tokens, spec.vocab_size), "tokens")


def _scheme(found: GgufFile) -> str:
    """The name of the file's own llama_ftype; mixes of others' making mostly bear the name of their base."""
    kind = found.keys.get("general.file_type")
    return _file_types().get(kind, "unknown") if isinstance(kind, int) else "unknown"


@cache
def _file_types() -> dict[int, str]:
    prefixes = ("LLAMA_FTYPE_MOSTLY_", "LLAMA_FTYPE_ALL_")
    return {
        value: name.removeprefix(prefixes[0]).removeprefix(prefixes[1]).lower()
        for name, value in vars(engine.llama()).items()
        if name.startswith(prefixes)
    }
