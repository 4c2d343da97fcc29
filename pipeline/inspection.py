"""What a checkpoint is and what every scheme would make of it, before a byte is written."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError, PipelineError, QuantizationError, gathered, suggestion
from pipeline.formats import FORMATS, IMATRIX_FORMAT, bits_per_weight, effective_types, room
from pipeline.models import spec_of
from pipeline.models.numbers import cache_bytes, kv_bytes, numbers
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hub import open_checkpoint
from pipeline.types import Dropped, ModelSpec, Options, Planned

CHECKPOINT = "checkpoint"
"""Beside the formats: who refuses what none of them takes."""

ALL = "all"
"""In place of a scheme: those of a format, or all."""

KV_TYPES = ("f16", "q8_0", "q4_0")
"""Types of a KV cache that are shown; only llama.cpp has others than f16."""


def inspect(
    checkpoint_name: str | Path,
    scheme: str | None = None,
    revision: str | None = None,
    types: Mapping[str, str] | None = None,
    imatrix: Path | None = None,
) -> dict[str, Any]:
    """Architecture, problems, the weight and plan of every scheme, and the plan of one, with types of its own or
    without. Weights are not read.

    `scheme` is 'gguf/q8_0', or a name that only one format has. `imatrix` is the file of an importance matrix, by whose
    tensors GGUF schemes are planned, as `convert` does; one that cannot be used is a problem, and they are planned
    without. Where config.json cannot be understood, its problems and those of the files are all there is.

    Raises:
        PipelineError: no folder with a config.json, or a scheme that does not exist, or that this checkpoint cannot
            have.
    """
    problems: dict[str, list[PipelineError]] = {CHECKPOINT: [], **{name: [] for name in FORMATS}}
    with open_checkpoint(checkpoint_name, revision, problems[CHECKPOINT]) as checkpoint:
        spec = given = None
        with gathered(problems[CHECKPOINT]):
            spec = spec_of(checkpoint.config, checkpoint.shapes)
        if spec is None:
            _check_tokenizer(checkpoint, problems[CHECKPOINT])
        else:
            spec = _checked(checkpoint, spec, problems)
        if imatrix is not None:
            with gathered(problems[IMATRIX_FORMAT]):
                given = _given(imatrix, spec)
        found = {
            "checkpoint": checkpoint.name,
            "dtypes": sorted({t.dtype for t in checkpoint.tensors.values()}),
            "imatrix": _imatrix(given),
        }
    if spec is None:
        nothing = dict.fromkeys(("architecture", "numbers", "weights", "tensors", "plan"))
        return {**found, **nothing, "dropped": [], "problems": _texts(problems), "schemes": {}}
    names = given.values if given else None
    schemes = {
        f"{format_name}/{name}": _outcome(spec, format_name, name, names)
        for format_name in FORMATS
        for name in room(format_name, "schemes").SCHEMES
    }
    return {
        **found,
        "architecture": _architecture(spec),
        "numbers": _numbers(spec),
        "weights": spec.weights,
        "tensors": len(spec.tensors),
        "dropped": _dropped(spec, dict.fromkeys(n.partition("/")[0] for n, s in schemes.items() if "refused" not in s)),
        "problems": _texts(problems),
        "schemes": schemes,
        "plan": None if scheme is None else grouped(_plan(spec, scheme, types or {}, names)),
    }


def formats_of(scheme: str | None) -> tuple[str, ...]:
    """The formats that 'all' and 'FORMAT/all' speak of; of a scheme none.

    Raises:
        ParamsError: no such format.
    """
    format_name, _, name = (scheme or "").rpartition("/")
    if name != ALL:
        return ()
    if format_name:
        room(format_name, "schemes")
    return (format_name,) if format_name else FORMATS


def _checked(checkpoint: Checkpoint, spec: ModelSpec, problems: Mapping[str, list[PipelineError]]) -> ModelSpec:
    """`spec` by what is stored, once `problems` has what `convert` would refuse, by the format that does."""
    own = problems[CHECKPOINT]
    with gathered(own):
        checkpoint.check(spec)
    for name in FORMATS:
        room(name, "write").check(checkpoint, spec, problems[name])
    return spec if own else checkpoint.typed(spec)  # some formats go by what is stored


def _check_tokenizer(checkpoint: Checkpoint, problems: list[PipelineError]) -> None:
    """What every format asks of it, as far as that is known without an architecture."""
    with gathered(problems):
        tokenizer = checkpoint.tokenizer
        with gathered(problems):
            tokenizer.stop_ids(checkpoint.config)


def _texts(problems: Mapping[str, Sequence[PipelineError]]) -> list[str]:
    """Each once; of what some formats take, with the names of those that do not."""
    texts: dict[str, list[str]] = {}
    for name, errors in problems.items():
        for error in errors:
            texts.setdefault(str(error), []).append(name)
    return [
        text if CHECKPOINT in names or names == [*FORMATS] else f"{', '.join(names)}: {text}"
        for text, names in texts.items()
    ]


def _given(file: Path, spec: ModelSpec | None) -> Any:
    """The importance matrix of a file for the model; where that is not known, what is wrong with the file alone is
    raised, and None is all there is.
    """
    if spec is None:
        room(IMATRIX_FORMAT, "imatrix").read(file)
        return None
    return room(IMATRIX_FORMAT, "importance").fitted(file, spec)


def _imatrix(given: Any) -> dict[str, Any] | None:
    if given is None:
        return None
    uses = room(IMATRIX_FORMAT, "imatrix").experts(given.imatrix)
    return {"file": given.name, "tensors": len(given.imatrix.tensors), "experts": [asdict(use) for use in uses]}


def _plan(spec: ModelSpec, scheme: str, types: Mapping[str, str], imatrix: Container[str] | None) -> list[Planned]:
    """The plan of 'gguf/bf16', or of a name that only one format has; of formats that take an importance matrix by the
    names that it has data for.
    """
    format_name, _, name = scheme.rpartition("/")
    format_name = format_name or _format_of(name)
    chosen = room(format_name, "schemes").scheme(name, Options(types))
    more = (imatrix,) if format_name == IMATRIX_FORMAT else ()
    planned: list[Planned] = room(format_name, "plan").plan(spec, chosen, *more)
    return planned


def _format_of(scheme: str) -> str:
    known = {name: [*room(name, "schemes").SCHEMES] for name in FORMATS}
    having = [name for name, schemes in known.items() if scheme in schemes]
    if not having:
        names = [*dict.fromkeys(name for schemes in known.values() for name in schemes)]
        raise ParamsError(f"no format has a scheme {scheme!r}; {suggestion(scheme, names)}")
    if len(having) > 1:
        raise ParamsError(
            f"{scheme} is a scheme of {' and of '.join(having)}: write {' or '.join(f'{f}/{scheme}' for f in having)}."
        )
    return having[0]


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    keys = ("model_type", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size")
    rest = {"context_length": spec.context_length, "rope_theta": spec.rope.theta, "rope_scaling": spec.rope.scaling}
    flags = {"tied": spec.tied, "qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm}
    parts = {"experts": spec.experts, "delta": spec.delta}
    more = {"rope_dims": spec.rope.dims, "linear_layers": len(spec.linear), "mtp_layers": spec.mtp_layers}
    return (
        {key: getattr(spec, key) for key in keys}
        | rest
        | flags
        | {key: None if part is None else asdict(part) for key, part in parts.items()}
        | more
    )


def _numbers(spec: ModelSpec) -> dict[str, Any]:
    """Of the model, and what its whole context takes by the type of the KV cache."""
    encodings = room("gguf", "schemes").ENCODINGS
    caches = {
        kind: {"per_token": kv_bytes(spec, 1, encodings[kind]), "context": cache_bytes(spec, tokens, encodings[kind])}
        for tokens in [spec.context_length]
        for kind in KV_TYPES
    }
    return asdict(numbers(spec)) | {"caches": caches}


def _dropped(spec: ModelSpec, formats: Iterable[str]) -> list[dict[str, Any]]:
    """The checkpoint's parts that artifacts of some or all formats do not have."""
    parts: dict[Dropped, list[str]] = {}
    for name in formats:
        for part in room(name, "arrange").dropped(spec):
            parts.setdefault(part, []).append(name)
    return [
        {
            "part": part.part,
            "reason": part.reason,
            "formats": names,
            "tensors": len(part.tensors),
            "weights": part.weights,
            "names": list(part.tensors),
        }
        for part, names in parts.items()
    ]


