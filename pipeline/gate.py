"""The gate: every variant against its limits and its baseline; never a pass for lack of data."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

from pipeline import paths
from pipeline.checks import baseline as baselines
from pipeline.checks import identity as identities
from pipeline.checks import limits as absolute
from pipeline.checks import numbers, record, regression, speed
from pipeline.checks.baseline import Baseline
from pipeline.checks.correction import corrected
from pipeline.checks.identity import mapping
from pipeline.checks.record import Record
from pipeline.checks.verdicts import Result, failed
from pipeline.files import read_object
from pipeline.types import Limits

OTHER_RUN = "reports/measurements.json is of another run than what lies in artifacts/: run dvc repro"


class GateParams(Protocol):
    """What params.yaml says under `gate`."""

    @property
    def inconclusive(self) -> str: ...

    def limits_of(self, variant: str) -> Limits: ...


class Project(Protocol):
    """What the gate reads of params.yaml."""

    @property
    def variants(self) -> Mapping[str, Any]: ...

    @property
    def asked(self) -> Mapping[str, Mapping[str, str]]: ...

    @property
    def gate(self) -> GateParams: ...


def of_project(params: Project, root: Path = Path()) -> Result:
    """The gate of what the stages left below `root`: its measurements against params.yaml and the baseline, if any.

    Raises:
        PipelineError: measurements, baseline or a variant's record that is absent or cannot be read.
    """
    measurements = read_object(root / paths.MEASUREMENTS)
    baseline = baselines.load(root / paths.BASELINE)
    runs = {} if baseline is None else record.gather(params.variants, root)
    return judge(measurements, params, runs, baseline)


def judge(
    measurements: Mapping[str, Any],
    params: Project,
    runs: Mapping[str, Record] = MappingProxyType({}),
    baseline: Baseline | None = None,
) -> Result:
    """Check every variant against its limits and the baseline, then correct fails for the number of all checks.

    Figures of another format, scheme or path than the `params` ask of a variant are stale. `runs` are the records of
    this run, None for `baseline` where none was ever accepted.
    """
    report = {key: value for key, value in measurements.items() if key != "variants"}
    checks = numbers.checks("report", report, numbers.OF_ALL)
    measured, identity = (mapping(measurements, key) for key in ("variants", "identity"))
    for name in params.variants:
        variant = measured.get(name)
        if not isinstance(variant, Mapping):
            checks.append(failed(name, "measured", "it was not measured: run dvc repro"))
            continue
        others = len(checks)
        checks += identities.checks(name, variant, identity, params.asked.get(name, {}))
        if name in runs and not runs[name].is_of(variant):
            checks.append(failed(name, "report", OTHER_RUN))
        limits = params.gate.limits_of(name)
        if limits == Limits():
            checks.append(failed(name, "limits", "it has no limit: set gate.limits.default in params.yaml"))
        checks += numbers.checks(name, variant, numbers.OF_A_VARIANT, absolute.judged(limits))
        checks += absolute.checks(name, limits, variant)
        checks += regression.checks(name, limits, runs.get(name), baseline)
        checks += speed.checks(name, limits, measurements, baseline)
        if len(checks) == others:
            checks.append(failed(name, "limits", "nothing that its limits ask can be judged here: set another limit"))
    return Result(corrected(checks), params.gate.inconclusive)
