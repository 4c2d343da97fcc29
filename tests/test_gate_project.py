"""The gate of a project's folder: measurements, baseline and the records of this run."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import ENGINE, IDENTITY, figure, hand_made, variant
from judged import Project
from left import write_scores

from pipeline import gate, paths
from pipeline.checks import baseline, record
from pipeline.checks.baseline import Baseline
from pipeline.checks.verdicts import CHANGED, FAIL, NO_BASELINE, PASS
from pipeline.errors import PipelineError
from pipeline.metrics.machine import short_id
from pipeline.params import Gate, Variant
from pipeline.types import Limits


def project(limits: Limits, inconclusive: str = "fail") -> Project:
    variant = Variant("gguf", "q4_0")
    return Project({"v": variant}, Gate(inconclusive, {"default": limits}), {"v": variant.asked})


def write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))


@pytest.fixture
def left(tmp_path: Path) -> Path:
    """What stages left of a variant of three windows."""
    figures = variant(5, 0.01, 0.01) | {"ppl": figure(math.exp(3.5), 1.0), "engine": ENGINE}
    measured = hand_made() | {"variants": {"v": figures}}
    write(tmp_path / paths.MEASUREMENTS, measured)
    files = {"model.gguf": "ab" * 32}
    artifact = {
        "format": "gguf",
        "scheme": "q4_0",
        "path": None,
        "files": files,
        "tensors": {"x": "Q4_0 0123456789abcdef"},
    }
    write(tmp_path / paths.variant("v") / "artifact.json", artifact)
    scored = {
        "engine": ENGINE,
        "identity": IDENTITY | {"windows": 3},
        "artifact": files,
        "windows": 3,
        "scored_tokens": 6,
        "ppl": math.exp(3.5),
        "kld": {"mean": 0.1},
    }
    write(tmp_path / paths.quality("v"), scored)
    write_scores(tmp_path, "v", np.float32([[-1, -2], [-3, -4], [-5, -6]]))
    return tmp_path


def verdicts(root: Path, **limits: float) -> dict[str, str]:
    asked = project(Limits(max_kld_mean=0.1, **limits))
    return {check.name: check.verdict for check in gate.of_project(asked, root).checks}


def test_without_a_baseline_limits_alone_are_judged(left: Path) -> None:
    assert verdicts(left) == {"max_kld_mean": PASS}
    assert verdicts(left, max_regression=0.01, max_slowdown=0.1) == {
        "max_kld_mean": PASS,
        "max_regression": NO_BASELINE,
        "max_slowdown": NO_BASELINE,
    }


def test_a_run_is_compared_with_what_was_accepted(left: Path) -> None:
    then = record.gather(["v"], left)["v"]
    baseline.save(left / paths.BASELINE, Baseline({"v": (then,)}))
    assert verdicts(left, max_regression=0.01) == {"max_kld_mean": PASS, "baseline": PASS, "max_regression": PASS}
    write_scores(left, "v", np.float32([[-1, -2], [-3, -4], [-5, -5.5]]))
    assert verdicts(left) == {"max_kld_mean": PASS, "report": FAIL, "baseline": CHANGED}


@pytest.mark.parametrize("change", [{"engine": ENGINE | {"version": "b2"}}, {"ppl": figure(33.1, 1.0)}])
def test_a_report_of_another_run_than_lies_there_fails(change: dict[str, Any], left: Path) -> None:
    baseline.save(left / paths.BASELINE, Baseline({"v": (record.gather(["v"], left)["v"],)}))
    measured = json.loads((left / paths.MEASUREMENTS).read_text())
    measured["variants"]["v"] |= change
    write(left / paths.MEASUREMENTS, measured)
    assert verdicts(left) == {"max_kld_mean": PASS, "report": FAIL, "baseline": PASS}


def test_a_variant_that_nothing_can_be_judged_of_fails(left: Path) -> None:
    measured = json.loads((left / paths.MEASUREMENTS).read_text())
    measured["variants"]["v"] |= {"prefill": {}, "decode": {}}
    write(left / paths.MEASUREMENTS, measured)
    asked = project(Limits(max_slowdown=0.1), "warn")
    assert [(check.name, check.verdict) for check in gate.of_project(asked, left).checks] == [("limits", FAIL)]


def test_a_run_that_left_no_scores_fails_against_a_baseline(left: Path) -> None:
    then = record.gather(["v"], left)["v"]
    baseline.save(left / paths.BASELINE, Baseline({"v": (then,)}))
    (left / paths.scores("v")).unlink()
    assert verdicts(left)["baseline"] == FAIL


def test_speeds_are_compared_with_those_of_this_machine(left: Path) -> None:
    measured = json.loads((left / paths.MEASUREMENTS).read_text())
    figures = measured["variants"]["v"]
    kept = {"tensors": figures["tensors_sha256"], "engine": figures["timing_engine"]}
    kept |= {key: figures[key] for key in ("prefill", "decode")}
    speeds = {key: measured[key] for key in ("machine", "power_source", "timing")} | {"variants": {"v": kept}}
    then = record.gather(["v"], left)["v"]
    baseline.save(left / paths.BASELINE, Baseline({"v": (then,)}, {short_id(measured["machine"]): speeds}))
    found = verdicts(left, max_slowdown=0.5)
    assert [name for name in found if name.startswith("max_slowdown")] == [
        "max_slowdown_prefill_128",
        "max_slowdown_prefill_512",
        "max_slowdown_decode_64",
    ]
    assert set(found.values()) == {PASS}


def test_what_cannot_be_read_is_refused(left: Path) -> None:
    (left / paths.BASELINE).write_text("{}")
    with pytest.raises(PipelineError, match="is of version None"):
        verdicts(left)
    (left / paths.MEASUREMENTS).unlink()
    with pytest.raises(PipelineError, match="cannot be read"):
        verdicts(left)
