"""Which encoding each tensor gets: as llama-quantize chooses it, and the one place that knows it.

Source: the behaviour of `llama_model_quantize` in llama.cpp 0c1e57098 (src/llama-quant.cpp, llama_tensor_get_type):
policy.py holds its mixes, this room what it never quantizes, types asked for, fallbacks and importance matrices.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterator, Sequence

from pipeline.errors import ParamsError, QuantizationError, listed
from pipeline.formats.gguf import arrange
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.policy import CATEGORIES, Choice, model, wanted
from pipeline.formats.gguf.schemes import (
    ASSERT_IMPORTANCE,
    EMBEDDING,
    F16,
    F32,
    HEAD,
    IQ1_M,
    IQ2_S,
    IQ2_XS,
    IQ2_XXS,
    IQ3_S,
    IQ3_XXS,
    IQ4_NL,
    IQ4_XS,
    NEED_IMPORTANCE,
    Q2_K,
    Q3_K,
    Q4_0,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Scheme,
)
from pipeline.types import Encoding, ModelSpec, Planned, TensorSpec

FALLBACK = {
    **dict.fromkeys((IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_XS), IQ4_NL),
    **{Q2_K: Q4_0, Q3_K: Q4_0, Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0},
}
"""For rows that do not divide into blocks of 256: the next larger encoding of 32."""

UNSEEN = Q4_K
"""Of matrices that would need importance data which no text can give."""

FLOATS = {
    "router": "the router stays in float32, so that the choice of experts is not rounded",
    "delta_conv": "convolutions stay in float32",
}
"""Matrices that are never quantized, and why."""


def plan(spec: ModelSpec, scheme: Scheme, imatrix: Container[str] | None = None) -> list[Planned]:
    """The encoding of every tensor as arrange.py has them, in file order, each with its reason.

    imatrix: the names of GGUF tensors that there is importance data for; None without an importance matrix. MTP layers
    have none, since no text runs through them: where llama-quantize would refuse to make the file for their sake, they
    get UNSEEN instead, as by its --tensor-type.

    Raises:
        ParamsError: a pattern of the scheme's own types that no matrix bears, or that another one hides.
        QuantizationError: a type of its own that the rows of the embedding or the head do not divide into; tensors
            that need importance data and have none, all listed.
    """
    tensors = arrange.tensors(spec)
    choices = dict(_choices(tensors, spec, scheme, imatrix is not None))
    _check_patterns(tensors, scheme)
    planned = [Planned(tensor, *choices[gguf_name(tensor)]) for tensor in tensors]
    if imatrix is not None:
        planned = [_seen(p, spec, imatrix) for p in planned]
    _check_importance(planned, scheme, imatrix)
    return planned


def _seen(planned: Planned, spec: ModelSpec, imatrix: Container[str]) -> Planned:
    """A matrix of an MTP layer at an encoding that it can have."""
    tensor, wanted = planned.tensor, planned.encoding
    is_mtp = tensor.layer is not None and tensor.layer >= spec.n_layers
    if not is_mtp or wanted not in NEED_IMPORTANCE or gguf_name(tensor) in imatrix:
        return planned
    reason = f"MTP layers have no importance data: {UNSEEN.name} for {wanted.name}"
    return Planned(tensor, *_fitting(UNSEEN, reason, tensor.shape[-1]))


def _choices(
    tensors: Sequence[TensorSpec], spec: ModelSpec, scheme: Scheme, has_imatrix: bool
) -> Iterator[tuple[str, Choice]]:
    """By name. llama-quantize goes by layer and name, and counts the tensors it decides on itself: one with a type of
    its own is not counted.
    """
    counted: Counter[str] = Counter()
    facts = model(spec, tensors, has_imatrix)
    for tensor in sorted(tensors, key=lambda t: (-1 if t.layer is None else t.layer, gguf_name(t))):
        name = gguf_name(tensor)
        if len(tensor.shape) < 2 or tensor.role in FLOATS:
            yield name, (F32, FLOATS.get(tensor.role, "vectors stay in float32"))
        elif (own := _own(tensor, facts.tied, scheme)) is not None:
            yield name, own
        elif not scheme.quantized:
            yield name, (scheme.base, "the scheme's own")
        else:
            category = CATEGORIES.get(tensor.role, tensor.role)
            yield name, _fitting(*wanted(tensor, scheme, facts, counted[category]), tensor.shape[-1])
            counted[category] += 1


def _own(tensor: TensorSpec, tied: bool, scheme: Scheme) -> Choice | None:
    """The encoding that the scheme's own types give a matrix: its first pattern that matches decides.

    As llama-quantize: --token-embedding-type and --output-tensor-type go before --tensor-type and never fall back, but
    the latter does, and so does the head's type where the embedding is the head.
    """
    types, columns = dict(scheme.types), tensor.shape[-1]
    for role, key in (("embed", EMBEDDING), ("head", HEAD)):
        if tensor.role == role and key in types:
            if columns % types[key].block:
                raise QuantizationError(
                    f"types: {key} has rows of {columns}, not a multiple of {types[key].block}: it cannot be "
                    f"{types[key].name}. Give it another type."
                )
            return types[key], f"asked for: {key}={types[key].name}"
    pattern = next((pattern for pattern in _patterns(scheme) if re.search(pattern, gguf_name(tensor))), None)
    if pattern is not None:
        return _fitting(types[pattern], f"asked for: {pattern}={types[pattern].name}", columns)
    if tensor.role == "embed" and tied and HEAD in types and scheme.quantized:
        return _fitting(types[HEAD], f"asked for: {HEAD}={types[HEAD].name}, tied to the embedding", columns)
    return None


def _patterns(scheme: Scheme) -> list[str]:
    return [pattern for pattern, _ in scheme.types if pattern not in {EMBEDDING, HEAD}]


def _check_patterns(tensors: Sequence[TensorSpec], scheme: Scheme) -> None:
    """A pattern that changes nothing is a mistake, which would go unseen in the artifact."""
    matrices = [gguf_name(tensor) for tensor in tensors if len(tensor.shape) > 1 and tensor.role not in FLOATS]
    if HEAD in dict(scheme.types) and "output.weight" not in matrices:
        others = (p for p, _ in scheme.types if p == EMBEDDING or (p != HEAD and re.search(p, "token_embd.weight")))
        other = next(others, None if scheme.quantized else EMBEDDING)
        if other is not None:
            raise ParamsError(f"types: {HEAD} is the embedding here (tied): give {other} alone.")
    left = set(matrices) - ({"token_embd.weight"} if EMBEDDING in dict(scheme.types) else set())
    left -= {"output.weight"} if HEAD in dict(scheme.types) else set()
    for pattern in _patterns(scheme):
        if not any(re.search(pattern, name) for name in matrices):
            layer = [name for name in matrices if name.startswith("blk.0.")]
            known = ", ".join([*(name for name in matrices if not name.startswith("blk.")), *layer])
            raise ParamsError(f"types: no matrix is named like {pattern!r}. Names are {known}, … of each layer.")
        taken = {name for name in left if re.search(pattern, name)}
        if not taken:
            raise ParamsError(f"types: {pattern!r} decides nothing: what it matches, others before it take.")
        left -= taken


def _fitting(wanted: Encoding, reason: str, columns: int) -> Choice:
    if columns % wanted.block == 0:
        return wanted, reason
    smaller = FALLBACK.get(wanted, wanted)
    if columns % smaller.block == 0:
        return smaller, f"row {columns} not a multiple of {wanted.block}: {smaller.name} for {wanted.name}"
    return F16, f"row {columns} not a multiple of {smaller.block}: F16 for {wanted.name}"


def _check_importance(planned: Sequence[Planned], scheme: Scheme, imatrix: Container[str] | None) -> None:
    """As tensor_requires_imatrix of llama-quant.cpp, and what ggml would end the process at."""
    lacking = Counter(
        f"{gguf_name(p.tensor).removeprefix(f'blk.{p.tensor.layer}.')}: {p.encoding.name}"
        for p in planned
        if p.encoding in (ASSERT_IMPORTANCE if p.tensor.role in {"embed", "head"} else NEED_IMPORTANCE)
        and (imatrix is None or gguf_name(p.tensor) not in imatrix)
    )
    if not lacking:
        return
    if imatrix is None:
        what, then = "needs an importance matrix", "Make one by `quantgate imatrix`, and give it as --imatrix FILE"
    else:
        what, then = "needs more than the importance matrix holds", "Make it of more text, by `quantgate imatrix`"
    raise QuantizationError(
        f"{scheme.label} {what} for {lacking.total()} tensors:\n"
        + listed([f"{name}, of {count} layers" if count > 1 else name for name, count in lacking.items()])
        + f"\n{then}, or take a scheme of more bits: without, these encodings keep too little."
    )
