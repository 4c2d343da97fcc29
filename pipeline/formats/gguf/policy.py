"""Which encoding a matrix is meant to have by its place in the model: llama-quantize's mixes.

Source: the behaviour of `llama_model_quantize` in llama.cpp 0c1e57098 (src/llama-quant.cpp,
llama_tensor_get_type_impl), reproduced tensor by tensor: test_oracle.py and test_family_oracle.py of tests/formats/gguf
compare types and bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.formats.gguf.schemes import (
    IQ2_S,
    IQ2_XXS,
    IQ3_S,
    Q2_K,
    Q3_K,
    Q4_1,
    Q4_K,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Scheme,
)
from pipeline.models import MODEL_TYPES
from pipeline.types import Encoding, ModelSpec, TensorSpec

CATEGORIES = {
    **{"attn_q": "attn_q", "attn_k": "attn_k", "attn_v": "attn_v", "attn_output": "attn_output"},
    **{"ffn_down": "ffn_down", "expert_down": "ffn_down", "shared_down": "ffn_down"},
    "delta_qkv": "attn_v",  # by its name, attn_qkv
}
"""Of the roles that mixes treat apart; the head and the embedding have rules of their own."""

SOME_LAYERS = {
    "attn_v": {"q5_k_m", "q4_k_m", "q4_k_s"},
    "ffn_down": {
        *("q5_k_m", "q5_0", "q4_k_m", "q4_k_s", "q4_0", "iq4_nl", "iq4_xs"),
        *("iq2_s", "iq2_xs", "iq2_xxs", "iq1_m"),
    },
}
"""Schemes that give more bits to some layers only."""

LOWEST = {"iq2_s", "iq2_xs", "iq2_xxs", "iq1_m"}
"""Schemes with rules of their own throughout."""

EMBEDDINGS = {"iq3_xxs": IQ3_S, "iq2_s": IQ3_S, "iq2_xs": Q2_K, "iq2_xxs": Q2_K, "iq1_m": Q2_K}
"""What they give an embedding that is not the head as well."""

HEADS = {"iq3_xxs", *LOWEST}
"""Schemes that give the head Q5_K instead of Q6_K."""

OUTPUTS_OF_EIGHT = {"q2_k", "q3_k_s", "q3_k_m", "q4_k_s", "q4_k_m", "iq4_nl", "iq4_xs", "iq3_s", "iq3_xxs", *LOWEST}
"""Schemes that give attn_output Q5_K in models of eight experts: Mixtral's number, which llama.cpp treats apart."""

Choice = tuple[Encoding, str]
"""An encoding and why it was taken."""


@dataclass(frozen=True)
class Model:
    """What the mixes look at. `values`: the number of attn_v and what is treated like it. `grouped`: four or more heads
    share a KV head. `has_imatrix`: there is an importance matrix, whatever it holds.
    """

    layers: int
    values: int
    experts: int
    grouped: bool
    tied: bool
    is_70b: bool
    has_imatrix: bool


def model(spec: ModelSpec, tensors: Sequence[TensorSpec], has_imatrix: bool) -> Model:
    """Of a file of `tensors`."""
    roles = Counter(CATEGORIES.get(tensor.role, tensor.role) for tensor in tensors)
    return Model(
        layers=len({tensor.layer for tensor in tensors} - {None}),
        values=roles["attn_v"],
        experts=0 if spec.experts is None else spec.experts.count,
        grouped=spec.n_heads // spec.n_kv_heads >= 4,
        tied=not roles["head"],
        is_70b=spec.n_layers == MODEL_TYPES[spec.model_type].llama_cpp.layers_of_70b,
        has_imatrix=has_imatrix,
    )


