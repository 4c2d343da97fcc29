"""config.json -> ModelSpec, one file per model_type."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.errors import CheckpointError, suggestion
from pipeline.models import qwen2, qwen2_moe, qwen3, qwen3_5, qwen3_5_moe, qwen3_moe, qwen3_next
from pipeline.models.hybrid import MTP
from pipeline.models.stored import located, plain
from pipeline.types import ModelSpec

MODEL_TYPES = {
    "qwen2": qwen2.ARCHITECTURE,
    "qwen2_moe": qwen2_moe.ARCHITECTURE,
    "qwen3": qwen3.ARCHITECTURE,
    "qwen3_moe": qwen3_moe.ARCHITECTURE,
    "qwen3_next": qwen3_next.ARCHITECTURE,
    "qwen3_5": qwen3_5.ARCHITECTURE,
    "qwen3_5_moe": qwen3_5_moe.ARCHITECTURE,
}

WHOLES = {found.text_part: whole for whole, found in MODEL_TYPES.items() if found.text_part is not None}
"""What a larger model is called, by what transformers calls its text part."""


def spec_of(config: dict[str, Any], shapes: Mapping[str, tuple[int, ...]] | None = None) -> ModelSpec:
    """The architecture of a checkpoint; of one that reads images as well, its text part.

    `shapes` are those of the stored tensors, by name: they tell whether experts are fused, how names begin, which MTP
    layers there are and what is dropped. Without them each tensor is taken to be stored as the Hub's checkpoints do.

    Raises:
        CheckpointError: an unknown model_type, a missing key, or a setting that would change the function unseen.
    """
    text = text_config(config)
    model_type = str(text.get("model_type"))
    model_type = WHOLES.get(model_type, model_type)
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"config.json: model_type {model_type!r} is not supported; {suggestion(model_type, [*MODEL_TYPES])}"
        )
    shapes = shapes or {}
    spec = MODEL_TYPES[model_type].read({**text, "model_type": model_type}, {plain(name) for name in shapes})
    return located(spec, shapes, wants_mtp=text.get(MTP) != 0) if shapes else spec


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The settings of the text model as transformers reads them: config.json itself, or its text_config.

    Raises:
        CheckpointError: a text_config that is no object.
    """
    own = config.get("text_config")
    if own is None:
        whole = MODEL_TYPES.get(str(config.get("model_type")))
        return config if whole is None or whole.text_part is None else {**config, "model_type": whole.text_part}
    if not isinstance(own, dict):
        raise CheckpointError(f"config.json: text_config must be an object, found {own!r}. Fetch it again.")
    shared = {key: config[key] for key in ("tie_word_embeddings", "dtype", "torch_dtype") if key in config}
    return {**shared, **own}
