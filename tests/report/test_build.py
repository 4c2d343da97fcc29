"""measurements.json and the other files, from what the stages left."""

from __future__ import annotations

import csv
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from figures import ENGINE, IDENTITY, MACHINE, MODEL, PARITY, TIMING, TIMING_ENGINE, UNREPRESENTATIVE, rows_of
from left import FILES, PPL, edit, leave, write_scores
from mutations import GONE, changed, outcome

from pipeline import paths
from pipeline.errors import MeasurementError
from pipeline.files import write_json
from pipeline.report.build import build
from pipeline.report.measurements import gather


def csv_rows(root: Path) -> list[dict[str, str]]:
    return list(csv.DictReader((root / paths.PARETO_CSV).read_text().splitlines()))


def lists_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for item in value.values() for found in lists_in(item)]
    return [value] if isinstance(value, list | tuple) else []


def test_measurements_hold_no_lists(tmp_path: Path) -> None:
    """DVC does not show lists in metrics."""
    leave(tmp_path, ["a", "b"])
    found = gather(["a", "b"], tmp_path)
    assert lists_in(found) == []
    json.dumps(found, allow_nan=False)
    a = found["variants"]["a"]
    assert a["kld"]["mean"] == {"value": 0.1, "low": 0.05, "high": 0.2}
    assert a["kld"]["max"] == {"value": 2.0}
    assert a["ppl"] == {"value": PPL, "low": 75.0, "high": 88.0}
    assert a["same_top"] == {"value": 0.9, "low": 0.88, "high": 0.92}
    assert a["effective_types"] == {"Q4_0": 900, "F32": 100}
    rates = {"value": 256.0, "low": 256.0, "high": 256.0, "rounds": 7, "disturbed_rounds": 1}
    assert a["prefill"] == {"128": {**rates, "drift": {"value": -0.1, "p_value": 0.01, "drifted": True}}}
    assert a["not_measured"] == {"prefill 8192": "beyond it"}
    assert a["cold_start"] == {
        "load_seconds": {"value": 0.2, "n": 3},
        "first_prefill_seconds": {"value": 0.5, "n": 3},
        "tokens": 128,
        "page_cache_dropped": False,
    }
    assert (a["peak_memory_bytes"], a["memory_by"], a["kv_bytes"]) == (50_000_000, "resident set", 4096)
    assert (a["size_bytes"], a["folder_bytes"]) == (5_000_000, 6_000_000)
    assert (a["unrepresentative"], a["parity"]) == (None, None)
    assert (a["dropped"], a["imatrix"], a["routers"]) == ({}, None, "")
    assert found["reference"] == {"ppl": 80.0, "engine": ENGINE, "model": MODEL, "reply": None}
    assert found["identity"] == IDENTITY
    assert (a["engine"], a["timing_engine"], a["identity"]) == (ENGINE, TIMING_ENGINE, IDENTITY)
    assert (found["machine"], found["power_source"]) == (MACHINE, "mains")  # as speed.json says: no machine.json here
    assert found["timing"] == {**TIMING, "order": "interleaved"}  # prompt_lengths and visits are lists
    assert found.keys() == {"reference", "identity", "machine", "power_source", "timing", "variants", "fronts", "also"}
    assert found["also"] == {}
    assert "artifact" not in a


def test_fronts_are_of_the_scores_per_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.report.build.draw", lambda measurements, path: path.write_bytes(b"picture"))
    leave(tmp_path, ["a", "b", "c"])
    text = np.resize([0.5, 1.5], 40)
    for name, klds in (("a", text), ("b", text + 0.25), ("c", text + np.repeat([0.25, -0.25], 20))):
        write_scores(tmp_path, name, klds=klds)
    found = gather(["a", "b", "c"], tmp_path)["fronts"]
    assert (found["windows"], found["prompt_length"]) == (40, "128")
    shared = {"value": 0.25, "low": 0.25, "high": 0.25}
    assert found["size_kld"]["b"] == {
        "on_front": False,
        "beaten_by": {"a": {"kld_difference": shared}},
        "ties": {},
    }
    own = found["size_kld"]["c"]["ties"]["a"]["kld_difference"]
    half = 2.0226909 * 0.25 * math.sqrt(40 / 39) / math.sqrt(40)  # t of 39 degrees of freedom
    assert own == pytest.approx({"value": 0.0, "low": -half, "high": half}, rel=1e-6)
    assert (found["size_kld"]["a"]["on_front"], found["size_kld"]["c"]["on_front"]) == (True, True)
    assert found["size_prefill"].keys() == found["size_kld_prefill"].keys() == {"gpu"}
    assert [*found["size_prefill"]["gpu"]["a"]["ties"]] == ["c", "b"]
    build(["a", "b", "c"], tmp_path)
    text_of = (tmp_path / paths.PARETO_MD).read_text()
    assert [rows_of(text_of, name)[0][0] for name in "abc"] == ["**a**", "b", "**c**"]
    all_of_speed = "size_prefill size_kld_prefill"
    assert [row["on_fronts"] for row in csv_rows(tmp_path)] == [
        *(f"size_kld {all_of_speed}", all_of_speed, f"size_kld {all_of_speed}")
    ]
    assert json.loads((tmp_path / paths.MEASUREMENTS).read_text())["fronts"] == found