def _outcome(spec: ModelSpec, format_name: str, scheme: str, imatrix: Container[str] | None) -> dict[str, Any]:
    """What a scheme would weigh and do, or why the format refuses it for this checkpoint."""
    try:
        planned = _plan(spec, f"{format_name}/{scheme}", {}, imatrix)
    except QuantizationError as error:
        return {"refused": str(error)}
    types = effective_types(planned)
    return {
        "tensor_bytes": sum(p.bytes for p in planned),
        "bits_per_weight": bits_per_weight(planned),
        "effective_types": {name: entry.weights for name, entry in types.items()},
        "plan": grouped(planned),
    }


def grouped(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """The plan with equal rows of several layers put together: role, layers, tensors, shape, type, reason."""
    groups: dict[tuple[str, tuple[int, ...], str, str], list[int | None]] = {}
    for p in planned:
        key = (p.tensor.role, p.tensor.shape, p.encoding.name, p.reason)
        groups.setdefault(key, []).append(p.tensor.layer)
    return [
        {
            "role": role,
            "layers": runs(sorted({layer for layer in layers if layer is not None})),
            "tensors": len(layers),
            "shape": list(shape),
            "type": kind,
            "reason": reason,
        }
        for (role, shape, kind, reason), layers in groups.items()
    ]


def runs(numbers: Sequence[int]) -> str:
    """'0-2, 5, 8-9' for ascending numbers."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and number == parts[-1][-1] + 1:
            parts[-1] = [parts[-1][0], number]
        else:
            parts.append([number])
    return ", ".join("-".join(map(str, part)) for part in parts)
