"""Figures of other machines, which `quantgate report --also` takes in: shown beside this one's, never compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import paths
from pipeline.errors import MeasurementError
from pipeline.files import read_object
from pipeline.metrics.machine import short_id
from pipeline.report.measurements import timed_figures, timing

NEXT_STEP = "Give what `quantgate benchmark --json` of this version wrote on another machine."
KEYS = ("machine", "power_source", "settings", "order", "variants")
LEFT_OUT = "no variant has its files"


def taken(file: Path, measurements: Mapping[str, Any], root: Path) -> dict[str, Any]:
    """'also' of measurements.json with what `file` says, under its machine and the device that was asked for there.

    An artifact is found again by the hashes of its files, whatever its name there; what is none of the variants that
    were measured here is named as left out.

    Raises:
        MeasurementError: without speeds; of this machine; of a machine and device that are there, whose rounds did not
            take turns with these.
        AttributeError, KeyError, TypeError: speeds that are not as this version writes them.
    """
    speed = read_object(file, MeasurementError)
    if lacking := [key for key in KEYS if key not in speed]:
        raise MeasurementError(f"{file} holds no speeds: it lacks {', '.join(lacking)}. {NEXT_STEP}")
    machine, device = speed["machine"], str(speed["settings"]["device"])
    run = _run(speed, _hashes(measurements["variants"], root))
    at = short_id(machine)
    if machine == measurements["machine"]:
        raise MeasurementError(
            f"{file} is of the machine {at}, which this report is of; its speeds are those of {paths.SPEED}. Give "
            "figures of another machine."
        )
    of_machine = measurements["also"].get(at, {"machine": machine, "runs": {}})
    if device in of_machine["runs"]:
        raise MeasurementError(
            f"{file} is the second of the machine {at} and the device {device}. Speeds are told apart where rounds "
            "took turns: run `quantgate benchmark` there once, with all artifacts."
        )
    return {**measurements["also"], at: {**of_machine, "runs": {**of_machine["runs"], device: run}}}


def _hashes(names: Mapping[str, Any], root: Path) -> dict[str, list[str]]:
    """Of the files of each variant, sorted: a file of others may have another name there."""
    return {name: sorted(read_object(root / paths.variant(name) / "artifact.json")["files"].values()) for name in names}


def _run(speed: Mapping[str, Any], hashes: Mapping[str, Sequence[str]]) -> dict[str, Any]:
    """The figures of one file, by the names that its artifacts have here."""
    there = {name: sorted(timed["artifact"].values()) for name, timed in speed["variants"].items()}
    here = {name: _first(name, there, wanted) for name, wanted in hashes.items()}
    return {
        "power_source": speed["power_source"],
        "timing": timing(speed),
        "variants": {name: timed_figures(speed["variants"][of]) for name, of in here.items() if of is not None},
        "left_out": {name: LEFT_OUT for name, found in there.items() if found not in hashes.values()},
    }


def _first(name: str, there: Mapping[str, Sequence[str]], wanted: Sequence[str]) -> str | None:
    """Which artifact has these hashes: of several with the same bytes that of the same name, else the first."""
    found = [other for other, hashes in there.items() if hashes == wanted]
    return name if name in found else next(iter(found), None)
