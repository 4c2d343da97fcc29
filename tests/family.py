"""Small random checkpoints of every model_type, made and saved by transformers; and the logits it computes of them."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from support import QWEN2_SPLIT, tokenizer_json

MODEL_TYPES = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "qwen3_next", "qwen3_5", "qwen3_5_moe")
FAMILY = MODEL_TYPES[2:]
"""Those with experts or a DeltaNet."""

QWEN35_SPLIT = QWEN2_SPLIT.replace(r"\p{L}+|\p{N}|", r"[\p{L}\p{M}]+|\p{N}|").replace(r"[^\s\p{L}", r"[^\s\p{L}\p{M}")

WHOLE = {"qwen3_5": "Qwen3_5ForConditionalGeneration", "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration"}
"""model_types that have a vision tower, and what the whole is called."""

COMMON = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 272,
    "max_position_embeddings": 2048,
    "rope_parameters": {"rope_theta": 10_000.0, "rope_type": "default"},
    "tie_word_embeddings": False,
    "eos_token_id": 262,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}
SHARED = {"shared_expert_intermediate_size": 64}
DELTA = {
    "head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "rope_parameters": COMMON["rope_parameters"] | {"partial_rotary_factor": 0.5},
}
SECTIONS = {"rope_parameters": DELTA["rope_parameters"] | {"mrope_section": [3, 3, 2], "mrope_interleaved": True}}
OWN: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {"head_dim": 32},
    "qwen2_moe": EXPERTS | SHARED | {"norm_topk_prob": False},
    "qwen3_moe": EXPERTS | {"norm_topk_prob": True, "head_dim": 32},
    "qwen3_next": EXPERTS | SHARED | DELTA | {"norm_topk_prob": True},
    "qwen3_5": DELTA | SECTIONS,
    "qwen3_5_moe": EXPERTS | SHARED | DELTA | SECTIONS,
}


def tiny(
    model_type: str,
    folder: Path,
    *,
    experts: int = 6,
    layout: str = "per-expert",
    dtype: str = "float32",
    wrapped: bool = False,
    mtp: int = 0,
    seed: int = 0,
    **settings: Any,
) -> Path:
    """A checkpoint of random weights in `folder`; `settings` are config.json's own.

    layout: experts stored alone ("per-expert") or "fused". wrapped: as the text part of a vision-language model, whose
    tower is three tensors. mtp: layers that guess further tokens. One `seed` gives the same weights in every layout.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import CONFIG_MAPPING, AutoModelForCausalLM

    settings = COMMON | OWN[model_type] | settings
    if "num_experts_per_tok" in settings:
        settings["num_experts"] = experts
    name = f"{model_type}_text" if model_type in WHOLE else model_type
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**settings), dtype=getattr(torch, dtype))
    _randomize(model.state_dict(keep_vars=True), seed)
    model.save_pretrained(folder)
    tensors = _laid_out(_loaded(folder), layout, experts)
    tensors |= _mtp_tensors(tensors, mtp, seed)
    config = json.loads((folder / "config.json").read_text())
    if mtp:
        config["mtp_num_hidden_layers"] = mtp
    if wrapped:
        tensors, config = _wrapped(model_type, tensors, config)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    split = QWEN35_SPLIT if model_type in WHOLE else QWEN2_SPLIT
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(settings["vocab_size"], split)))
    return folder


def reference_logits(folder: Path, ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float32]:
    """Of the text model by transformers, in float32: [len(ids), vocab]."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([[*map(int, ids)]])).logits[0].float().numpy()
    return logits


def _randomize(parameters: dict[str, Any], seed: int) -> None:
    """Weights that matter: matrices that keep the size of what they are given, and vectors that differ by place."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for name, weight in parameters.items():
        noise = torch.randn(weight.shape, generator=generator)
        if name.endswith("A_log"):
            value = noise * 0.5
        elif weight.ndim == 1:
            value = weight.detach().float() + 0.2 * noise
        else:
            value = noise * weight.shape[-1] ** -0.5
        weight.data.copy_(value)


def _loaded(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    return dict(load_file(folder / "model.safetensors"))


def _laid_out(tensors: dict[str, Any], layout: str, count: int) -> dict[str, Any]:
    """With experts as `layout` says, whichever way transformers saved them."""
    import torch

    laid = {name: weight for name, weight in tensors.items() if ".experts." not in name}
    for at in sorted({name.partition(".experts.")[0] + ".experts" for name in tensors if ".experts." in name}):
        if f"{at}.gate_up_proj" in tensors:
            both, down = tensors[f"{at}.gate_up_proj"], tensors[f"{at}.down_proj"]
        else:
            gate, up, down = (
                torch.stack([tensors[f"{at}.{i}.{part}_proj.weight"] for i in range(count)])
                for part in ("gate", "up", "down")
            )
            both = torch.cat([gate, up], 1)
        if layout == "fused":
            laid |= {f"{at}.gate_up_proj": both, f"{at}.down_proj": down}
            continue
        gate, up = both.chunk(2, 1)
        for part, weight in (("gate", gate), ("up", up), ("down", down)):
            laid |= {f"{at}.{i}.{part}_proj.weight": weight[i].clone() for i in range(count)}
    return laid


def _mtp_tensors(tensors: dict[str, Any], count: int, seed: int) -> dict[str, Any]:
    """Layers like the last one that has attention, and what joins a token's embedding to the hidden state."""
    import torch

    if not count:
        return {}
    last = max(int(found[1]) for name in tensors if (found := re.match(r"model\.layers\.(\d+)\.self_attn", name)))
    norm = tensors["model.norm.weight"]
    at = f"model.layers.{last}."
    shapes = {
        f"mtp.layers.{layer}.{name.removeprefix(at)}": weight.shape
        for layer in range(count)
        for name, weight in tensors.items()
        if name.startswith(at)
    }
    shapes["mtp.fc.weight"] = (len(norm), 2 * len(norm))
    norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
    shapes |= {f"mtp.{name}.weight": norm.shape for name in norms}
    generator = torch.Generator().manual_seed(seed + 1)
    return {
        name: (torch.randn(shape, generator=generator) * (0.2 if len(shape) == 1 else shape[-1] ** -0.5)).to(norm.dtype)
        for name, shape in shapes.items()
    }


def _wrapped(model_type: str, tensors: dict[str, Any], config: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """As the Hub has them: the text under model.language_model, the head, the vision tower and MTP layers beside it."""
    import torch

    named = {
        "model.language_model." + name.removeprefix("model.") if name.startswith("model.") else name: weight
        for name, weight in tensors.items()
    }
    for name, shape in (("patch_embed.proj.weight", (16, 3, 2, 4, 4)), ("pos_embed.weight", (9, 16)), ("norm", (16,))):
        named[f"model.visual.{name}"] = torch.full(shape, 0.25)
    whole = {
        "architectures": [WHOLE[model_type]],
        "model_type": model_type,
        "text_config": config,
        "vision_config": {"model_type": f"{model_type}_vision", "depth": 1, "hidden_size": 16},
        "tie_word_embeddings": config["tie_word_embeddings"],
    }
    return named, whole
