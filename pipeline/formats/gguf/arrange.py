"""The tensors that a GGUF file holds: which rows of the checkpoint's, in which order, and what is done to them.

Source: how llama.cpp 0c1e57098 computes them (src/models/qwen*.cpp) and its own converter (conversion/qwen.py). The
tests compare logits with transformers', and names and shapes with what llama.cpp loads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.gguf.names import gguf_name
from pipeline.models import MODEL_TYPES
from pipeline.models.experts import gates_and_ups
from pipeline.types import DeltaNet, Dropped, ModelSpec, TensorSpec

Change = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""What is done to rows float32 [rows, columns] of a tensor, once they are read; a vector is one row."""

MOST_MTP_LAYERS = 1  # llama.cpp: "currently only supports a single MTP block"


ARRANGED = "gguf"
"""A ModelSpec's memo of it: the spans of thousands of experts take a while."""


@dataclass(frozen=True)
class Arranged:
    """A tensor of the file, whose spans are the rows it takes; `change` is None where they are stored as they are, and
    `source` is the name of the ModelSpec's tensor that it is, or is part of.
    """

    tensor: TensorSpec
    change: Change | None = None
    source: str = ""

    @property
    def name(self) -> str:
        """In the file."""
        return gguf_name(self.tensor)


def arranged(spec: ModelSpec) -> list[Arranged]:
    """Every tensor of the file, in its order: each is called as transformers calls it, or would call a part of it."""
    if ARRANGED not in spec.memo:
        spec.memo[ARRANGED] = _arranged(spec)
    return [*spec.memo[ARRANGED]]


def _arranged(spec: ModelSpec) -> list[Arranged]:
    heads = _v_heads(spec)
    parts = [
        replace(part, source=tensor.name)
        for tensor in (*_with_head(spec), *mtp(spec))
        for part in _parts(tensor, spec.delta, heads)
    ]
    if not spec.offset_norms:
        return parts
    return [replace(part, change=_plus_one) if part.tensor.is_offset_norm else part for part in parts]


def tensors(spec: ModelSpec) -> list[TensorSpec]:
    """Those of `arranged` alone."""
    return [part.tensor for part in arranged(spec)]


def mtp(spec: ModelSpec) -> tuple[TensorSpec, ...]:
    """The MTP layers' tensors, where the runtime has a use for them."""
    return spec.mtp if spec.mtp_layers <= MOST_MTP_LAYERS else ()


def dropped(spec: ModelSpec) -> tuple[Dropped, ...]:
    """What a checkpoint holds and a file of it does not."""
    if mtp(spec) == spec.mtp:
        return spec.dropped
    reason = f"llama.cpp computes with {MOST_MTP_LAYERS} of them, the checkpoint has {spec.mtp_layers}"
    return (*spec.dropped, spec.dropped_mtp(reason))


def _with_head(spec: ModelSpec) -> Iterator[TensorSpec]:
    yield from spec.tensors
    if spec.tied and MODEL_TYPES[spec.model_type].llama_cpp.needs_head:
        embedding = next(tensor for tensor in spec.tensors if tensor.role == "embed")
        yield replace(embedding, name="lm_head.weight", role="head", spans=embedding.stored)


def _v_heads(spec: ModelSpec) -> list[int]:
    """The V heads in the file's order. Checkpoints have those of one K head together; where llama.cpp multiplies heads
    by repeating all K heads, the first of each K head come first, then the second (llama.cpp#19468). But where the
    projections are stored fused, it repeats each K head in place.
    """
    if spec.delta is None:
        return []
    heads = range(spec.delta.v_heads)
    if any(tensor.role == "delta_qkvz" for tensor in spec.tensors):
        return [*heads]
    each = spec.delta.v_heads // spec.delta.k_heads
    return sorted(heads, key=lambda head: (head % each, head // each))


def _parts(tensor: TensorSpec, delta: DeltaNet | None, heads: list[int]) -> Iterator[Arranged]:
    """What becomes of one tensor of the checkpoint."""
    if tensor.role == "expert_gate_up":
        yield from (Arranged(_squeezed(part)) for part in gates_and_ups(tensor))
    elif delta is None or not tensor.role.startswith("delta_"):
        yield Arranged(_squeezed(tensor))
    elif tensor.role == "delta_qkvz":
        yield from _unfused(tensor, delta)
    else:
        yield _of_v_heads(tensor, delta, heads)


def _of_v_heads(tensor: TensorSpec, delta: DeltaNet, heads: list[int]) -> Arranged:
    """A tensor of a DeltaNet with its V heads in the order of `heads`."""
    rows = [(head * delta.v_dim, delta.v_dim) for head in heads]
    match tensor.role:
        case "delta_qkv" | "delta_conv":
            first = 2 * delta.keys
            runs = [(0, first), *((first + start, count) for start, count in rows)]
            return Arranged(_taken(tensor, runs, shape=(tensor.shape[0], tensor.shape[-1])))
        case "delta_z":
            return Arranged(_taken(tensor, rows))
        case "delta_b" | "delta_a":
            return Arranged(_taken(tensor, [(head, 1) for head in heads]))
        case "delta_dt_bias":
            return Arranged(tensor, _columns(heads))
        case "delta_a_log":
            order = _columns(heads)
            return Arranged(tensor, lambda rows: _decay(rows if order is None else order(rows)))
        case "delta_out":
            return Arranged(tensor, _columns([i for start, count in rows for i in range(start, start + count)]))
        case _:  # delta_norm, delta_ba
            return Arranged(_squeezed(tensor))


def _unfused(tensor: TensorSpec, delta: DeltaNet) -> Iterator[Arranged]:
    """in_proj_qkvz, which holds q, k, v and z of each K head in turn, as all q, all k, all v; and z."""
    values = delta.values // delta.k_heads
    runs: list[list[tuple[int, int]]] = []
    begin = 0
    for size in (delta.k_dim, delta.k_dim, values, values):
        runs.append([(head * 2 * (delta.k_dim + values) + begin, size) for head in range(delta.k_heads)])
        begin += size
    for part, taken in (("qkv", runs[0] + runs[1] + runs[2]), ("z", runs[3])):
        name, shape = tensor.name.replace("qkvz", part), (sum(count for _, count in taken), tensor.shape[-1])
        yield Arranged(_taken(tensor, taken, name=name, role=f"delta_{part}", shape=shape))


def _taken(tensor: TensorSpec, runs: Iterable[tuple[int, int]], **own: Any) -> TensorSpec:
    """Runs of its rows, as a tensor with other fields."""
    return _squeezed(replace(tensor, spans=tensor.taken(runs), **own))


def _squeezed(tensor: TensorSpec) -> TensorSpec:
    """ggml has no leading dimensions of 1."""
    shape = tensor.shape
    while len(shape) > 1 and shape[0] == 1:
        shape = shape[1:]
    return tensor if shape == tensor.shape else replace(tensor, spans=tensor.stored, shape=shape)


def _plus_one(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    return rows + np.float32(1)


def _decay(rows: NDArray[np.float32]) -> NDArray[np.float32]:
    """The rate that a state decays with, of its logarithm."""
    return -np.exp(rows.astype(np.float64)).astype(np.float32)


def _columns(order: list[int]) -> Change | None:
    """Columns in an order; None where it is theirs."""
    if order == sorted(order):
        return None
    index = np.array(order)
    return lambda rows: np.take(rows, index, axis=1)
