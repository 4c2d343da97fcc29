"""What of a checkpoint a package has: all tensors of a forward pass, as they are stored."""

from __future__ import annotations

from pipeline.types import Dropped, ModelSpec


def dropped(spec: ModelSpec) -> tuple[Dropped, ...]:
    """What a checkpoint holds and a package of it does not: models with MTP layers are refused as a whole."""
    return spec.dropped
