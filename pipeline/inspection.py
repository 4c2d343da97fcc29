"""What a checkpoint is and what every scheme would make of it, before a byte is written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.errors import ParamsError, PipelineError, suggestion
from pipeline.formats import FORMATS, bits_per_weight, effective_types, room
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hub import open_checkpoint
from pipeline.types import ModelSpec, Planned


def inspect(
    checkpoint_name: str | Path,
    scheme: str | None = None,
    revision: str | None = None,
    types: Mapping[str, str] | None = None,
) -> dict[str, Any]:
    """Architecture, problems, weight of every scheme, and the plan of one, with types of its own or without.

    Raises:
        PipelineError: a folder whose config.json cannot be understood, or a scheme that does not exist.
    """
    with open_checkpoint(checkpoint_name, revision) as checkpoint:
        spec = spec_of(checkpoint.config)
        problems = _problems(checkpoint, spec)
        dtypes = sorted({stored.dtype for stored in checkpoint.tensors.values()})
    return {
        "checkpoint": checkpoint.name,
        "architecture": _architecture(spec),
        "weights": spec.weights,
        "tensors": len(spec.tensors),
        "dtypes": dtypes,
        "problems": problems,
        "schemes": {
            f"{format_name}/{name}": _totals(room(format_name, "plan").plan(spec, found))
            for format_name in FORMATS
            for name, found in room(format_name, "schemes").SCHEMES.items()
        },
        "plan": None if scheme is None else grouped(_plan(spec, scheme, types or {})),
    }


def _problems(checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    """What `convert` would refuse, of every format."""
    problems = []
    checks: list[Callable[[ModelSpec], None]] = [checkpoint.check]
    checks += [partial(room(name, "write").check, checkpoint) for name in FORMATS]
    for check in checks:
        try:
            check(spec)
        except PipelineError as error:
            problems.append(str(error))
    return problems


def _plan(spec: ModelSpec, scheme: str, types: Mapping[str, str]) -> list[Planned]:
    known = {name: format_name for format_name in FORMATS for name in room(format_name, "schemes").SCHEMES}
    if scheme not in known:
        raise ParamsError(f"no format has a scheme {scheme!r}; {suggestion(scheme, [*known])}")
    chosen = room(known[scheme], "schemes").scheme(scheme, types)
    planned: list[Planned] = room(known[scheme], "plan").plan(spec, chosen)
    return planned


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    keys = ("model_type", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size")
    rest = {"context_length": spec.context_length, "rope_theta": spec.rope.theta, "rope_scaling": spec.rope.scaling}
    flags = {"tied": spec.tied, "qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm}
    return {key: getattr(spec, key) for key in keys} | rest | flags


def _totals(planned: Sequence[Planned]) -> dict[str, Any]:
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
