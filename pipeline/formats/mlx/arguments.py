"""A config.json as mlx-lm understands it, which is not always what transformers makes of the same file.

Source: the behaviour of mlx-lm 0.32.2 (models/qwen2.py and qwen3.py: ModelArgs; models/rope_utils.py).
"""

from __future__ import annotations

import math
from typing import Any

from pipeline.errors import ArtifactError, CheckpointError, listed
from pipeline.models import spec_of
from pipeline.types import ModelSpec

REQUIRED = (
    *("hidden_size", "num_hidden_layers", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("rms_norm_eps", "vocab_size"),
)
QWEN3_REQUIRED = ("max_position_embeddings", "head_dim", "tie_word_embeddings")
QWEN2_DEFAULTS = {"max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "tie_word_embeddings": True}

YARN = {"original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1, "mscale": 1, "mscale_all_dim": 0}
"""What YarnRoPE takes, and its defaults."""

MOST = 1e9  # no factor is; infinity is none either


def read_spec(config: dict[str, Any]) -> ModelSpec:
    """The architecture that mlx-lm builds from a config.json.

    Raises:
        ArtifactError: one that is not supported, or that mlx-lm cannot build.
    """
    try:
        return spec_of(as_read(config))
    except CheckpointError as error:
        raise ArtifactError(f"as mlx-lm reads it, {error}") from error


def as_read(config: dict[str, Any]) -> dict[str, Any]:
    """The same settings in keys that transformers and pipeline.models read as mlx-lm reads the given ones.

    Raises:
        ArtifactError: a key that mlx-lm needs is missing, or one that no Qwen model is trained with.
    """
    read = {key: value for key, value in config.items() if key not in {"rope_parameters", "rope_scaling"}}
    scaling = config.get("rope_scaling")
    match config.get("model_type"):
        case "qwen2":
            read = QWEN2_DEFAULTS | read
            read.pop("head_dim", None)  # it takes hidden_size / num_attention_heads
        case "qwen3":
            parameters = config.get("rope_parameters") or {}
            scaling = scaling or parameters
            if read.get("rope_theta") is None and isinstance(parameters, dict):
                read["rope_theta"] = parameters.get("rope_theta")
        case _:
            return config
    required = [*REQUIRED, *(QWEN3_REQUIRED if config["model_type"] == "qwen3" else ()), "rope_theta"]
    problems = [f"{key} is missing" for key in required if read.get(key) is None]
    if read.get("rope_traditional"):
        problems.append("rope_traditional: pairs of neighbours are rotated, which no Qwen model is trained with")
    if problems:
        raise ArtifactError(f"config.json of {config['model_type']}, as mlx-lm reads it:\n{listed(problems)}")
    return read | {"rope_scaling": _scaling(scaling) if isinstance(scaling, dict) else scaling}


def _scaling(found: dict[str, Any]) -> dict[str, Any] | None:
    """transformers' keys for what initialize_rope does; theta does not come from here."""
    kind = found.get("type") or found.get("rope_type", "default")
    if kind == "default":
        return None
    if kind != "yarn":
        return {"rope_type": kind, "factor": found.get("factor")}
    own = YARN | {key: value for key, value in found.items() if key in YARN}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": found.get("factor"), **own}
    factor, *numbers = (scaling[key] for key in ("factor", "mscale", "mscale_all_dim"))
    if not all(isinstance(n, int | float) and abs(n) < MOST for n in (factor, *numbers)) or factor < 1:
        return scaling  # refused by its keys and values
    above, below = (0.1 * n * math.log(factor) + 1 for n in numbers)
    if not (above > 0 and below > 0):
        return scaling
    for key in ("mscale", "mscale_all_dim"):
        del scaling[key]
    return scaling | {"attention_factor": above / below}
