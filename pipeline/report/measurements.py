"""Everything measured, gathered into one nested dict without lists: what the report shows and the gate judges."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from pipeline import paths
from pipeline.files import read_json

KLD = ("mean", "median", "p99", "p99_9")


def gather(variants: Iterable[str], root: Path = Path()) -> dict[str, Any]:
    """measurements.json of the variants named, from what the stages left below `root`.

    A variant without a quality file is left out: the report says so, the gate fails on it.
    """
    reference = read_json(root / paths.REFERENCE / "meta.json")
    speed = read_json(root / paths.SPEED)
    machine = read_json(root / paths.MACHINE)
    measured = {
        name: _variant(root, name, speed["variants"].get(name, {}))
        for name in variants
        if (root / paths.quality(name)).exists() and (root / paths.variant(name)).exists()
    }
    ppl = next((entry.pop("reference_ppl") for entry in measured.values()), None)
    for entry in measured.values():
        entry.pop("reference_ppl", None)
    return {
        "reference": {"ppl": ppl, "engine": reference["engine"]},
        "identity": {key: value for key, value in reference.items() if key != "engine"},
        "machine": machine,
        "power_source": speed["power_source"],
        "variants": measured,
    }


def _variant(root: Path, name: str, speed: dict[str, Any]) -> dict[str, Any]:
    artifact = read_json(root / paths.variant(name) / "artifact.json")
    quality = read_json(root / paths.quality(name))
    return {
        "format": artifact["format"],
        "scheme": artifact["scheme"],
        "size_bytes": artifact["size_bytes"],
        "bits_per_weight": artifact["bits_per_weight"],
        "effective_types": {name: entry["weights"] for name, entry in artifact["effective_types"].items()},
        "ppl": {"value": quality["ppl"], **quality["ppl_interval"]},
        "reference_ppl": quality["reference_ppl"],
        "ln_ppl_ratio": quality["ln_ppl_ratio"],
        "kld": {key: {"value": quality["kld"][key], **quality["kld_interval"][key]} for key in KLD}
        | {"max": {"value": quality["kld"]["max"]}},
        "same_top": {"value": quality["same_top"], **quality["same_top_interval"]},
        "target_probability_rms": quality["target_probability_rms"],
        "bits_per_byte": quality["bits_per_byte"],
        "windows": quality["windows"],
        "scored_tokens": quality["scored_tokens"],
        "engine": quality["engine"],
        "identity": quality["identity"],
        "prefill": {n: _rate(task) for n, task in speed.get("prefill", {}).items()},
        "decode": {n: _rate(task) for n, task in speed.get("decode", {}).items()},
    }


def _rate(task: dict[str, Any]) -> dict[str, Any]:
    return {
        **task["tokens_per_second"],
        "rounds": len(task["seconds"]),
        "disturbed_rounds": len(task["disturbed_rounds"]),
    }