def wanted(tensor: TensorSpec, scheme: Scheme, model: Model, index: int) -> Choice:
    """The encoding by the tensor's place, before its row length is looked at.

    `index` counts the tensors of its category that were asked for before it, by layer and name.
    """
    base, columns, category = scheme.base, tensor.shape[-1], CATEGORIES.get(tensor.role, tensor.role)
    found: Encoding | None = None
    if tensor.role == "head" or (model.tied and tensor.role == "embed"):
        what = "the head" if tensor.role == "head" else "the embedding, tied to the head,"
        if columns % base.block:
            return Q8_0, f"{what} has rows of {columns}, not a multiple of {base.block}: Q8_0"
        found = Q5_K if scheme.name in HEADS else Q6_K
        return (base, "the scheme's own") if base in {Q8_0, found} else (found, f"{what} gets more bits: {found.name}")
    if tensor.role == "embed":
        found = EMBEDDINGS.get(scheme.name)
    elif scheme.name in LOWEST:
        found = _lowest(category, scheme, model, index)
    elif category == "attn_v":
        found = _attn_v(scheme, model, index)
        if model.is_70b and model.experts != 8 and (found or base) in {Q3_K, Q4_K}:
            return Q5_K, "attn_v of an 80-layer model (70B) gets more bits: Q5_K"
    elif category in {"attn_q", "attn_k"}:
        found = Q8_0 if category == "attn_k" and model.experts == 8 else IQ2_S if scheme.name == "iq3_xxs" else None
    elif category == "ffn_down":
        found = _ffn_down(scheme, model, tensor.layer if model.experts > 1 and tensor.layer is not None else index)
    elif category == "attn_output":
        found = _attn_output(scheme, model)
    if found is None or found == base:
        return base, "the scheme's own"
    some = "of some layers " if scheme.name in SOME_LAYERS.get(category, ()) else ""
    if model.experts == 8 and category.startswith("attn"):
        some = "of a model of 8 experts "
    more = "more" if found.bits_per_weight > base.bits_per_weight else "fewer"
    return found, f"{tensor.role} {some}gets {more} bits: {found.name}"


def _attn_v(scheme: Scheme, model: Model, index: int) -> Encoding | None:
    if model.experts == 8:
        return Q8_0
    match scheme.name:
        case "q2_k":
            return Q4_K if model.grouped else Q3_K
        case "iq3_xxs":
            return Q4_K if model.grouped else None if model.has_imatrix else IQ3_S
        case "iq3_s":
            return Q4_K if model.grouped else None
        case "q3_k_m":
            return Q5_K if index < 2 else Q4_K
        case "q3_k_l":
            return Q5_K
        case "iq4_nl" | "iq4_xs":
            return Q5_K if model.grouped else None
        case "q4_k_m" | "q5_k_m":
            return Q6_K if _more_bits(index, model.values) else None
        case "q4_k_s":
            return Q5_K if index < 4 else None
    return None


def _ffn_down(scheme: Scheme, model: Model, layer: int) -> Encoding | None:
    n, first = model.layers, layer < model.layers // 8
    match scheme.name:
        case "q2_k":
            return Q3_K
        case "iq3_xxs":
            return None if model.has_imatrix else Q4_K if first else Q3_K
        case "q3_k_m":
            return Q5_K if layer < n // 16 else Q4_K
        case "q3_k_l":
            return Q5_K
        case "q4_k_m" | "q5_k_m":
            return Q6_K if _more_bits(layer, n) else None
        case "iq4_nl" | "iq4_xs":
            return Q5_K if first and not model.has_imatrix else None
        case "q4_k_s":
            return Q5_K if first else None
        case "q4_0" | "q5_0":
            return (Q4_1 if scheme.name == "q4_0" else Q5_1) if first and model.has_imatrix else None
    return None


def _attn_output(scheme: Scheme, model: Model) -> Encoding | None:
    if model.experts == 8:
        return Q5_K if scheme.name in OUTPUTS_OF_EIGHT else None
    return {"q2_k": Q3_K, "iq3_xxs": IQ3_S, "q3_k_m": Q4_K, "q3_k_l": Q5_K}.get(scheme.name)


def _lowest(category: str, scheme: Scheme, model: Model, index: int) -> Encoding | None:
    more = IQ3_S if scheme.name == "iq2_s" else Q2_K
    match category:
        case "attn_v":
            return Q4_K if model.grouped or model.experts >= 4 else more
        case "attn_k":
            return Q4_K if model.experts == 8 else None
        case "ffn_down":
            return more if index < model.layers // 8 else None
        case "attn_output" if model.experts == 8:
            return Q5_K
        case "attn_output":
            return {"iq2_s": IQ3_S, "iq1_m": IQ2_XXS}.get(scheme.name)
    return None


def _more_bits(index: int, n: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    return index < n // 8 or index >= 7 * n // 8 or (index - n // 8) % 3 == 2
