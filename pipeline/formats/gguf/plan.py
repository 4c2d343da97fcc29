"""Which encoding each tensor gets: the policy of llama-quantize, and the one place that knows it.

Source: the behaviour of `llama_model_quantize` in llama.cpp 0c1e57098 (src/llama-quant.cpp, llama_tensor_get_type),
reproduced tensor by tensor; tests/formats/gguf/test_oracle.py compares types and bytes over a matrix of shapes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator

from pipeline.errors import ParamsError, QuantizationError
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.schemes import (
    EMBEDDING,
    F16,
    F32,
    HEAD,
    IQ4_NL,
    IQ4_XS,
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

FALLBACK = {IQ4_XS: IQ4_NL, Q2_K: Q4_0, Q3_K: Q4_0, Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}
"""For rows that do not divide into blocks of 256: the next larger encoding of 32."""

SOME_LAYERS = {
    "attn_v": ("q5_k_m", "q4_k_m", "q4_k_s"),
    "ffn_down": ("q5_k_m", "q4_k_m", "q4_k_s", "iq4_nl", "iq4_xs"),
}
"""Schemes that give more bits to some layers only."""

Choice = tuple[Encoding, str]
"""An encoding and why it was taken."""


def plan(spec: ModelSpec, scheme: Scheme) -> list[Planned]:
    """The encoding of every tensor, in file order, each with its reason.

    Raises:
        ParamsError: a pattern of the scheme's own types that no matrix bears, or that another one hides.
        QuantizationError: a type of its own that the rows of the embedding or the head do not divide into.
    """
    planned = [Planned(tensor, *choice) for tensor, choice in _choices(spec, scheme)]
    _check_patterns(spec, scheme)
    return planned


def _choices(spec: ModelSpec, scheme: Scheme) -> Iterator[tuple[TensorSpec, Choice]]:
    counted: Counter[str] = Counter()
    for tensor in spec.tensors:
        own = _own(tensor, spec, scheme)
        if len(tensor.shape) < 2:
            yield tensor, (F32, "vectors stay in float32")
        elif own is not None:
            yield tensor, own
        elif not scheme.quantized:
            yield tensor, (scheme.base, "the scheme's own")
        else:
            # llama-quantize counts the layers it decides on itself: one with a type of its own is not counted
            wanted, reason = _wanted(tensor, spec, scheme, counted[tensor.role])
            counted[tensor.role] += 1
            yield tensor, _fitting(wanted, reason, tensor.shape[-1])


def _own(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme) -> Choice | None:
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
    if tensor.role == "embed" and spec.tied and HEAD in types and scheme.quantized:
        return _fitting(types[HEAD], f"asked for: {HEAD}={types[HEAD].name}, tied to the embedding", columns)
    return None


def _patterns(scheme: Scheme) -> list[str]:
    return [pattern for pattern, _ in scheme.types if pattern not in {EMBEDDING, HEAD}]


def _check_patterns(spec: ModelSpec, scheme: Scheme) -> None:
    """A pattern that changes nothing is a mistake, which would go unseen in the artifact."""
    matrices = [gguf_name(tensor) for tensor in spec.tensors if len(tensor.shape) == 2]
    if HEAD in dict(scheme.types) and spec.tied:
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


def _wanted(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme, index: int) -> Choice:
    """The encoding by the tensor's place, before its row length is looked at.

    `index` counts the tensors of its role.
    """
    base, columns = scheme.base, tensor.shape[-1]
    if tensor.role == "head" or (spec.tied and tensor.role == "embed"):
        what = "the head" if tensor.role == "head" else "the embedding, tied to the head,"
        if columns % base.block:
            return Q8_0, f"{what} has rows of {columns}, not a multiple of {base.block}: Q8_0"
        if base not in {Q8_0, Q6_K}:
            return Q6_K, f"{what} gets more bits: Q6_K"
    elif tensor.role in {"attn_v", "attn_output", "ffn_down"}:
        return _mixed(tensor.role, spec, scheme, index)
    return base, "the scheme's own"


def _mixed(role: str, spec: ModelSpec, scheme: Scheme, index: int) -> Choice:
    """What the mixes give the matrices that lose most by few bits, some of them only in some layers."""
    n, base = spec.n_layers, scheme.base
    grouped = spec.n_heads // spec.n_kv_heads >= 4
    found: Encoding | None
    match scheme.name, role:
        case "q2_k", "attn_v":
            found = Q4_K if grouped else Q3_K
        case "q2_k", _:
            found = Q3_K
        case "q3_k_m", "attn_v":
            found = Q5_K if index < 2 else Q4_K
        case "q3_k_m", "ffn_down":
            found = Q5_K if index < n // 16 else Q4_K
        case "q3_k_m", "attn_output":
            found = Q4_K
        case "q3_k_l", _:
            found = Q5_K
        case "q4_k_s", "attn_v":
            found = Q5_K if index < 4 else None
        case (("iq4_nl" | "iq4_xs"), "attn_v"):
            found = Q5_K if grouped else None
        case (("q4_k_s" | "iq4_nl" | "iq4_xs"), "ffn_down"):
            found = Q5_K if index < n // 8 else None
        case (("q4_k_m" | "q5_k_m"), ("attn_v" | "ffn_down")):
            found = Q6_K if _more_bits(index, n) else None
        case _:
            found = None
    if role == "attn_v" and spec.model_type == "qwen2" and n == 80 and (found or base) in {Q3_K, Q4_K}:
        return Q5_K, "attn_v of an 80-layer model (70B) gets more bits: Q5_K"
    if found is None:
        return base, "the scheme's own"
    some = "of some layers " if scheme.name in SOME_LAYERS.get(role, ()) else ""
    return found, f"{role} {some}gets more bits: {found.name}"


def _more_bits(index: int, n: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return index < n // 8 or index >= 7 * n // 8 or (index - n // 8) % 3 == 2


def _fitting(wanted: Encoding, reason: str, columns: int) -> Choice:
    if columns % wanted.block == 0:
        return wanted, reason
    smaller = FALLBACK.get(wanted, wanted)
    if columns % smaller.block == 0:
        return smaller, f"row {columns} not a multiple of {wanted.block}: {smaller.name} for {wanted.name}"
    return F16, f"row {columns} not a multiple of {smaller.block}: F16 for {wanted.name}"
