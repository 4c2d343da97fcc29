"""Tensor names in GGUF, by role (gguf-py's constants name them so)."""

from __future__ import annotations

from pipeline.types import TensorSpec

GLOBAL = {"embed": "token_embd.weight", "output_norm": "output_norm.weight", "head": "output.weight"}

LAYER = {
    "post_norm": "post_attention_norm.weight",
    "router": "ffn_gate_inp.weight",
    "expert_gate": "ffn_gate_exps.weight",
    "expert_up": "ffn_up_exps.weight",
    "expert_down": "ffn_down_exps.weight",
    "shared_router": "ffn_gate_inp_shexp.weight",
    "shared_gate": "ffn_gate_shexp.weight",
    "shared_up": "ffn_up_shexp.weight",
    "shared_down": "ffn_down_shexp.weight",
    "delta_qkv": "attn_qkv.weight",
    "delta_z": "attn_gate.weight",
    "delta_b": "ssm_beta.weight",
    "delta_a": "ssm_alpha.weight",
    "delta_ba": "ssm_ba.weight",
    "delta_conv": "ssm_conv1d.weight",
    "delta_a_log": "ssm_a",
    "delta_dt_bias": "ssm_dt.bias",
    "delta_norm": "ssm_norm.weight",
    "delta_out": "ssm_out.weight",
    "mtp_join": "nextn.eh_proj.weight",
    "mtp_embed_norm": "nextn.enorm.weight",
    "mtp_hidden_norm": "nextn.hnorm.weight",
    "mtp_output_norm": "nextn.shared_head_norm.weight",
}
"""Of roles that are called otherwise in GGUF."""


def gguf_name(tensor: TensorSpec) -> str:
    """'blk.3.attn_q.weight' for the role attn_q of layer 3; biases end in .bias. Of tensors as arrange.py has them."""
    if tensor.layer is None:
        return GLOBAL[tensor.role]
    stem, kind = (tensor.role[:-5], "bias") if tensor.role.endswith("_bias") else (tensor.role, "weight")
    return f"blk.{tensor.layer}.{LAYER.get(tensor.role, f'{stem}.{kind}')}"
