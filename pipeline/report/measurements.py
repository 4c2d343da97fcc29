"""Everything measured, gathered into one nested dict without lists: what the report shows and the gate judges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import paths
from pipeline.chat import load_chat
from pipeline.errors import MeasurementError
from pipeline.files import read_object
from pipeline.metrics.pairs import by_window
from pipeline.metrics.stored import AGAIN, load
from pipeline.report import parts
from pipeline.report.fronts import fronts

KLD = ("mean", "median", "p99", "p99_9")
MEMORY = ("peak_memory_bytes", "memory_by", "kv_bytes")
UNTIMED: Mapping[str, Any] = {
    **{key: {} for key in ("prefill", "decode", "not_measured", "cold_start")},
    **dict.fromkeys(("engine", "unrepresentative", "placement", *MEMORY)),
}
"""What speed.json says of a variant that it does not hold."""


def gather(variants: Iterable[str], root: Path = Path()) -> dict[str, Any]:
    """measurements.json of the variants named, from what the stages left below `root`.

    A variant without a quality file is left out: the report says so, the gate fails on it.

    Raises:
        MeasurementError: figures that do not belong together: of another artifact, corpus or checkpoint; a variant
            without its scores per token, which variants are compared with each other by.
    """
    reference = read_object(root / paths.REFERENCE / "meta.json")
    speed = read_object(root / paths.SPEED)
    identity = {key: value for key, value in reference.items() if key not in {"engine", "model"}}
    measured: dict[str, Any] = {}
    klds: dict[str, NDArray[np.float64]] = {}
    reference_ppl = None
    for name in variants:
        if (root / paths.quality(name)).exists() and (root / paths.variant(name)).exists():
            artifact = read_object(root / paths.variant(name) / "artifact.json")
            quality = read_object(root / paths.quality(name))
            timed = speed["variants"].get(name, {})
            with as_written(f"artifact.json, quality or speed of {name}"):
                _check(name, artifact, quality, timed, identity)
                measured[name] = _variant(artifact, quality, timed)
                klds[name] = by_window(load(root / paths.scores(name), quality).kld)
            reference_ppl = quality["reference_ppl"]
    with as_written("size, bits per weight or speed of the variants"):
        compared = fronts(measured, klds)
    return {
        "reference": {
            "ppl": reference_ppl,
            "engine": reference["engine"],
            "model": reference.get("model"),
            "reply": _reference_reply(root),
        },
        "identity": identity,
        "machine": speed["machine"],
        "power_source": speed["power_source"],
        "timing": timing(speed),
        "variants": measured,
        "fronts": compared,
        "also": {},
    }


def timing(speed: Mapping[str, Any]) -> dict[str, Any]:
    """Settings and order of speed.json, without lists."""
    return {key: value for key, value in speed["settings"].items() if key != "prompt_lengths"} | {
        "order": speed["order"]
    }


@contextmanager
def as_written(what: str, next_step: str = AGAIN) -> Iterator[None]:
    """A key that a file lacks, or holds something else than this version writes, as an error of ours.

    Raises:
        MeasurementError: saying what was read and what failed.
    """
    try:
        yield
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise MeasurementError(
            f"{what} is not as this version writes it ({type(error).__name__}: {error}). {next_step}"
        ) from error


def _check(
    name: str, artifact: dict[str, Any], quality: dict[str, Any], timed: dict[str, Any], identity: dict[str, Any]
) -> None:
    """The figures of a variant are of the artifact that lies there, and of the reference's windows."""
    seen = {"scored": quality.get("artifact")} | ({"timed": timed.get("artifact")} if timed else {})
    for what, found in seen.items():
        if found != artifact["files"]:
            raise MeasurementError(
                f"{name}: the artifact that was {what} is not the one that lies there: expected {artifact['files']}, "
                f"found {found}. Run dvc repro."
            )
    scored_on = quality.get("identity") or {}
    keys = [key for key in {**identity, **scored_on} if scored_on.get(key) != identity.get(key)]
    if keys:
        raise MeasurementError(f"{name} was scored on another {', '.join(keys)} than the reference. Run dvc repro.")


def _reference_reply(root: Path) -> dict[str, Any] | None:
    """What the reference says to the chat's question: None where the checkpoint has no chat template. All but `asked`
    are None where its reply was not computed.
    """
    chat = load_chat(root / paths.REFERENCE)
    if chat is None:
        return None
    reply = chat.reply
    asked = chat.messages[-1]["content"]
    if reply is None:
        return {"asked": asked, "text": None, "tokens": None, "stopped": None}
    return {"asked": asked, "text": reply.text, "tokens": len(reply.ids), "stopped": reply.stopped}


def _variant(artifact: dict[str, Any], quality: dict[str, Any], timed: dict[str, Any]) -> dict[str, Any]:
    return {
        "format": artifact["format"],
        "scheme": artifact["scheme"],
        "path": artifact["path"],
        "tensors_sha256": artifact["tensors_sha256"],
        "size_bytes": artifact["size_bytes"],
        "folder_bytes": artifact["folder_bytes"],
        "bits_per_weight": artifact["bits_per_weight"],
        "effective_types": {name: entry["weights"] for name, entry in artifact["effective_types"].items()},
        **parts.measured(artifact, quality),
        "ppl": {"value": quality["ppl"], **quality["ppl_interval"]},
        "ln_ppl_ratio": quality["ln_ppl_ratio"],
        "kld": {key: {"value": quality["kld"][key], **quality["kld_interval"][key]} for key in KLD}
        | {"max": {"value": quality["kld"]["max"]}},
        "same_top": {"value": quality["same_top"], **quality["same_top_interval"]},
        "target_probability_rms": quality["target_probability_rms"],
        "bits_per_byte": quality["bits_per_byte"],
        "windows": quality["windows"],
        "scored_tokens": quality["scored_tokens"],
        "reply": quality["reply"],
        "engine": quality["engine"],
        "parity": quality["parity"],
        "identity": quality["identity"],
        **timed_figures(timed),
    }


def timed_figures(timed: Mapping[str, Any]) -> dict[str, Any]:
    """Of a variant of speed.json, what measurements.json holds: figures without their samples; of one that was not
    timed, and so is empty, the same keys without figures.
    """
    timed = timed or UNTIMED
    cold = timed["cold_start"]
    return {
        "timing_engine": timed["engine"] or {},
        "prefill": {n: _rate(task) for n, task in timed["prefill"].items()},
        "decode": {n: _rate(task) for n, task in timed["decode"].items()},
        "unrepresentative": timed["unrepresentative"],
        "not_measured": timed["not_measured"],
        "cold_start": cold
        and {
            **cold,
            **{
                key: {"value": cold[key]["value"], "n": len(cold[key]["samples"])}
                for key in ("load_seconds", "first_prefill_seconds")
            },
        },
        **{key: timed[key] for key in MEMORY},
        "placement": timed["placement"],
    }


def _rate(task: dict[str, Any]) -> dict[str, Any]:
    return {
        **task["tokens_per_second"],
        "rounds": len(task["seconds"]),
        "disturbed_rounds": len(task["disturbed_rounds"]),
        "drift": task["drift"],
    }