def test_a_variant_without_its_scores_is_refused(tmp_path: Path) -> None:
    leave(tmp_path, ["a", "b"])
    file = tmp_path / paths.scores("b")
    whole = file.read_bytes()
    file.unlink()
    said = f"{file} cannot be read: No such file or directory. Check the path. Run dvc repro; where it finds nothing to"
    with pytest.raises(MeasurementError, match=re.escape(said)):
        gather(["a", "b"], tmp_path)
    file.write_bytes(whole[:-100])
    with pytest.raises(MeasurementError, match=re.escape(f"{file} holds no scores per token, or is broken (")):
        gather(["a", "b"], tmp_path)
    file.write_bytes(whole)
    edit(tmp_path / paths.quality("b"), lambda quality: quality["kld"].update(mean=0.2))
    with pytest.raises(MeasurementError, match=re.escape(f"{file} is of another run than the quality file beside it")):
        gather(["a", "b"], tmp_path)
    assert [*gather(["a"], tmp_path)["variants"]] == ["a"]  # only of what is asked for


def test_replies_are_measurements(tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    reply = {"text": "Paris.", "tokens": 3, "stopped": None, "same_tokens": 1, "reference_tokens": 2, "problem": None}
    edit(tmp_path / paths.quality("a"), lambda quality: quality.update(reply=reply))
    chat = {
        "messages": [{"role": "user", "content": "Where?"}],
        "prompt": {"text": "Where?", "ids": [1, 2]},
        "stop_ids": [7],
        "reply": {"ids": [3, 7], "text": "There.", "stopped": "<end>"},
    }
    write_json(tmp_path / paths.REFERENCE / "reply.json", chat)
    found = gather(["a"], tmp_path)
    assert found["reference"]["reply"] == {"asked": "Where?", "text": "There.", "tokens": 2, "stopped": "<end>"}
    assert found["variants"]["a"]["reply"] == reply
    assert lists_in(found) == []


def test_the_machine_is_that_of_the_speeds(tmp_path: Path) -> None:
    """machine.json may be of a later run: `dvc pull` brings speeds of another machine."""
    leave(tmp_path, ["a"])
    write_json(tmp_path / paths.MACHINE, MACHINE | {"cpu": "another"})
    edit(tmp_path / paths.SPEED, lambda speed: speed.update(power_source="battery"))
    found = gather(["a"], tmp_path)
    assert (found["machine"], found["power_source"]) == (MACHINE, "battery")


OTHER = {"model.gguf": "00" * 32}


@pytest.mark.parametrize("what", ["scored", "timed"])
def test_figures_of_another_artifact_are_refused(what: str, tmp_path: Path) -> None:
    leave(tmp_path, ["a", "b"])
    if what == "scored":
        edit(tmp_path / paths.quality("b"), lambda quality: quality.update(artifact=OTHER))
    else:
        edit(tmp_path / paths.SPEED, lambda speed: speed["variants"]["b"].update(artifact=OTHER))
    said = f"b: the artifact that was {what} is not the one that lies there: expected {FILES}, found {OTHER}."
    with pytest.raises(MeasurementError, match=re.escape(said)):
        gather(["a", "b"], tmp_path)
    assert [*gather(["a"], tmp_path)["variants"]] == ["a"]  # only of what is asked for


@pytest.mark.parametrize("key", IDENTITY)
def test_figures_of_another_identity_are_refused_by_key(key: str, tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    edit(tmp_path / paths.quality("a"), lambda quality: quality["identity"].update({key: "other"}))
    with pytest.raises(MeasurementError, match=f"a was scored on another {key} than the reference. Run dvc repro"):
        gather(["a"], tmp_path)


def test_every_key_of_another_identity_is_named(tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    edit(tmp_path / paths.quality("a"), lambda quality: quality["identity"].update(context=256, windows=39))
    with pytest.raises(MeasurementError, match="a was scored on another context, windows than the reference"):
        gather(["a"], tmp_path)


def test_what_was_not_evaluated_is_left_out(tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    assert [*gather(["a", "b"], tmp_path)["variants"]] == ["a"]
    leave(tmp_path, ["a", "unasked"])
    assert [*gather(["a"], tmp_path)["variants"]] == ["a"]


def test_a_variant_that_was_not_timed_is_measured(tmp_path: Path) -> None:
    leave(tmp_path, ["a", "b"])
    speed = json.loads((tmp_path / paths.SPEED).read_text())
    del speed["variants"]["b"]
    write_json(tmp_path / paths.SPEED, speed)
    b = gather(["b"], tmp_path)["variants"]["b"]
    assert (b["timing_engine"], b["prefill"], b["cold_start"], b["kv_bytes"]) == ({}, {}, {}, None)
    build(["a", "b"], tmp_path)
    in_all, _, rates, costs = rows_of((tmp_path / paths.PARETO_MD).read_text(), "b")
    assert in_all[6:] == ["not measured"] * 2
    assert (rates[1:], costs[1:]) == (["not measured"] * 3, ["not measured"] * 4)
    rows = csv_rows(tmp_path)
    assert [row["prefill_tokens_per_second"] for row in rows] == ["256.0", ""]


def test_parity_and_a_speed_of_no_meaning_are_measurements(tmp_path: Path) -> None:
    leave(tmp_path, ["a", "b"])
    edit(tmp_path / paths.quality("b"), lambda quality: quality.update(parity=PARITY))
    none = {"cold_start": {}, "peak_memory_bytes": None, "memory_by": None, "kv_bytes": None}
    edit(tmp_path / paths.SPEED, lambda speed: speed["variants"]["b"].update(unrepresentative=UNREPRESENTATIVE, **none))
    found = gather(["a", "b"], tmp_path)["variants"]["b"]
    assert (found["parity"], found["unrepresentative"]) == (PARITY, UNREPRESENTATIVE)
    assert {key: found[key] for key in none} == none
    build(["a", "b"], tmp_path)
    assert [row["prefill_tokens_per_second"] for row in csv_rows(tmp_path)] == ["256.0", ""]
    text = (tmp_path / paths.PARETO_MD).read_text()
    _, _, rates, costs = rows_of(text, "b")
    assert (rates[1], costs[1:]) == ("256 [256, 256] †‡§", ["not measured"] * 4)
    assert "; checked against mlx (mlx 0.32) on 2 windows: " in text


@pytest.mark.parametrize("key", ["unrepresentative", "peak_memory_bytes", "memory_by", "prefill", "cold_start"])
def test_a_speed_of_another_version_is_refused(key: str, tmp_path: Path) -> None:
    leave(tmp_path, ["a"])
    edit(tmp_path / paths.SPEED, lambda speed: speed["variants"]["a"].pop(key))
    with pytest.raises(MeasurementError, match=rf"speed of a is not as this version writes it \(KeyError: '{key}'\)"):
        gather(["a"], tmp_path)


def test_the_same_measurements_give_the_same_bytes(tmp_path: Path) -> None:
    files = (paths.MEASUREMENTS, paths.PARETO_MD, paths.PARETO_PNG, paths.PARETO_CSV)
    leave(tmp_path, ["a", "b"])
    build(["a", "b", "absent"], tmp_path)
    first = [(tmp_path / file).read_bytes() for file in files]
    assert {file.name for file in (tmp_path / paths.REPORTS).iterdir()} == {file.name for file in files}
    build(["a", "b", "absent"], tmp_path)
    assert [(tmp_path / file).read_bytes() for file in files] == first
    assert [row["variant"] for row in csv_rows(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize(
    "file", [paths.REFERENCE / "meta.json", paths.SPEED, paths.quality("a"), paths.variant("a") / "artifact.json"]
)
def test_files_with_wrong_values_are_refused_or_shown(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And a report that is refused leaves the old one whole."""
    monkeypatch.setattr("pipeline.report.build.draw", lambda measurements, path: path.write_bytes(b"picture"))
    leave(tmp_path, ["a"])
    whole = json.loads((tmp_path / file).read_text())
    reports = [tmp_path / path for path in (paths.MEASUREMENTS, paths.PARETO_MD, paths.PARETO_CSV, paths.PARETO_PNG)]
    refused = 0
    for label, broken in changed(whole, (GONE, "x")):
        for report in reports:
            report.parent.mkdir(exist_ok=True)
            report.write_text("old")
        (tmp_path / file).write_text(json.dumps(broken))
        if outcome(f"{file}: {label}", lambda: build(["a"], tmp_path)) == "refused":
            assert [report.read_text() for report in reports] == ["old"] * 4, label
            refused += 1
    assert refused > 9
