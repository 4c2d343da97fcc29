"""What a checkpoint is and what every scheme would make of it, before a byte is written."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.errors import CheckpointError, ParamsError, TokenizerError, of
from pipeline.formats import FORMATS, room
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import ModelSpec, Planned


def inspect(path: Path, scheme: str | None = None) -> dict[str, Any]:
    """Architecture, problems, weight of every scheme, and the plan of one.

    Raises:
        PipelineError: a folder whose config.json cannot be understood, or a scheme that does not exist.
    """
    with Checkpoint(path) as checkpoint:
        spec = spec_of(checkpoint.config)
        problems = _problems(checkpoint, spec)
        dtypes = sorted({stored.dtype for stored in checkpoint.tensors.values()})
    return {
        "checkpoint": path.resolve().name,
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
        "plan": None if scheme is None else grouped(_plan(spec, scheme)),
    }


def _problems(checkpoint: Checkpoint, spec: ModelSpec) -> list[str]:
    problems = []
    try:
        checkpoint.check(spec)
    except CheckpointError as error:
        problems.append(str(error))
    try:
        tokenizer = Tokenizer(checkpoint.path)
        tokenizer.vocabulary(spec.vocab_size)
        for format_name in FORMATS:
            room(format_name, "metadata").pre_tokenizer(tokenizer)
    except TokenizerError as error:
        problems.append(str(error))
    return problems


def _plan(spec: ModelSpec, scheme: str) -> list[Planned]:
    known = {name: format_name for format_name in FORMATS for name in room(format_name, "schemes").SCHEMES}
    if scheme not in known:
        raise ParamsError(f"no format has a scheme {scheme!r}; {of(scheme, [*known])}")
    planned: list[Planned] = room(known[scheme], "plan").plan(spec, room(known[scheme], "schemes").SCHEMES[scheme])
    return planned


def _architecture(spec: ModelSpec) -> dict[str, Any]:
    keys = ("model_type", "n_layers", "d_model", "n_heads", "n_kv_heads", "head_dim", "d_ff", "vocab_size")
    rest = {"context_length": spec.context_length, "rope_theta": spec.rope.theta, "rope_scaling": spec.rope.scaling}
    flags = {"tied": spec.tied, "qkv_bias": spec.qkv_bias, "qk_norm": spec.qk_norm}
    return {key: getattr(spec, key) for key in keys} | rest | flags


def _totals(planned: Sequence[Planned]) -> dict[str, Any]:
    types: dict[str, int] = {}
    for p in planned:
        types[p.encoding.name] = types.get(p.encoding.name, 0) + p.tensor.weights
    size, weights = sum(p.bytes for p in planned), sum(types.values())
    ordered = dict(sorted(types.items(), key=lambda item: -item[1]))
    return {"tensor_bytes": size, "bits_per_weight": size * 8 / weights, "effective_types": ordered}


def grouped(planned: Sequence[Planned]) -> list[dict[str, Any]]:
    """The plan with equal rows of several layers put together: role, layers, shape, type, reason."""
    groups: dict[tuple[str, tuple[int, ...], str, str], list[int]] = {}
    for p in planned:
        reason = p.reason.replace(f"of layer {p.tensor.layer} of", "of this layer of")
        key = (p.tensor.role, p.tensor.shape, p.encoding.name, reason)
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
