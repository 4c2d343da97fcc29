"""`quantgate gate` and `quantgate report` in a project folder."""

from __future__ import annotations

import json
import re
from pathlib import Path
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner
from commands import refused, run, succeeded
from figures import coreml_variant, hand_made

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
    ratio = {"value": high - 0.01, "low": high - 0.02, "high": high}
    a = coreml_variant(5, 0.01, 0.01) | {"format": "gguf", "scheme": "q8_0", "ln_ppl_ratio": ratio}
    (folder / "params.yaml").write_text(params)
    (folder / "reports").mkdir()
    measurements = hand_made() | {"variants": {"a": a}}
    (folder / "reports" / "measurements.json").write_text(json.dumps(measurements))


@pytest.mark.parametrize(("high", "code", "verdict"), [(0.03, 0, "pass"), (0.05, 1, "inconclusive"), (0.07, 1, "fail")])
def test_the_gate_exits_by_its_verdict(
    high: float, code: int, verdict: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, high)
    result = run("gate")
    assert result.exit_code == code
    assert GATE_FAILED == 1
    says = {
        "pass": "The gate passes: 1 check of 1 variant.",
        "fail": "The gate fails: of 1 check of 1 variant 1 fails.",
        "inconclusive": "The gate fails: of 1 check of 1 variant 1 is inconclusive.",
    }
    assert says[verdict] in result.stdout.splitlines()
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
    shown = succeeded("gate").stdout.replace("\n", " ")
    assert "The gate passes, with reservations: of 1 check of 1 variant 1 is inconclusive." in shown


@pytest.mark.parametrize("number", ["NaN", "Infinity", "null", '"0.01"'])
@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("ln_ppl_ratio", "fail a, max_ln_ppl_ratio: the number is missing: run dvc repro"),
        ("ppl", "fail a, numbers: missing or not finite: ppl.value: run dvc repro"),
    ],
)
def test_a_report_with_a_number_missing_fails_and_names_it(
    key: str, said: str, number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.03)
    report = tmp_path / "reports" / "measurements.json"
    text = re.sub(rf'("{key}": {{"value": )[-.0-9e]+', rf"\g<1>{number}", report.read_text())
    report.write_text(text)
    result = run("gate")
    assert result.exit_code == GATE_FAILED
    assert said in result.stdout
    assert json.loads((tmp_path / "reports" / "gate.json").read_text())["verdict"] == "fail"


def test_the_stage_and_the_command_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stages import gate as stage

    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.07)
    assert run("gate").exit_code == GATE_FAILED
    by_command = (tmp_path / "reports" / "gate.json").read_bytes()
    (tmp_path / "reports" / "gate.json").unlink()
    result = CliRunner().invoke(stage.main, [])
    assert result.exit_code == 0  # a failing stage would lose a `dvc exp`
    assert (tmp_path / "reports" / "gate.json").read_bytes() == by_command


# Files and GitHub


def test_files_are_written_beside_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.07)
    result = run("gate", "--markdown", "gate.md", "--junit", "out/gate.xml")
    assert result.exit_code == GATE_FAILED
    assert "fail a, max_ln_ppl_ratio" in result.stdout
    assert (tmp_path / "gate.md").read_text().startswith("## The gate fails: of 1 check of 1 variant 1 fails.\n")
    suites = ElementTree.parse(tmp_path / "out" / "gate.xml").getroot()
    assert (suites.get("tests"), suites.get("failures")) == ("1", "1")


@pytest.mark.parametrize(("option", "start"), [("--markdown", "## The gate"), ("--junit", "<?xml ")])
@pytest.mark.parametrize(("high", "code"), [(0.03, 0), (0.07, 1)])
def test_standard_output_holds_the_file_alone(
    option: str, start: str, high: float, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    project(tmp_path, high)
    result = run("gate", option, "-")
    assert result.exit_code == code
    assert result.stdout.startswith(start)
    assert "::" not in result.stdout
    assert result.stdout.count("The gate") == (option == "--markdown")  # no table behind it
    assert "title=quantgate gate::The gate" in result.stderr  # which GitHub reads as well
    assert json.loads((tmp_path / "reports" / "gate.json").read_text())["passes"] == (code == 0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["params.yaml", "reports"]


def test_two_files_cannot_be_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.03)
    assert "--markdown and --junit cannot both go to standard output" in refused(
        "gate", "--markdown", "-", "--junit", "-"
    )
    assert not (tmp_path / "reports" / "gate.json").exists()


def test_a_file_that_cannot_be_written_is_refused_before_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.03)
    assert "params.yaml is not a folder" in refused("gate", "--junit", "params.yaml/gate.xml")
    assert not (tmp_path / "reports" / "gate.json").exists()


def test_github_is_told_where_it_runs_the_gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    project(tmp_path, 0.07)
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(tmp_path / "summary.md"))
    monkeypatch.delenv("GITHUB_ACTIONS", raising=False)
    assert "::error" not in run("gate").output
    assert not (tmp_path / "summary.md").exists()
    monkeypatch.setenv("GITHUB_ACTIONS", "true")
    result = run("gate")
    assert result.exit_code == GATE_FAILED
    commands = [line for line in result.stdout.splitlines() if line.startswith("::")]
    assert [command.split("::")[1] for command in commands] == [
        "error title=a%3A perplexity%3A fail",
        "error title=quantgate gate",
    ]
    assert (tmp_path / "summary.md").read_text().startswith("## The gate fails")


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
