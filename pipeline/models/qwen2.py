"""Qwen2 and Qwen2.5: biases on Q, K and V, no norm on them."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.dense import dense_spec
from pipeline.types import ModelSpec


def spec(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    return dense_spec(config, qkv_bias=True, qk_norm=False)
