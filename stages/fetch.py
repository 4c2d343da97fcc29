"""checkpoint, variants, corpus, calibration text and baseline -> artifacts/source.json, builds.json, text.json,
calibration.json, accepted.json: what they are. Runs always.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipeline import corpus, params, paths
from pipeline.activations import is_summed
from pipeline.console import Command
from pipeline.errors import CorpusError, MeasurementError, QuantizationError
from pipeline.files import sha256, write_json
from pipeline.formats import IMATRIX_FORMAT, room
from pipeline.models import spec_of
from pipeline.params import Params, Variant
from pipeline.source.hub import open_checkpoint
from pipeline.types import ModelSpec


@click.command(cls=Command)
def main() -> None:
    """Identify the checkpoint, the variants and the corpus of params.yaml, and the baseline, if there is one."""
    given = params.load(paths.PARAMS)
    builds = {name: _build(variant) for name, variant in given.variants.items()}  # refused before hours of work
    for name, variant in given.variants.items():
        run, scored = room(variant.format, "run"), given.evaluate_of(name)
        if variant.scheme is not None:
            scheme = room(variant.format, "schemes").scheme(variant.scheme, variant.options)
            run.check_window(scheme, given.corpus.context)
        check = run.check_settings
        check(scored.kv_type, scored.flash_attention)
        timed = asdict(given.benchmark) | given.timed_as(name)
        flash = timed["flash_attention"]
        check(timed["kv_type"], None if flash == "auto" else flash, timed["device"])
    with open_checkpoint(given.checkpoint, given.revision) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        _check_plans(given, spec)
        _check_memory(given, spec)
        write_json(paths.SOURCE, checkpoint.identity())
    write_json(paths.BUILDS, builds)
    path = corpus.text_path(given.corpus.name, given.corpus.path)
    write_json(paths.TEXT, {"name": given.corpus.name, "sha256": (digest := sha256(path))})
    write_json(paths.CALIBRATION, _calibration(given, digest))
    accepted = sha256(paths.BASELINE) if paths.BASELINE.exists() else None  # DVC takes no dependency that may be absent
    write_json(paths.ACCEPTED, {"baseline": accepted})


def _check_plans(given: Params, spec: ModelSpec) -> None:
    """Refuse schemes that cannot hold this checkpoint, all of them at once: `convert` would, once others are made.

    Raises:
        QuantizationError: naming the variants.
        ArtifactError: an importance matrix of another model.
    """
    problems: dict[str, str] = {}
    for name, variant in given.variants.items():
        if variant.scheme is not None:
            scheme = room(variant.format, "schemes").scheme(variant.scheme, variant.options)
            by = (_covered(variant.imatrix, spec),) if variant.imatrix else ()  # which only one format takes
            try:
                room(variant.format, "plan").plan(spec, scheme, *by)
            except QuantizationError as error:
                problems[name] = str(error)
    if problems:
        raise QuantizationError(_by_variants(problems))


def _check_memory(given: Params, spec: ModelSpec) -> None:
    """Refuse variants that could not be scored here, all of them at once: `evaluate` would, once the reference is made.

    Raises:
        MeasurementError: naming the variants.
    """
    found = {name: room(variant.format, "run").unscorable(spec.weights) for name, variant in given.variants.items()}
    problems = {name: problem for name, problem in found.items() if problem}
    if problems:
        raise MeasurementError(_by_variants(problems))


def _by_variants(problems: Mapping[str, str]) -> str:
    """Each problem once, behind the variants that have it."""
    names: dict[str, list[str]] = {}
    for name, problem in problems.items():
        names.setdefault(problem, []).append(f"variants.{name}")
    return "params.yaml: " + "\n\n".join(f"{', '.join(of)}: {problem}" for problem, of in names.items())


def _covered(imatrix: bool | str, spec: ModelSpec) -> set[str]:
    """The matrices that an importance matrix has data for: of a file, or of our own, which is yet to be made.

    Raises:
        ArtifactError: the file is of another model.
    """
    importance = room(IMATRIX_FORMAT, "importance")
    if isinstance(imatrix, str):
        found: set[str] = {*importance.fitted(Path(imatrix), spec).values}
    else:
        found = importance.covered_by({tensor.name for tensor in spec.tensors if is_summed(tensor)}, spec)
    return found


def _build(variant: Variant) -> dict[str, Any]:
    """What decides a variant's artifact, beside the checkpoint: a file of others by its hashes."""
    if variant.path is not None:
        files = room(variant.format, "given").hashes(Path(variant.path))
        return {"format": variant.format, "path": variant.path, "files": files}
    scheme = room(variant.format, "schemes").scheme(variant.scheme, variant.options)
    built: dict[str, Any] = {"format": variant.format, "scheme": variant.scheme, "types": dict(variant.types)}
    built |= {"sizes": variant.sizes} if variant.sizes else {}
    if not variant.imatrix:
        return built
    room(variant.format, "importance").check_scheme(scheme)
    return built | {"imatrix": variant.imatrix if variant.imatrix is True else _sha256(variant.imatrix)}


def _calibration(given: Params, scored: str) -> dict[str, Any]:
    """What decides the pipeline's own importance matrix, beside the checkpoint: null where no variant asks for it.

    Raises:
        CorpusError: the text is no file, or the scored one; an overlap is seen when the artifact is evaluated.
    """
    asked, own = given.calibration, None
    if given.calibrated:
        text = corpus.text_path("file", asked.path)
        own = {"name": text.name, "sha256": sha256(text), "windows": asked.windows, "context": asked.context}
        if own["sha256"] == scored:
            raise CorpusError(
                f"params.yaml: calibration.path {asked.path} is the very text that is scored: weights rounded to suit "
                "it would look better than they are. Take another calibration text, or score another one."
            )
    return {"own": own}


def _sha256(imatrix: str) -> str:
    """Of an importance matrix, which is read to see that it is one."""
    room(IMATRIX_FORMAT, "imatrix").read(Path(imatrix))
    return sha256(Path(imatrix))


if __name__ == "__main__":
    main()
