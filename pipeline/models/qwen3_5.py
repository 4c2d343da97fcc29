"""Qwen3.5, 3.6 and 3.8, dense: a hybrid whose positions have three parts, and whose vision tower is not read."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from pipeline.models.hybrid import hybrid_spec
from pipeline.types import ModelSpec

SECTIONS = (11, 11, 10)


def spec(config: dict[str, Any], stored: Collection[str] = ()) -> ModelSpec:
    return hybrid_spec({"head_dim": 256, **config}, stored, fused=False, sections=SECTIONS)
