"""`quantgate gate` and `quantgate report` in a project folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import refused, run, succeeded
from figures import IDENTITY

from pipeline.console import BAD_INPUT, GATE_FAILED

ROOT = Path(__file__).parent.parent
TEXT = "In the beginning the heath there then held the thin inn. " * 40


PARAMS = """
checkpoint: tiny
revision: null
corpus: {name: sample, path: null, windows: 40, context: 512}
variants:
  a: {format: gguf, scheme: q8_0}
evaluate: {}
benchmark: {}
gate:
  inconclusive: fail
  limits:
    default: {max_ln_ppl_ratio: 0.04}
"""


def project(folder: Path, high: float, params: str = PARAMS) -> None:
    a = {
        "format": "gguf",
        "scheme": "q8_0",
        "ln_ppl_ratio": {"value": high - 0.01, "low": high - 0.02, "high": high},
        "windows": 40,
        "identity": IDENTITY,
    }
    (folder / "params.yaml").write_text(params)
    (folder / "reports").mkdir()
    (folder / "reports" / "measurements.json").write_text(json.dumps({"identity": IDENTITY, "variants": {"a": a}}))


@pytest.mark.parametrize(("high", "code", "verdict"), [(0.03, 0, "pass"), (0.05, 1, "inconclusive"), (0.07, 1, "fail")])
def test_the_gate_exits_by_its_verdict(
    high: float, code: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, high)
    result = run("gate")
    assert result.exit_code == code
    assert GATE_FAILED == 1
    ends = {"pass": "The gate passes.", "fail": "The gate fails.", "inconclusive": "The gate fails: inconclusive."}
    assert result.stdout.splitlines()[-1] == ends[verdict]
    assert max(len(line) for line in result.stdout.splitlines()) <= 80
    found = json.loads((tmp_path / "reports" / "gate.json").read_text())
    assert (found["verdict"], found["passes"]) == (verdict, code == 0)
    assert found["variants"]["a"]["max_ln_ppl_ratio"]["limit"] == 0.04


def test_the_gate_fails_on_a_variant_that_was_measured_as_another_scheme(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.03, PARAMS.replace("scheme: q8_0", "scheme: q4_0"))
    result = run("gate")
    assert result.exit_code == GATE_FAILED
    assert "fail a, same_scheme: it was measured as q8_0, params.yaml says q4_0: run dvc repro" in " ".join(
        result.stdout.split()
    )


def test_the_gate_fails_on_a_variant_that_was_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.03, PARAMS.replace("  a: {", "  b: {format: gguf, scheme: q4_0}\n  a: {"))
    result = run("gate")
    assert result.exit_code == 1, repr(result.exception)
    assert "fail b, measured: it was not measured" in result.stdout
    assert json.loads((tmp_path / "reports" / "gate.json").read_text())["verdict"] == "fail"


def test_what_is_inconclusive_may_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.05, PARAMS.replace("inconclusive: fail", "inconclusive: warn"))
    assert succeeded("gate").stdout.splitlines()[-1] == "The gate passes: inconclusive."


def test_limits_of_no_variant_are_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.03, PARAMS + "    gone: {max_kld_mean: 0.1}\n")
    assert succeeded("gate").stderr == "note: gate.limits names gone, which is no variant.\n"


def test_the_gate_without_measurements_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert "params.yaml cannot be read" in refused("gate")
    (tmp_path / "params.yaml").write_text(PARAMS)
    assert "measurements.json cannot be read" in refused("gate")
    assert not (tmp_path / "reports" / "gate.json").exists()


@pytest.mark.parametrize("content", ["{}", "[]", '{"variants": {}}', '{"variants": {"a": {}}, "identity": {}}'])
def test_the_gate_never_ends_in_a_traceback(content: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.03)
    (tmp_path / "reports" / "measurements.json").write_text(content)
    result = run("gate")
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code in {GATE_FAILED, BAD_INPUT}


def test_a_report_without_stages_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "params.yaml").write_text(PARAMS)
    assert "meta.json cannot be read" in refused("report")
