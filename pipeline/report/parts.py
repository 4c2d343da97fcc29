"""What an artifact has of its checkpoint: parts that were dropped, importance matrices, routers of experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.overlap import NO_OVERLAP
from pipeline.report.text import binary, escaped, importance
from pipeline.types import ExpertUse, UsedImatrix


def measured(artifact: Mapping[str, Any], quality: Mapping[str, Any]) -> dict[str, Any]:
    """Of artifact.json and quality.json, without lists: counts in place of names."""
    return {
        "dropped": {
            part["part"]: {"tensors": len(part["tensors"]), "weights": part["weights"], "reason": part["reason"]}
            for part in artifact.get("dropped") or []
        },
        "imatrix": _imatrix(artifact.get("imatrix"), quality.get("calibration_overlap")),
        "routers": ", ".join(artifact.get("routers") or []),
    }


def _imatrix(found: Mapping[str, Any] | None, overlap: str | None) -> dict[str, Any] | None:
    if found is None:
        return None
    uses = tuple(ExpertUse(**use) for use in found["experts"])
    lists = {key: tuple(found[key]) for key in ("datasets", "without")}
    used = UsedImatrix(**{**found, **lists, "experts": uses})
    return {
        **{key: found[key] for key in ("sha256", "chunks", "chunk_size", "text_sha256", "matrices")},
        "datasets": ", ".join(used.datasets),
        "without": len(used.without),
        "experts": {str(use["layer"]): {k: use[k] for k in use if k != "layer"} for use in found["experts"]},
        "overlap": overlap,
        "note": importance(used, known=overlap == NO_OVERLAP),
    }


def checkpoint(model: Mapping[str, Any] | None) -> str:
    """'30.53 B parameters, of which 3.35 B take part in a token; a token's keys and values take 96 KiB in f16.'"""
    if model is None:
        return ""
    weights, active = model["weights"], model["active_weights"]
    text = f"{_count(weights)} parameters"
    text += f", of which {_count(active)} take part in a token" if active < weights else ""
    text += f"; a token's keys and values take {binary(model['kv_bytes_per_token'])} in f16"
    if model["state_bytes"]:
        text += (
            f", in {model['attention_layers']} of {model['layers']} layers; the others keep a state of "
            f"{binary(model['state_bytes'])} in float32, however long the text"
        )
    if model["mtp_weights"]:
        text += f". Beside them, {_count(model['mtp_weights'])} of MTP layers, which guess further tokens"
    return f"{text}."


def _count(weights: int) -> str:
    """'30.53 B', '6.82 M'."""
    return f"{weights / 1e9:.2f} B" if weights >= 1e9 else f"{weights / 1e6:.2f} M"


def dropped(variants: Mapping[str, Any]) -> list[dict[str, str]]:
    """A row for each part and reason, with the variants that go without."""
    names: dict[tuple[str, int, int, str], list[str]] = {}
    for name, variant in variants.items():
        for part, found in variant["dropped"].items():
            names.setdefault((part, found["tensors"], found["weights"], found["reason"]), []).append(name)
    every = len(variants)
    return [
        {
            "part": part,
            "tensors": f"{tensors:,}",
            "weights": f"{weights:,}",
            "reason": escaped(reason),
            "variants": "all" if len(without) == every else ", ".join(without),
        }
        for (part, tensors, weights, reason), without in names.items()
    ]


def imatrices(variants: Mapping[str, Any]) -> list[dict[str, str]]:
    """What each importance matrix is, and the variants that were made by it."""
    names: dict[str, list[str]] = {}
    for name, variant in variants.items():
        if variant["imatrix"] is not None:
            names.setdefault(variant["imatrix"]["note"], []).append(name)
    return [{"variants": ", ".join(of), "note": escaped(_sentences(note))} for note, of in names.items()]


def _sentences(note: str) -> str:
    """Its lines one behind another; the last one's full stop is the template's."""
    first, *more = note.splitlines()
    return ". ".join([first, *(line[0].upper() + line[1:] for line in more)]).removesuffix(".")


def noted(variant: Mapping[str, Any]) -> list[str]:
    """Beside a variant's types."""
    notes = [f"routers {variant['routers']}"] if variant["routers"] else []
    return notes + (["with an importance matrix"] if variant["imatrix"] is not None else [])
