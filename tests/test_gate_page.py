"""docs/gate.md and the workflow: figures, flags and commands are those of this repository."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
import yaml
from conftest import ROOT

from pipeline.checks.verdicts import FAILING, PASS, UNDECIDED
from pipeline.cli import main
from pipeline.types import Limits

PAGE = (ROOT / "docs" / "gate.md").read_text()
WORKFLOW = (ROOT / ".github" / "workflows" / "quality-gate.yml").read_text()
FLAGS = ("NATIVE=OFF", "SSE42=ON", "AVX=ON", "AVX2=ON", "FMA=ON", "F16C=ON", "BMI2=ON")
OTHERS = {"python", ".venv/bin/pip", "echo", "dvc"}
"""Commands of a step that are not ours."""


def workflow(text: str = WORKFLOW) -> dict[str, Any]:
    found = yaml.safe_load(text)
    assert isinstance(found, dict)
    return found


def with_macos() -> str:
    """The workflow with its commented job taken in."""
    head, job = WORKFLOW.split("  # macos:\n")
    assert all(line.startswith("  # ") for line in job.splitlines())
    return head + "  macos:\n" + re.sub(r"^  # ", "  ", job, flags=re.M)


def steps() -> list[dict[str, Any]]:
    return [step for job in workflow(with_macos())["jobs"].values() for step in job["steps"]]


def commands() -> list[list[str]]:
    return [shlex.split(line) for step in steps() for line in step.get("run", "").splitlines()]


# The page


def test_the_worked_example_is_computed_from_the_committed_reports() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.gate_example"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    begin, end = "<!-- python -m tools.gate_example: begin -->\n\n", "\n\n<!-- end -->"
    written = PAGE.split(begin)[1].split(end)[0]
    assert written == done.stdout.rstrip("\n"), "run python -m tools.gate_example --write"


def test_the_page_explains_every_verdict_and_no_other() -> None:
    rows = re.findall(r"^\| ([a-z ]+) \| .* \| .* \|$", PAGE.split("## Verdicts")[1].split("##")[0], flags=re.M)
    assert set(rows) - {"verdict"} == {PASS, *FAILING, *UNDECIDED}


def test_the_page_names_every_limit() -> None:
    block = PAGE.split("    gate:\n")[1].split("\n\n")[0]
    given = yaml.safe_load("gate:\n" + block)["gate"]
    assert given["limits"]["default"].keys() == Limits.__dataclass_fields__.keys()
    Limits(**given["limits"]["default"])


def test_commands_of_the_page_exist() -> None:
    found = [shlex.split(part, comments=True) for part in re.findall(r"quantgate [a-z][^`\n]*", PAGE)]
    assert len(found) >= 9
    for command in found:
        known(command)


def known(command: list[str]) -> None:
    """A `quantgate` command with its options is one of the command line's."""
    group: click.Command = main
    for word in command[1:]:
        if isinstance(group, click.Group):
            assert word in group.commands, f"{' '.join(command)}: no command {word}"
            group = group.commands[word]
        elif word.startswith("--"):
            options = {name for parameter in group.params for name in parameter.opts}
            assert word in options, f"{' '.join(command)}: no option {word}"


# The workflow


def test_the_workflow_is_yaml_with_the_jobs_that_it_names() -> None:
    assert list(workflow()["jobs"]) == ["linux"]
    assert list(workflow(with_macos())["jobs"]) == ["linux", "macos"]
    linux = workflow()["jobs"]["linux"]
    assert linux["runs-on"] == "ubuntu-24.04"
    assert {"python-version": "3.12"} in [step.get("with") for step in linux["steps"]]


def test_the_workflow_has_no_more_rights_than_it_needs() -> None:
    assert workflow()["permissions"] == {"contents": "read"}
    assert "secrets." not in WORKFLOW
    assert not re.search(r"\$\{\{[^}]*github\.event", WORKFLOW)  # nothing of a pull request gets into a shell
    assert workflow()["concurrency"]["cancel-in-progress"] is True


def test_commands_of_the_workflow_exist() -> None:
    targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    ours = [command for command in commands() if command[0] not in OTHERS]
    assert {command[0] for command in ours} == {"make", "quantgate"}
    for command in ours:
        if command[0] == "make":
            assert set(command[1:]) <= set(targets)
        else:
            known(command)
    run = [" ".join(command) for command in commands()]
    assert run.count("dvc repro") == run.count("quantgate baseline accept") == 2
    assert sum(command.startswith("quantgate gate --junit ") for command in run) == 2


def test_the_workflow_takes_the_torch_that_is_pinned() -> None:
    pins = (ROOT / "pipeline" / "requirements" / "reference.txt").read_text().split()
    (torch,) = [pin for pin in pins if pin.startswith("torch==")]
    assert [".venv/bin/pip", "install", torch, "--index-url", "https://download.pytorch.org/whl/cpu"] in commands()


def test_either_the_gate_or_the_acceptance_runs() -> None:
    assert workflow()[True]["workflow_dispatch"]["inputs"]["accept"]["type"] == "boolean"  # YAML's `on` is true
    conditions = {step["run"].split(" --")[0]: step["if"] for step in steps() if "quantgate" in step.get("run", "")}
    assert conditions == {
        "quantgate gate": "${{ !inputs.accept }}",
        "quantgate baseline accept": "${{ inputs.accept }}",
    }


def test_reports_are_kept_of_a_gate_that_failed_too() -> None:
    kept = {step["with"]["name"]: step for step in steps() if "upload-artifact" in step.get("uses", "")}
    assert kept["reports"]["if"] == kept["reports-macos"]["if"] == "${{ !cancelled() }}"
    assert kept["baseline"]["with"]["path"] == "reports/baseline.json"
    written = [word for command in commands() for word in command if word.startswith("reports/")]
    assert {Path(word).parent.name for word in written} == {"reports"}


def test_the_build_is_the_one_that_the_page_names() -> None:
    flags = " ".join(f"-DGGML_{flag}" for flag in FLAGS)
    assert workflow()["env"]["CMAKE_ARGS"] == flags
    assert f'CMAKE_ARGS="{flags}" make setup' in PAGE


def test_wheels_are_kept_by_their_build_flags() -> None:
    """A wheel of other flags gives other digits, and pip would take it."""
    (cache,) = [step for step in workflow()["jobs"]["linux"]["steps"] if "actions/cache" in step.get("uses", "")]
    (flags,) = [step for step in workflow()["jobs"]["linux"]["steps"] if step.get("id") == "flags"]
    assert "$CMAKE_ARGS" in flags["run"]
    for key in ("key", "restore-keys"):
        assert "${{ steps.flags.outputs.key }}" in cache["with"][key]


@pytest.mark.parametrize("step", [step for step in steps() if "uses" in step], ids=lambda step: step["uses"])
def test_actions_are_of_a_version(step: dict[str, Any]) -> None:
    assert re.fullmatch(r"actions/[a-z-]+@v\d+", step["uses"])
