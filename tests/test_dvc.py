"""dvc.yaml: every stage names what it imports, and DVC reruns what a change touches and nothing else."""

from __future__ import annotations

import csv
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from dependencies import imported

from pipeline.formats import FORMATS

ROOT = Path(__file__).parent.parent
STAGES = (
    "fetch",
    "corpus",
    "reference",
    "imatrix",
    "matrices",
    "convert",
    "evaluate",
    "machine",
    "benchmark",
    "report",
    "gate",
)
FORMAT_STAGES = {  # rooms imported by name
    "fetch": ("schemes", "given", "run", "plan", "importance"),
    "imatrix": ("imatrix", "importance"),
    "convert": ("write", "given"),
    "evaluate": ("run",),
    "benchmark": ("run",),
}
FAST = {
    "corpus": {"name": "sample", "path": None, "windows": 3, "context": 128},
    "variants": {
        "gguf-q8_0": {"format": "gguf", "scheme": "q8_0"},
        "gguf-q4_0": {"format": "gguf", "scheme": "q4_0"},
    },
    "benchmark": {"prompt_lengths": [16], "decode": 4, "rounds": 6},
}


QUANTGATE = ("-c", "from pipeline.cli import main; main()")


def stages() -> dict[str, Any]:
    return yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]


def test_the_stages_are_the_eleven() -> None:
    assert tuple(stages()) == STAGES
    assert {path.stem for path in (ROOT / "stages").glob("*.py")} - {"__init__"} == set(STAGES)


