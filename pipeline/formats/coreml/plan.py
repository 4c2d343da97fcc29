"""Which encoding each tensor gets, and how long a package's inputs and caches are."""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import ParamsError, QuantizationError, listed, some
from pipeline.formats.coreml.layers import refuse_unknown
from pipeline.formats.coreml.schemes import F16, F32, SCHEMES, Scheme
from pipeline.types import ModelSpec, Planned, TensorSpec

CHUNK, MAX_CONTEXT, SCORE_WINDOW = 128, 2048 + 64, 512
"""Where a variant does not say: tokens that `prefill` takes, tokens of a conversation, which has room for a prompt
of 2,048 and a reply, tokens that `score` takes.
"""

STATE_MULTIPLE = 32  # of each dimension of a state that grows: the Neural Engine's tiles
FEWEST = 10  # coremltools writes shorter constants into the program, not into a weight file
NORMS = ("attn_norm", "ffn_norm", "output_norm", "attn_q_norm", "attn_k_norm")


@dataclass(frozen=True)
class Sizes:
    """Tokens: `chunk` of one `prefill`, `max_context` of a conversation, `score_window` of one `score`."""

    chunk: int
    max_context: int
    score_window: int

    @property
    def cache(self) -> int:
        """Positions of the KV state: the last chunk may begin anywhere in the context, and its padding needs room."""
        return -(-(self.max_context + self.chunk - 1) // STATE_MULTIPLE) * STATE_MULTIPLE

    @property
    def positions(self) -> int:
        """Positions that the rotary tables hold."""
        return max(self.cache, self.score_window)


def sizes_of(spec: ModelSpec, scheme: Scheme) -> Sizes:
    """The sizes of a package: those that were asked for, else the defaults as far as the model's context goes.

    Raises:
        ParamsError: sizes beyond the model's context.
    """
    asked = scheme.asked
    for key in ("max_context", "score_window"):
        if (asked.given.get(key) or 0) > spec.context_length:
            raise ParamsError(
                f"{key} {asked.given[key]} is beyond the model's context of {spec.context_length} tokens. Ask for less."
            )
    return Sizes(
        asked.chunk or CHUNK,
        asked.max_context or min(MAX_CONTEXT, spec.context_length),
        asked.score_window or min(SCORE_WINDOW, spec.context_length),
    )


def plan(spec: ModelSpec, scheme: Scheme) -> list[Planned]:
    """The encoding of every tensor, in file order, each with its reason.

    Raises:
        QuantizationError: a model whose layers no function computes, or matrices that do not divide into the blocks or
            groups of their encoding.
        ParamsError: sizes beyond the model's context.
    """
    refuse_unknown(spec)
    sizes_of(spec, scheme)
    _check(spec, scheme)
    return [_planned(tensor, scheme) for tensor in spec.tensors]


def _planned(tensor: TensorSpec, scheme: Scheme) -> Planned:
    if tensor.role in NORMS:
        return Planned(tensor, F32, "norms are computed in float32, where float16 would overflow")
    if len(tensor.shape) < 2:
        return Planned(tensor, F16, "vectors stay float16")
    if scheme.packing is None:
        return Planned(tensor, F16, "the scheme's own")
    return Planned(tensor, scheme.packing.encoding(tensor.shape[-1]), "the scheme's own")


def _check(spec: ModelSpec, scheme: Scheme) -> None:
    problems = [
        f"{tensor.name}: {tensor.weights} weights; a weight file holds {FEWEST} or more"
        for tensor in spec.tensors
        if tensor.weights < FEWEST
    ]
    problems += [
        f"{tensor.name}: {problem}"
        for tensor in spec.tensors
        if len(tensor.shape) == 2 and (problem := _misfit(tensor.shape[0], tensor.shape[1], scheme))
    ]
    if problems:
        raise QuantizationError(
            f"{scheme.name} cannot hold every tensor:\n{listed([*some(problems, 'tensors')])}\n{_next_step(spec)}"
        )


def _misfit(rows: int, columns: int, scheme: Scheme) -> str | None:
    """Why a matrix does not divide: no layer is left out or padded."""
    packing = scheme.packing
    if rows < FEWEST:
        return f"{rows} rows; a weight file holds biases and scales of {FEWEST} or more"
    if packing is None:
        return None
    if packing.block and columns % packing.block:
        return f"rows of {columns} weights do not divide into blocks of {packing.block}"
    if packing.group and rows % packing.group:
        return f"{rows} rows do not divide into groups of {packing.group}"
    if columns * packing.bits % 8:
        return f"rows of {columns} weights of {packing.bits} bits are no whole bytes"
    return None


def _next_step(spec: ModelSpec) -> str:
    shapes = [tensor.shape for tensor in spec.tensors if len(tensor.shape) == 2]
    fitting = [s.name for s in SCHEMES.values() if all(_misfit(rows, columns, s) is None for rows, columns in shapes)]
    return f"Take {', '.join(fitting)}, or another format." if fitting else "Take another format."
