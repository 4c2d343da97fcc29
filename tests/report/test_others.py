"""`quantgate report --also`: figures of other machines stand beside this one's and count for nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from commands import refused, succeeded
from figures import MACHINE, TIMING_ENGINE, figure, rows_of
from left import edit, leave
from mutations import GONE, changed, outcome

from pipeline import paths
from pipeline.errors import MeasurementError
from pipeline.files import write_json
from pipeline.metrics.machine import short_id
from pipeline.report.build import build

A, B = {"model.gguf": "aa" * 32}, {"model.mlpackage/weight.bin": "bb" * 32, "config.json": "cc" * 32}
PARAMS = """
checkpoint: tiny
revision: null
corpus: {}
variants: {a: {format: gguf, scheme: q4_0}, b: {format: gguf, scheme: q4_0}}
evaluate: {}
benchmark: {}
gate: {}
"""
MAC = {**MACHINE, "cpu": "Apple M4", "architecture": "arm64", "instruction_set": "", "os": "Darwin 24"}
MAC_ID = short_id(MAC)
PLACEMENT = {task: {"cpu": 0.25, "gpu": 0.0, "neural_engine": 0.75} for task in ("prefill", "decode")}
DOCUMENTED = {
    *("timing_engine", "prefill", "decode", "unrepresentative", "not_measured", "cold_start", "peak_memory_bytes"),
    *("memory_by", "kv_bytes", "placement"),
}


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What the stages left of `a` and `b`, whose picture is not drawn."""
    leave(tmp_path, ["a", "b"], {"a": A, "b": B})
    (tmp_path / "params.yaml").write_text(PARAMS)
    monkeypatch.setattr("pipeline.report.build.draw", lambda measurements, path: path.write_bytes(b"picture"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def speed_of(project: Path, artifacts: dict[str, dict[str, str]], **changes: Any) -> Path:
    """speed.json of a Mac, on which the artifacts bear these names; decoding is twice as fast as here."""
    speed = json.loads((project / paths.SPEED).read_text()) | {"machine": MAC, "power_source": "battery"} | changes
    timed = speed["variants"]["a"] | {"engine": TIMING_ENGINE | {"name": "Core ML"}, "placement": PLACEMENT}
    timed["decode"] = {"64": timed["decode"]["64"] | {"tokens_per_second": figure(512.0, 4.0)}}
    speed["variants"] = {name: timed | {"artifact": files} for name, files in artifacts.items()}
    path = project / f"speed-{len(list(project.glob('speed-*')))}.json"
    write_json(path, speed)
    return path


def on(device: str, project: Path) -> dict[str, Any]:
    return {"settings": json.loads((project / paths.SPEED).read_text())["settings"] | {"device": device}}


def section(project: Path) -> str:
    text = (project / paths.PARETO_MD).read_text()
    assert text.count("\n## Other machines\n") == 1
    return text.split("\n## Other machines\n")[1].split("\n## ")[0]


def report(*also: Path) -> dict[str, Any]:
    succeeded("report", *(part for file in also for part in ("--also", file)))
    found: dict[str, Any] = json.loads(paths.MEASUREMENTS.read_text())
    return found


def test_figures_of_another_machine_stand_by_hashes_not_by_names(project: Path) -> None:
    renamed = {"other-name.bin": B["model.mlpackage/weight.bin"], "c.json": B["config.json"]}
    found = report(speed_of(project, {"x": renamed, "b": {"model.gguf": "dd" * 32}, "old_q4": {"model.gguf": "ee"}}))
    assert found["also"].keys() == {MAC_ID}
    of_mac = found["also"][MAC_ID]
    assert (of_mac["machine"], of_mac["runs"].keys()) == (MAC, {"auto"})
    run = of_mac["runs"]["auto"]
    assert (run["power_source"], run["timing"]["order"], run["timing"]["decode"]) == ("battery", "interleaved", 64)
    assert run["left_out"] == dict.fromkeys(("b", "old_q4"), "no variant has its files")
    assert run["variants"].keys() == {"b"}
    assert run["variants"]["b"].keys() == DOCUMENTED
    assert (run["variants"]["b"]["decode"]["64"]["value"], run["variants"]["b"]["placement"]) == (512.0, PLACEMENT)
    text = section(project)
    assert f"\n### Machine {MAC_ID}\n\nApple M4, 2 cores, 23.5 GiB, Darwin 24 (arm64). Power source: battery. " in text
    assert [row[1:] for row in rows_of(text, "b")] == [
        ["256 [256, 256] †‡", "not measured", "512 [508, 516] †‡"],
        ["0.20", "0.50", "50.0", "0.0"],
        ["CPU 25 %, Neural Engine 75 %"] * 2,
    ]
    assert rows_of(text, "a") == []
    assert "Left out, since no variant of this report has their files: b, old\\_q4.\n" in text
    assert "\n- Timed by Core ML: b1; on gpu, 4 threads," in text
    assert "\n- Times are medians of 7 rounds of wall clock that visit the variants in rotated order.\n" in text


def test_they_take_no_part_in_what_is_compared(project: Path) -> None:
    before = report()
    assert before["also"] == {}
    markdown = paths.PARETO_MD.read_text()
    files = [paths.PARETO_CSV.read_bytes(), paths.PARETO_PNG.read_bytes()]
    after = report(speed_of(project, {"a": A, "b": B}))
    assert {**after, "also": {}} == before
    assert paths.PARETO_MD.read_text().replace(f"## Other machines\n{section(project)}\n", "") == markdown
    assert [paths.PARETO_CSV.read_bytes(), paths.PARETO_PNG.read_bytes()] == files


def test_no_lists_are_written(project: Path) -> None:
    found = report(speed_of(project, {"a": A, "left": B | {"c": "dd"}}))
    assert "[" not in json.dumps(found["also"])


def test_two_machines_have_a_table_each(project: Path) -> None:
    other = MAC | {"cpu": "Apple M1"}
    found = report(speed_of(project, {"a": A}), speed_of(project, {"b": B}, machine=other, order="abba"))
    assert [*found["also"]] == [MAC_ID, short_id(other)]
    first, second = section(project).split("### Machine ")[1:]
    assert (len(rows_of(first, "a")), len(rows_of(first, "b"))) == (3, 0)
    assert (len(rows_of(second, "a")), len(rows_of(second, "b"))) == (0, 3)
    assert "of one variant at a time, each in a process of its own, through all variants and back.\n" in second


def test_devices_of_one_machine_stand_in_one_table(project: Path) -> None:
    files = [speed_of(project, {"a": A, "b": B}, **on(device, project)) for device in ("auto", "cpu")]
    found = report(*files)
    assert found["also"][MAC_ID]["runs"].keys() == {"auto", "cpu"}
    text = section(project)
    assert text.count("### Machine") == 1
    rates = [line.split("|")[1].strip() for line in text.splitlines() if line.startswith("| ")]
    assert rates[1:5] == ["b (auto)", "b (cpu)", "a (auto)", "a (cpu)"]  # the largest first, as in the other tables


def test_a_second_file_of_a_machine_and_device_is_refused(project: Path) -> None:
    first, second = speed_of(project, {"a": A}), speed_of(project, {"b": B})
    said = " ".join(refused("report", "--also", first, "--also", second).split())
    assert said == (
        f"Error: {second} is the second of the machine {MAC_ID} and the device auto. Speeds are told apart where "
        "rounds took turns: run `quantgate benchmark` there once, with all artifacts."
    )
    assert not paths.PARETO_MD.exists()


def test_figures_of_this_machine_are_refused(project: Path) -> None:
    for own in (speed_of(project, {"a": A}, machine=MACHINE), paths.SPEED):
        said = f"Error: {own} is of the machine {short_id(MACHINE)}, which this report is of;"
        assert said in refused("report", "--also", own)
    assert not paths.PARETO_MD.exists()


def test_of_equal_artifacts_the_one_of_the_same_name_is_taken(project: Path) -> None:
    leave(project, ["a", "b"])  # copies of each other
    same = json.loads((project / paths.variant("a") / "artifact.json").read_text())["files"]
    path = speed_of(project, {"x": same, "b": same})
    edit(path, lambda speed: speed["variants"]["x"].update(kv_bytes=1))
    variants = report(path)["also"][MAC_ID]["runs"]["auto"]["variants"]
    assert {name: v["kv_bytes"] for name, v in variants.items()} == {"a": 1, "b": 4096}


def test_where_nothing_matches_all_is_left_out(project: Path) -> None:
    run = report(speed_of(project, {"a": {"model.gguf": "dd"}}))["also"][MAC_ID]["runs"]["auto"]
    assert (run["variants"], [*run["left_out"]]) == ({}, ["a"])
    text = section(project)
    assert "Left out, since no variant of this report has their files: a.\n" in text
    assert "|" not in text


@pytest.mark.parametrize("content", ["{}", "[]", "{", '"speed"', '{"machine": {}, "settings": {"device": "cpu"}}'])
def test_what_is_no_speed_file_is_refused(content: str, project: Path) -> None:
    path = project / "x.json"
    path.write_text(content)
    said = refused("report", "--also", path)
    assert said.startswith(f"Error: {path}")
    assert refused("report", "--also", project / "nowhere.json").startswith(f"Error: {project}/nowhere.json cannot be")
    assert not paths.PARETO_MD.exists()


def test_measurements_are_no_speed_file(project: Path) -> None:
    report()
    said = refused("report", "--also", paths.MEASUREMENTS)
    assert " ".join(said.split()) == (
        "Error: reports/measurements.json holds no speeds: it lacks settings, order. Give what `quantgate benchmark "
        "--json` of this version wrote on another machine."
    )


def test_speeds_of_another_version_are_refused(project: Path) -> None:
    path = speed_of(project, {"a": A})
    edit(path, lambda speed: speed["variants"]["a"].pop("placement"))
    said = f"Error: {path} is not as this version writes it (KeyError: 'placement'). Give what `quantgate benchmark"
    assert said in refused("report", "--also", path)


def test_files_with_wrong_values_are_refused_or_shown(project: Path) -> None:
    path = speed_of(project, {"a": A})
    whole = json.loads(path.read_text())
    refusals = 0
    for label, broken in changed(whole, (GONE, "x")):
        path.write_text(json.dumps(broken))
        result = outcome(label, lambda: build(["a"], also=[path]), MeasurementError)
        refusals += result == "refused"
    assert refusals > 40
