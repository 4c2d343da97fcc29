"""The experts of a config.json, under either name that their number has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pipeline.models.settings import SIZES, size_problems
from pipeline.types import Experts, TensorSpec

MOST_EXPERTS = 1024  # LLAMA_MAX_EXPERTS
NONE = Experts(0, 0, 0, 0, False)


def read_experts(config: Mapping[str, Any], norm_topk: bool, shared: bool) -> tuple[Experts, list[str]]:
    """The experts and what is wrong with them: where something is, they are none. `norm_topk` is what transformers
    takes where config.json does not say, `shared` whether there is an expert for all tokens.
    """
    read = dict(config)
    if read.get("num_experts") is None:
        read["num_experts"] = read.get("num_local_experts")
    sizes = {"num_experts": MOST_EXPERTS, "num_experts_per_tok": MOST_EXPERTS}
    sizes["moe_intermediate_size"] = SIZES["intermediate_size"]
    if shared:
        sizes["shared_expert_intermediate_size"] = SIZES["intermediate_size"]
    problems = [problem for key, most in sizes.items() for problem in size_problems(read, key, most)]
    norm = read.get("norm_topk_prob")
    if norm not in (None, True, False):
        problems.append(f"norm_topk_prob: expected true or false, found {norm!r}")
    if read.get("decoder_sparse_step", 1) != 1 or read.get("mlp_only_layers"):
        problems.append("decoder_sparse_step, mlp_only_layers: every layer must have experts; mixed ones are not read")
    if problems:
        return NONE, problems
    count, used = read["num_experts"], read["num_experts_per_tok"]
    if used > count:
        return NONE, [f"num_experts_per_tok: expected at most num_experts, {count}, found {used}"]
    shared_d_ff = read["shared_expert_intermediate_size"] if shared else 0
    d_ff = read["moe_intermediate_size"]
    return Experts(count, used, d_ff, shared_d_ff, norm_topk if norm is None else bool(norm)), []


def gates_and_ups(tensor: TensorSpec) -> tuple[TensorSpec, TensorSpec]:
    """Of a layer's expert_gate_up [experts, 2 * d_ff, d_model], where each expert's gate lies before its up: all gates
    and all ups, [experts, d_ff, d_model] each, named as transformers would name them.
    """
    count, both, columns = tensor.shape
    rows = both // 2

    def part(name: str, first: int) -> TensorSpec:
        spans = tensor.taken((expert * both + first, rows) for expert in range(count))
        own = tensor.name.replace("gate_up", name)
        return replace(tensor, name=own, role=f"expert_{name}", shape=(count, rows, columns), spans=spans)

    return part("gate", 0), part("up", rows)
