"""A config.json as mlx-lm understands it, which is not always what transformers makes of the same file.

Source: the behaviour of mlx-lm 0.32.2 (models/rope_utils.py: initialize_rope, YarnRoPE; models/qwen3_5.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pipeline.errors import ArtifactError, CheckpointError, listed
from pipeline.models import MODEL_TYPES, spec_of
from pipeline.models.readers import MlxLm
from pipeline.models.settings import is_positive
from pipeline.types import ModelSpec

POSITIONS = ("mrope_section", "mrope_interleaved")
"""Keys of a rope of several positions: in a text they are one and the same, and mlx-lm reads neither."""

ROPE_PARAMETERS = {"rope_theta": 100_000.0, "partial_rotary_factor": 0.25}
"""What they are where mlx-lm looks in rope_parameters and finds none."""

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
    """The same settings in keys that transformers and pipeline.models read as mlx-lm reads the given ones; of a larger
    model, those of its text part.

    Raises:
        ArtifactError: a key that mlx-lm needs is missing, or one has a value that it cannot build or that no Qwen model
            is trained with.
    """
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_TYPES:
        return config
    reader = MODEL_TYPES[model_type].mlx_lm
    found = taken(config, reader)
    settings = rope(found, reader)
    settings["rope_scaling"] = _scaling(settings["rope_scaling"])
    read = {**reader.defaults, **found, **reader.fixed, **settings, "model_type": model_type}
    problems = [f"{key} is missing" for key in reader.required if read.get(key) is None]
    problems += _problems(read, reader)
    if problems:
        raise ArtifactError(f"config.json of {model_type}, as mlx-lm reads it:\n{listed(problems)}")
    ignored = {"rope_parameters", "num_local_experts"}
    if "full_attention_interval" in reader.defaults:
        ignored.add("layer_types")
    width, heads = read["hidden_size"], read["num_attention_heads"]
    if read.get("head_dim") is None and is_positive(width) and is_positive(heads):
        read["head_dim"] = width // heads
    return {key: value for key, value in read.items() if key not in ignored}


def taken(config: Mapping[str, Any], reader: MlxLm) -> dict[str, Any]:
    """The settings that mlx-lm takes: config.json's own, or those of its text_config where its file looks there.

    Raises:
        ArtifactError: a text_config that is no object.
    """
    if not reader.nested or "text_config" not in config:
        return {**config}
    if not isinstance(config["text_config"], dict):
        raise ArtifactError(f"config.json: text_config must be an object, found {config['text_config']!r}")
    return {**config["text_config"]}


def rope(found: Mapping[str, Any], reader: MlxLm) -> dict[str, Any]:
    """rope_scaling as mlx-lm takes it of settings, and of rope_theta and partial_rotary_factor those that it does not
    take from beside it.
    """
    scaling, parameters = found.get("rope_scaling"), found.get("rope_parameters")
    if reader.rope == "nowhere":
        return {"rope_scaling": None}
    if parameters and not isinstance(parameters, dict):
        return {"rope_scaling": parameters}  # refused by its kind
    theta = {}
    if reader.rope == "either" and parameters:
        scaling = parameters if scaling is None else scaling
        theta = {"rope_theta": parameters.get("rope_theta")} if found.get("rope_theta") is None else {}
    elif reader.rope == "rope_parameters":
        if parameters or "rope_parameters" not in found:  # then what stands beside them is not read
            found = scaling = parameters or {}
        theta = {key: found.get(key, default) for key, default in ROPE_PARAMETERS.items()}
    return {**theta, "rope_scaling": scaling}


def _scaling(found: Any) -> Any:
    """transformers' keys for what initialize_rope does; theta does not come from here."""
    if not isinstance(found, dict):
        return found
    positions = {key: found[key] for key in POSITIONS if key in found}
    kind = found.get("type") or found.get("rope_type", "default")
    if kind in ("default", "mrope"):
        return {"rope_type": "default", **positions} if positions else None
    if kind != "yarn":
        return {"rope_type": kind, "factor": found.get("factor"), **positions}
    own = YARN | {key: value for key, value in found.items() if key in YARN}
    scaling: dict[str, Any] = {"rope_type": kind, "factor": found.get("factor"), **own, **positions}
    factor, *numbers = (scaling[key] for key in ("factor", "mscale", "mscale_all_dim"))
    if not all(isinstance(n, int | float) and abs(n) < MOST for n in (factor, *numbers)) or factor < 1:
        return scaling  # refused by its keys and values
    above, below = (0.1 * n * math.log(factor) + 1 for n in numbers)
    if not (above > 0 and below > 0):
        return scaling
    for key in ("mscale", "mscale_all_dim"):
        del scaling[key]
    return scaling | {"attention_factor": above / below}


def _problems(read: Mapping[str, Any], reader: MlxLm) -> Iterator[str]:
    """What mlx-lm does not run, or runs as no Qwen model is trained."""
    if reader.traditional and read.get("rope_traditional"):
        yield "rope_traditional: pairs of neighbours are rotated, which no Qwen model is trained with"
    interval, layers = (read.get(key) for key in ("full_attention_interval", "num_hidden_layers"))
    if is_positive(interval) and is_positive(layers) and interval > layers:
        yield f"full_attention_interval {interval}: it needs one layer of attention among num_hidden_layers, {layers}"
