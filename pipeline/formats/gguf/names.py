"""Tensor names in GGUF, by role (gguf-py's constants name them so)."""

from __future__ import annotations

from pipeline.types import TensorSpec

GLOBAL = {"embed": "token_embd.weight", "output_norm": "output_norm.weight", "head": "output.weight"}


def gguf_name(tensor: TensorSpec) -> str:
    """'blk.3.attn_q.weight' for the role attn_q of layer 3; biases end in .bias."""
    if tensor.layer is None:
        return GLOBAL[tensor.role]
    stem, kind = (tensor.role[:-5], "bias") if tensor.role.endswith("_bias") else (tensor.role, "weight")
    return f"blk.{tensor.layer}.{stem}.{kind}"
