"""Artifact folders timed side by side: what the stage `benchmark` and the command line both do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from pipeline import artifact as artifacts
from pipeline.errors import MeasurementError, ParamsError
from pipeline.formats import room
from pipeline.metrics import machine, timing
from pipeline.progress import progress
from pipeline.types import Artifact, Runtime


def named(folders: Sequence[Path]) -> dict[str, Path]:
    """Folders by their names.

    Raises:
        ParamsError: two bear the same name.
    """
    by_name = {folder.resolve().name: folder for folder in folders}
    if len(by_name) < len(folders):
        raise ParamsError("two artifacts bear the same folder name: rename one, so that the table can tell them apart.")
    return by_name


def benchmark_folders(
    folders: Mapping[str, Path], prompt_lengths: Sequence[int], decode: int, rounds: int, settings: dict[str, Any]
) -> dict[str, Any]:
    """speed.json: machine, settings, and of each artifact the raw samples and rates.

    `settings` are device, threads and flash_attention of the params' `benchmark`.
    """
    loaded = {name: artifacts.load(folder) for name, folder in folders.items()}
    _check_memory(loaded)
    flash = settings["flash_attention"]
    context = max(prompt_lengths) + decode
    with ExitStack() as stack:
        runtimes: dict[str, Runtime] = {}
        for name, artifact in loaded.items():
            runtimes[name] = room(artifact.format, "run").open_runtime(
                artifacts.location(folders[name], artifact),
                artifact,
                context=context,
                threads=settings["threads"],
                flash_attention=None if flash == "auto" else flash,
                device=settings["device"],
            )
            stack.callback(runtimes[name].close)
        with progress("timing", len(runtimes) * (rounds + 1)) as advance:
            samples = timing.measure(
                runtimes, prompt_lengths=prompt_lengths, decode=decode, rounds=rounds, advance=advance
            )
        engines = {name: asdict(runtime.engine) for name, runtime in runtimes.items()}
    variants = timing.as_json(samples, engines)
    return {
        "machine": machine.fingerprint(),
        "power_source": machine.power_source(),
        "settings": {"prompt_lengths": list(prompt_lengths), "decode": decode, "rounds": rounds, **settings},
        "variants": {name: {"artifact": loaded[name].files, **variants[name]} for name in variants},
    }


def _check_memory(loaded: Mapping[str, Artifact]) -> None:
    """Variants are loaded side by side, so that rounds can alternate."""
    import psutil

    needed, memory = sum(artifact.size_bytes for artifact in loaded.values()), psutil.virtual_memory().total
    if needed > memory / 2:
        raise MeasurementError(
            f"the artifacts need {needed / 1e9:.1f} GB side by side, more than half of the {memory / 1e9:.1f} GB here. "
            "Benchmark fewer at once: take variants out of params.yaml, or use `quantgate benchmark` on some."
        )
