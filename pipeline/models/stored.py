"""The names under which checkpoints store a model's tensors: alone, or as the text part of something larger."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod

from pipeline.types import Dropped, ModelSpec, Span, TensorSpec

PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.mtp.": "mtp.",
}
"""What a text model's names begin with inside a larger one, by transformers and by others, and alone."""

VISION = "vision tower", "only the text part is converted"

PARTS = {
    "model.visual.": VISION,
    "visual.": VISION,
    "vision_tower.": VISION,
}
"""What is dropped and why, by how names begin."""

UNWANTED_MTP = {"mtp.": ("MTP layers", "config.json says mtp_num_hidden_layers 0")}
"""Dropped too where config.json does say so: else they are tensors of the model, or unknown ones."""


def plain(name: str) -> str:
    """The name that a stored tensor has in the text model alone."""
    for prefix, own in PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return name


def located(spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]], wants_mtp: bool = True) -> ModelSpec:
    """`spec` with spans by the names and with `dropped` of a checkpoint that stores tensors of `shapes`; `wants_mtp` is
    False where its config.json says that it has no MTP layers.
    """
    names = {plain(name): name for name in shapes}
    prefixes = {own: prefix for prefix, own in PREFIXES.items() if any(name.startswith(prefix) for name in shapes)}

    def stored(name: str) -> str:
        if name in names:
            return names[name]
        own = next((own for own in prefixes if name.startswith(own)), "")  # it is missing: named like the others
        return prefixes.get(own, "") + name.removeprefix(own)

    def placed(tensor: TensorSpec) -> TensorSpec:
        spans = tuple(Span(stored(span.name), span.shape, span.start, span.count) for span in tensor.stored)
        is_own = [span.name for span in spans] == [tensor.name]
        return tensor if is_own and not tensor.spans else replace(tensor, spans=spans)

    tensors, mtp = (tuple(placed(tensor) for tensor in part) for part in (spec.tensors, spec.mtp))
    known = {span.name for tensor in (*tensors, *mtp) for span in tensor.stored}
    unknown = {name: shape for name, shape in shapes.items() if name not in known}
    return replace(
        spec, tensors=tensors, mtp=mtp, dropped=tuple(_dropped(unknown, PARTS if wants_mtp else PARTS | UNWANTED_MTP))
    )


def _dropped(unknown: Mapping[str, tuple[int, ...]], known: Mapping[str, tuple[str, str]]) -> Iterator[Dropped]:
    parts: dict[tuple[str, str], list[str]] = {}
    for name in unknown:
        found = next((part for prefix, part in known.items() if plain(name).startswith(prefix)), None)
        if found is not None:
            parts.setdefault(found, []).append(name)
    for (part, reason), names in parts.items():
        yield Dropped(part, reason, tuple(sorted(names)), sum(prod(unknown[name]) for name in names))