@pytest.mark.parametrize("format_name", FORMATS)
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_depends_on_every_file_it_imports(stage: str, format_name: str) -> None:
    definition = stages()[stage]
    of_one = "foreach" in definition  # a variant, and so a format
    listed = [Path(dep) for dep in definition.get("do", definition)["deps"]]
    needed = imported(stage, FORMAT_STAGES.get(stage, ()), format_name if of_one else "*")
    needed |= {Path("stages") / f"{stage}.py"}
    listed = [Path(str(path).replace("${item.format}", format_name)) for path in listed]
    missing = [str(path) for path in sorted(needed) if not any(path == dep or dep in path.parents for dep in listed)]
    assert not missing
    assert all((ROOT / path).exists() for path in listed if path.parts[0] != "artifacts" and path.parts[0] != "reports")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working tree as a repository of its own, with few windows, two variants and a checkpoint to change."""
    project = tmp_path_factory.mktemp("project") / "quantgate"
    listing = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    for name in filter(None, listing.split("\0")):
        if name not in {"dvc.lock", "reports/baseline.json"} and (ROOT / name).is_file():
            (project / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, project / name)
    subprocess.run(["git", "init", "-q"], cwd=project, check=True)
    write_params(project, {})
    return project


def write_params(project: Path, change: dict[str, Any]) -> None:
    params = yaml.safe_load((ROOT / "params.yaml").read_text()) | FAST | change
    (project / "params.yaml").write_text(yaml.safe_dump(params, sort_keys=False))


def command(project: Path, *arguments: str, code: int = 0) -> str:
    """What a command in the project says on standard output, when it ends with `code`."""
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(arguments, cwd=project, capture_output=True, text=True, env=environment)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout


def repro(project: Path) -> list[str]:
    """The stages that `dvc repro` ran."""
    return re.findall(r"Running stage '([^']+)'", command(project, "dvc", "repro"))


def measured(project: Path) -> dict[str, Any]:
    return json.loads((project / "reports" / "measurements.json").read_text())["variants"]


@pytest.mark.slow
def test_dvc_reruns_what_a_change_touches_and_nothing_else(project: Path) -> None:
    """One long test, since each step starts from what the last one left."""
    variants = list(FAST["variants"])
    converts = [f"convert@{name}" for name in variants]
    evaluates = [f"evaluate@{name}" for name in variants]

    assert set(repro(project)) == {*STAGES, *converts, *evaluates} - {"convert", "evaluate"}
    assert list(measured(project)) == variants
    for name in ("pareto.md", "pareto.png", "pareto.csv", "measurements.json", "gate.json"):
        assert (project / "reports" / name).stat().st_size > 0
    assert "/" not in (project / "artifacts" / "source.json").read_text()  # no machine paths

    assert repro(project) == ["fetch", "machine"]

    command(project, sys.executable, *QUANTGATE, "baseline", "accept")
    assert repro(project) == ["fetch", "machine", "gate"]
    gate = json.loads((project / "reports" / "gate.json").read_text())
    assert gate["variants"]["gguf-q8_0"]["baseline"]["verdict"] == "pass"

    with (project / "pipeline" / "formats" / "gguf" / "names.py").open("a") as file:
        file.write("\n")
    ran = repro(project)
    assert set(converts) <= set(ran)
    assert "reference" not in ran
    assert "corpus" not in ran

    checkpoint = project / "assets" / "qwen3-tiny" / "model.safetensors"
    data = bytearray(checkpoint.read_bytes())
    data[-2] ^= 1  # the last bit of one weight's mantissa
    checkpoint.write_bytes(data)
    assert {"corpus", "reference", *converts, *evaluates, "benchmark", "report", "gate"} <= set(repro(project))

    write_params(project, {"variants": {"gguf-q8_0": FAST["variants"]["gguf-q8_0"]}})
    ran = repro(project)
    assert "report" in ran
    assert not set(ran) & {"reference", *converts, *evaluates}
    assert list(measured(project)) == ["gguf-q8_0"]
    assert "q4_0" not in (project / "reports" / "pareto.md").read_text()


@pytest.mark.slow
def test_an_experiment_whose_gate_fails_is_saved(project: Path) -> None:
    """Fast behind the test above, which leaves all that this one measures; whole without it."""
    write_params(project, {"variants": {"gguf-q8_0": FAST["variants"]["gguf-q8_0"]}})
    command(project, "git", "add", "--all")
    author = ("-c", "user.name=A", "-c", "user.email=a@example.org")
    command(project, "git", *author, "commit", "--quiet", "--message", "before")
    strict = "gate.limits.default.max_kld_mean=0.0001"
    said = command(project, "dvc", "exp", "run", "--name", "strict", "--set-param", strict)
    assert "Running stage 'gate'" in said
    gate = json.loads((project / "reports" / "gate.json").read_text())
    assert (gate["verdict"], gate["variants"]["gguf-q8_0"]["max_kld_mean"]["verdict"]) == ("fail", "fail")
    assert "The gate fails: " in command(project, sys.executable, *QUANTGATE, "gate", code=1)
    rows = csv.DictReader(command(project, "dvc", "exp", "show", "--csv").splitlines())
    saved = {row["Experiment"]: row for row in rows}
    assert float(saved["strict"]["gate.limits.default.max_kld_mean"]) == 0.0001
    assert (
        float(saved["strict"]["variants.gguf-q8_0.kld.mean.value"])
        == measured(project)["gguf-q8_0"]["kld"]["mean"]["value"]
    )


@pytest.mark.slow
def test_an_importance_matrix_converts_only_what_is_made_with_it(project: Path) -> None:
    """Nor is it computed again for other windows, or for a variant more."""

    def ran(change: dict[str, Any], *names: str) -> set[str]:
        write_params(project, {"calibration": {"path": "README.md", "windows": 2, "context": 64}} | change)
        said = command(project, "dvc", "repro", *[f"convert@{name}" for name in names])
        return set(re.findall(r"Running stage '([^']+)'", said))

    q8_0, q4_0 = FAST["variants"].values()
    ran({"variants": {"a": q8_0}}, "a")
    own = {"a": q8_0, "imat": q4_0 | {"imatrix": True}}
    assert ran({"variants": own}, *own) == {"fetch", "imatrix", "matrices", "convert@imat"}
    more = own | {"b": q4_0, "also": q8_0 | {"imatrix": True}}
    corpus = FAST["corpus"] | {"windows": 2}
    assert ran({"variants": more, "corpus": corpus}, *more) == {*("fetch", "matrices", "convert@b", "convert@also")}
