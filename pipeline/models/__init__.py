"""config.json -> ModelSpec, one file per model_type."""

from __future__ import annotations

from typing import Any

from pipeline.errors import CheckpointError, suggestion
from pipeline.models import qwen2, qwen3
from pipeline.types import ModelSpec

MODEL_TYPES = {"qwen2": qwen2.spec, "qwen3": qwen3.spec}


def spec_of(config: dict[str, Any]) -> ModelSpec:
    """The architecture of a checkpoint.

    Raises:
        CheckpointError: an unknown model_type, a missing key, or a setting that would change the function unseen.
    """
    model_type = str(config.get("model_type"))
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not supported; {suggestion(model_type, [*MODEL_TYPES])}"
        )
    return MODEL_TYPES[model_type](config)
