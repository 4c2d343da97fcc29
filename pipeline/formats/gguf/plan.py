"""Which encoding each tensor gets: the policy of llama-quantize, and the one place that knows it.

Source: the behaviour of `llama_model_quantize` in llama.cpp 0c1e57098 (src/llama-quant.cpp, llama_tensor_get_type),
reproduced tensor by tensor; tests/formats/gguf/test_oracle.py compares types and bytes over a matrix of shapes.
"""

from __future__ import annotations

from pipeline.formats.gguf.schemes import F16, F32, Q4_K, Q5_0, Q5_1, Q5_K, Q6_K, Q8_0, Scheme
from pipeline.types import Encoding, ModelSpec, Planned, TensorSpec

FALLBACK = {Q4_K: Q5_0, Q5_K: Q5_1, Q6_K: Q8_0}
"""For rows that do not divide into blocks of 256: the next larger encoding of 32."""


def plan(spec: ModelSpec, scheme: Scheme) -> list[Planned]:
    """The encoding of every tensor, in file order, each with its reason."""
    return [Planned(tensor, *_encoding(tensor, spec, scheme)) for tensor in spec.tensors]


def _encoding(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme) -> tuple[Encoding, str]:
    if len(tensor.shape) < 2:
        return F32, "vectors stay in float32"
    if not scheme.quantized:
        return scheme.base, "the scheme's own"
    wanted, reason = _wanted(tensor, spec, scheme)
    return _fitting(wanted, reason, tensor.shape[-1])


def _wanted(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme) -> tuple[Encoding, str]:
    """The encoding by the tensor's place, before its row length is looked at."""
    base, columns = scheme.base, tensor.shape[-1]
    if tensor.role == "head" or (spec.tied and tensor.role == "embed"):
        what = "the head" if tensor.role == "head" else "the embedding, tied to the head,"
        if columns % base.block:
            return Q8_0, f"{what} has rows of {columns}, not a multiple of {base.block}: Q8_0"
        if base not in {Q8_0, Q6_K}:
            return Q6_K, f"{what} gets more bits: Q6_K"
    if scheme.name in {"q4_k_m", "q5_k_m"} and tensor.role in {"attn_v", "ffn_down"} and tensor.layer is not None:
        if _gets_more_bits(tensor.layer, spec.n_layers):
            return Q6_K, f"{tensor.role} of some layers gets more bits: Q6_K"
        if tensor.role == "attn_v" and base is Q4_K and spec.model_type == "qwen2" and spec.n_layers == 80:
            return Q5_K, "attn_v of an 80-layer model (70B) gets more bits: Q5_K"
    return base, "the scheme's own"


def _gets_more_bits(layer: int, n_layers: int) -> bool:
    """The first and last eighth of the layers, and every third between."""
    eighth = n_layers // 8
    return layer < eighth or layer >= 7 * n_layers // 8 or (layer - eighth) % 3 == 2


def _fitting(wanted: Encoding, reason: str, columns: int) -> tuple[Encoding, str]:
    if columns % wanted.block == 0:
        return wanted, reason
    smaller = FALLBACK.get(wanted, wanted)
    if columns % smaller.block == 0:
        return smaller, f"row {columns} not a multiple of {wanted.block}: {smaller.name} for {wanted.name}"
    return F16, f"row {columns} not a multiple of {smaller.block}: F16 for {wanted.name}"
