"""MLX folders that others made: what they are, and whether they are of the checkpoint they are to be compared with."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from pipeline.errors import ArtifactError, listed, some
from pipeline.files import cached_sha256
from pipeline.formats import bits_per_weight, effective_types
from pipeline.formats.mlx import folder, reader
from pipeline.formats.mlx.arguments import YARN
from pipeline.formats.mlx.arrange import arranged, dropped
from pipeline.formats.mlx.reader import MlxFolder
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import Artifact, ModelSpec, Rope

PATTERNS = ("*.json", reader.WEIGHTS, "tokenizer.model", "*.tiktoken", "*.txt", "*.jsonl", "*.jinja")
"""Files that mlx-lm fetches of a repository (utils.py: DEFAULT_ALLOW_PATTERNS), without code."""

OURS = "artifact.json"  # what quantgate writes beside an artifact is none of its files
READ_OTHERWISE = {"tie_word_embeddings", "rope_theta", "rope scaling", "rotated dims of a head", "norm_topk_prob"}

FLOAT_SCHEMES = {"BF16": "bf16", "F16": "fp16", "F32": "fp32"}


def hashes(path: Path) -> dict[str, str]:
    """sha256 by name of every file that mlx-lm reads of a folder; computed once for a file that does not change.

    Raises:
        ArtifactError: no MLX folder, or a file is absent.
    """
    reader.weight_files(path)
    return {file.name: digest for file, digest in cached_sha256(_files(path)).items()}


def describe(path: Path, checkpoint: Checkpoint | None) -> Artifact:
    """The artifact that an MLX folder is; `scheme` is what its config.json says of it.

    Raises:
        ArtifactError: no folder that mlx-lm loads, or of another model than the checkpoint: every difference in
            vocabulary, architecture and shapes is listed.
    """
    found = reader.read(path)
    if not (path / "tokenizer.json").is_file():
        raise ArtifactError(f"{path} holds no tokenizer.json, which mlx-lm needs. Fetch it from the same repository.")
    spec = None if checkpoint is None else spec_of(checkpoint.config, checkpoint.shapes)
    if checkpoint is not None and spec is not None:
        _check(found, checkpoint, spec)
    planned = [tensor.planned for tensor in found.tensors.values()]
    stored, files = folder.hashes(found.stored), _files(path)
    return Artifact(
        format="mlx",
        scheme=_scheme(found),
        files=hashes(path),
        tensors_sha256=stored.whole,
        size_bytes=sum(file.stat().st_size for file in found.files),
        folder_bytes=sum(file.stat().st_size for file in files),
        weights=sum(p.tensor.weights for p in planned),
        bits_per_weight=bits_per_weight(planned),
        effective_types=effective_types(planned),
        source=None if checkpoint is None else checkpoint.identity(),
        tools={},
        platform="made elsewhere",
        tensors=stored.each,
        path=str(path),
        dropped=() if spec is None else dropped(spec),
    )


def _files(path: Path) -> list[Path]:
    """By name, all that decides what runs."""
    found = {file for pattern in PATTERNS for file in path.glob(pattern) if file.is_file()}
    return sorted(file for file in found if file.name != OURS and not file.name.startswith("."))


def _check(found: MlxFolder, checkpoint: Checkpoint, spec: ModelSpec) -> None:
    if found.spec.model_type != spec.model_type:  # the tensors and keys of another architecture bear other names
        problems = [f"model_type: expected {spec.model_type}, found {found.spec.model_type}"]
    else:
        problems = [*_settings(found.spec, spec), *_shapes(found, spec), *_vocabulary(found, spec, checkpoint)]
    if problems:
        raise ArtifactError(
            f"{found.path} is not of the checkpoint {checkpoint.name}:\n{listed(problems)}\n"
            "Figures on its tokens would mean nothing: compare it with the checkpoint that it was made from."
        )


def _settings(found: ModelSpec, spec: ModelSpec) -> Iterator[str]:
    """What shapes do not show, as mlx-lm reads it: weights are right or wrong by these as well."""
    used, norm, rotated, delta = zip(_of_parts(spec), _of_parts(found), strict=True)
    for key, ours, theirs in (
        ("num_hidden_layers", spec.n_layers, found.n_layers),
        ("num_attention_heads", spec.n_heads, found.n_heads),
        ("num_key_value_heads", spec.n_kv_heads, found.n_kv_heads),
        ("tie_word_embeddings", spec.tied, found.tied),
        ("rms_norm_eps", spec.norm_eps, found.norm_eps),
        ("rope_theta", spec.rope.theta, found.rope.theta),
        ("rope scaling", _scaling(spec.rope), _scaling(found.rope)),
        ("rotated dims of a head", *rotated),
        ("num_experts_per_tok", *used),
        ("norm_topk_prob", *norm),
        ("sizes of DeltaNets", *delta),
    ):
        if ours != theirs:
            reader_of_it = " as mlx-lm reads config.json" if key in READ_OTHERWISE else ""
            yield f"{key}: expected {ours}, found {theirs}{reader_of_it}"


def _of_parts(spec: ModelSpec) -> tuple[int | None, bool | None, int | None, str | None]:
    """Experts used and whether their weights are scaled, rotated dims, and DeltaNets; None where there are none."""
    experts, delta = spec.experts, spec.delta
    used, norm = (None, None) if experts is None else (experts.used, experts.norm_topk)
    keys_and_values = "{0.k_heads} x {0.k_dim} of keys, {0.v_heads} x {0.v_dim} of values"
    return used, norm, spec.rope.dims, None if delta is None else keys_and_values.format(delta)


def _scaling(rope: Rope) -> str:
    """A scaling in the numbers that decide it, defaults written out."""
    if rope.scaling != "yarn":
        return "none" if rope.scaling is None else f"{rope.scaling} {rope.factor:g}"
    attention = rope.attention_factor or 0.1 * math.log(rope.factor) + 1
    fast, slow = rope.beta_fast or YARN["beta_fast"], rope.beta_slow or YARN["beta_slow"]
    return f"yarn {rope.factor:g} of {rope.original_context}, attention {attention:.6g}, beta {fast:g} to {slow:g}"


def _shapes(found: MlxFolder, spec: ModelSpec) -> Iterator[str]:
    expected = {tensor.name: tensor.shape for tensor in arranged(spec)}
    theirs = {tensor.name: tensor.shape for tensor in arranged(found.spec)}
    problems = [
        f"{name}: missing, expected {list(shape)}"
        if name not in theirs
        else f"{name}: expected {list(shape)}, found {list(theirs[name])}"
        for name, shape in expected.items()
        if theirs.get(name) != shape
    ]
    problems += [f"{name}: not a tensor of the checkpoint" for name in theirs.keys() - expected.keys()]
    yield from some(sorted(problems), "tensors")


def _vocabulary(found: MlxFolder, spec: ModelSpec, checkpoint: Checkpoint) -> Iterator[str]:
    theirs, _ = Tokenizer(found.path).vocabulary(found.spec.vocab_size)
    yield from some(Tokenizer(checkpoint.path).differing(theirs, spec.vocab_size), "tokens")


def _scheme(found: MlxFolder) -> str:
    """As schemes.PACKINGS names it, of what config.json says of all; the float type of most weights where it says none.

    Some tensors may be packed otherwise: effective_types has them all.
    """
    match found.config.get("quantization"):
        case {"group_size": group, "bits": bits, **rest}:
            mode = rest.get("mode", "affine")
            return f"int{bits}-g{group}" if mode == "affine" else str(mode)
    most = next(iter(effective_types([tensor.planned for tensor in found.tensors.values()])))
    return FLOAT_SCHEMES[most]
