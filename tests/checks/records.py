"""Records made by hand."""

from __future__ import annotations

from typing import Any

from figures import ENGINE, IDENTITY

from pipeline.checks.record import ENGINE as KEYS
from pipeline.checks.record import Record

LOSSES = tuple(4.0 + i / 64 for i in range(int(IDENTITY["windows"])))
TENSORS = {f"blk.{i}.attn_q.weight": f"Q8_0 {i:016x}" for i in range(20)}


def a_record(engine: Any = None, identity: Any = None, **other: Any) -> Record:
    """`engine` and `identity` are what is other in them."""
    fields: dict[str, Any] = {
        **{"format": "gguf", "scheme": "q8_0", "path": None, "files": {"model.gguf": "ab" * 32}, "tensors": TENSORS},
        "engine": {key: ENGINE[key] for key in KEYS} | (engine or {}),
        "identity": IDENTITY | (identity or {}),
        "window_nll": LOSSES,
    }
    return Record(**fields | other)
