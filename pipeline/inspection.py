"""What a checkpoint is and what every scheme would make of it, before a byte is written."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError, PipelineError, QuantizationError, suggestion
from pipeline.formats import FORMATS, bits_per_weight, effective_types, room
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hub import open_checkpoint
from pipeline.types import ModelSpec, Planned

CHECKPOINT = "checkpoint"
"""Beside the formats: who refuses what none of them takes."""


def inspect(
    checkpoint_name: str | Path,
    scheme: str | None = None,
    revision: str | None = None,
    types: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Architecture, problems, weight of every scheme, and the plan of one, with types of its own or without.

    `scheme` is 'gguf/q8_0', or a name that only one format has.

    Raises:
        PipelineError: a folder whose config.json cannot be understood, or a scheme that does not exist, or that this
            checkpoint cannot have.
    """
    with open_checkpoint(checkpoint_name, revision) as checkpoint:
        spec = spec_of(checkpoint.config)
        problems = _problems(checkpoint, spec)
        if CHECKPOINT not in problems:
            spec = checkpoint.typed(spec)  # some formats go by what is stored
        dtypes = sorted({stored.dtype for stored in checkpoint.tensors.values()})
    return {
        "checkpoint": checkpoint.name,
        "architecture": _architecture(spec),
        "weights": spec.weights,
        "tensors": len(spec.tensors),
        "dtypes": dtypes,
        "problems": _texts(problems),
        "schemes": {
            f"{format_name}/{name}": _totals(spec, format_name, name)
            for format_name in FORMATS
            for name in room(format_name, "schemes").SCHEMES
        },
        "plan": None if scheme is None else grouped(_plan(spec, scheme, types or {})),
    }


def _problems(checkpoint: Checkpoint, spec: ModelSpec) -> dict[str, str]:
    """What `convert` would refuse, by the format that does."""
    checks = {CHECKPOINT: checkpoint.check} | {name: partial(room(name, "write").check, checkpoint) for name in FORMATS}
    problems = {}
    for name, check in checks.items():
        try:
            check(spec)
        except PipelineError as error:
            problems[name] = str(error)
    return problems


def _texts(problems: Mapping[str, str]) -> list[str]:
    """Each once; of what some formats take, with the names of those that do not."""
    texts: dict[str, list[str]] = {}
    for name, text in problems.items():
        texts.setdefault(text, []).append(name)
    return [
        text if names in ([CHECKPOINT], [*FORMATS]) else f"{', '.join(names)}: {text}" for text, names in texts.items()
    ]


def _plan(spec: ModelSpec, scheme: str, types: Mapping[str, str]) -> list[Planned]:
    """The plan of 'gguf/bf16', or of a name that only one format has."""
    format_name, _, name = scheme.rpartition("/")
    format_name = format_name or _format_of(name)
    chosen = room(format_name, "schemes").scheme(name, types)
    planned: list[Planned] = room(format_name, "plan").plan(spec, chosen)
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
    return {key: getattr(spec, key) for key in keys} | rest | flags


def _totals(spec: ModelSpec, format_name: str, scheme: str) -> dict[str, Any]:
    """What a scheme would weigh, or why the format refuses it for this checkpoint."""
    try:
        planned = _plan(spec, f"{format_name}/{scheme}", {})
    except QuantizationError as error:
        return {"refused": str(error)}
    types = effective_types(planned)
    return {
        "tensor_bytes": sum(p.bytes for p in planned),
        "bits_per_weight": bits_per_weight(planned),
        "effective_types": {name: entry.weights for name, entry in types.items()},
    }


def grouped(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """The plan with equal rows of several layers put together: role, layers, shape, type, reason."""
    groups: dict[tuple[str, tuple[int, ...], str, str], list[int]] = {}
    for p in planned:
        key = (p.tensor.role, p.tensor.shape, p.encoding.name, p.reason)
        groups.setdefault(key, []).extend([] if p.tensor.layer is None else [p.tensor.layer])
    return [
        {"role": role, "layers": runs(layers), "shape": list(shape), "type": kind, "reason": reason}
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
