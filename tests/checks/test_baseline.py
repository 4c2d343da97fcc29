"""reports/baseline.json, and what accepting a run does to it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from figures import hand_made
from mutations import FEW, changed, outcome
from records import LOSSES, a_record

from pipeline.checks import acceptance, baseline
from pipeline.checks.acceptance import CHANGED, DROPPED, NEW, NOT_COMPARABLE, SAME, accept, accept_speeds
from pipeline.checks.baseline import Baseline
from pipeline.errors import PipelineError
from pipeline.metrics.machine import short_id

AVX512 = {"instruction_set": "AVX512"}
SPEEDS = {"1a2b3c4d": {"machine": {"cpu": "x"}, "power_source": "mains", "timing": {"decode": 64}, "variants": {}}}
EXACT = (0.1, 1 / 3, math.pi, 5e-324, *LOSSES[4:])


# The file


def test_what_is_saved_is_loaded_to_the_last_bit(tmp_path: Path) -> None:
    kept = Baseline({"a": (a_record(window_nll=EXACT), a_record(engine=AVX512))}, SPEEDS)
    baseline.save(tmp_path / "b.json", kept)
    assert baseline.load(tmp_path / "b.json") == kept
    assert json.loads((tmp_path / "b.json").read_text())["version"] == 1


def test_no_file_is_no_baseline(tmp_path: Path) -> None:
    assert baseline.load(tmp_path / "b.json") is None


def test_a_diff_of_the_file_shows_what_changed(tmp_path: Path) -> None:
    """A line for each tensor, one for five windows; nothing else moves."""
    one = a_record()
    other = replace(
        one, tensors={**one.tensors, "blk.7.attn_q.weight": "Q4_0 00"}, window_nll=(*LOSSES[:-1], LOSSES[-1] + 1e-9)
    )
    lines = []
    for record in (one, other):
        baseline.save(tmp_path / "b.json", Baseline({"a": (record,), "b": (one,)}))
        lines.append((tmp_path / "b.json").read_text().splitlines())
    assert len(lines[0]) == len(lines[1])
    assert len([pair for pair in zip(*lines, strict=True) if pair[0] != pair[1]]) == 2
    assert '          "blk.7.attn_q.weight": "Q4_0 00",' in lines[1]
    assert "          4.0, 4.015625, 4.03125, 4.046875, 4.0625," in lines[0]
    assert max(map(len, lines[0])) <= 120


def test_a_number_that_is_not_finite_is_never_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not JSON compliant"):
        baseline.save(tmp_path / "b.json", Baseline({"a": (a_record(window_nll=(math.nan, *LOSSES[1:])),)}))
    assert list(tmp_path.iterdir()) == []


def edited(path: Path, change: Callable[[Any], object]) -> Path:
    baseline.save(path, Baseline({"a": (a_record(), a_record(engine=AVX512))}, SPEEDS))
    raw = json.loads(path.read_text())
    change(raw)
    path.write_text(json.dumps(raw))
    return path


def first(raw: Any) -> Any:
    return raw["variants"]["a"][0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: raw.update(version=2), "is of version 2, this quantgate reads version 1"),
        (lambda raw: raw.pop("version"), "is of version None, this quantgate reads version 1"),
        (lambda raw: raw.update(more=1), "the file: more missing or unknown"),
        (lambda raw: first(raw).pop("tensors"), "a, record 1: tensors missing or unknown"),
        (lambda raw: first(raw)["engine"].update(threads=2), "a, record 1: engine: threads missing or unknown"),
        (lambda raw: first(raw)["identity"].pop("source"), "a, record 1: identity: source missing or unknown"),
        (lambda raw: first(raw)["files"].update(x=None), "a, record 1: files: x: expected str, found None"),
        (lambda raw: first(raw)["window_nll"].pop(), "window_nll: expected 40 numbers, found 39"),
        (lambda raw: first(raw)["window_nll"].__setitem__(3, math.nan), "window_nll: a number that is not finite"),
        (lambda raw: first(raw)["window_nll"].__setitem__(3, True), "window_nll: expected 40 numbers"),
        (lambda raw: raw["variants"]["a"].append(first(raw)), "a: two records of one engine"),
        (lambda raw: raw["speeds"]["1a2b3c4d"].pop("timing"), "speeds: 1a2b3c4d: timing missing or unknown"),
        (
            lambda raw: raw["speeds"]["1a2b3c4d"]["timing"].update(decode=math.inf),
            "speeds: 1a2b3c4d: timing: decode: a number that is not finite",
        ),
    ],
)
def test_a_broken_file_is_refused(change: Callable[[Any], object], said: str, tmp_path: Path) -> None:
    path = edited(tmp_path / "b.json", change)
    with pytest.raises(PipelineError) as caught:
        baseline.load(path)
    assert str(caught.value).startswith(f"{path} is ")
    assert said in str(caught.value)
    assert "remove it and run `quantgate baseline accept`." in str(caught.value)


def test_no_file_with_wrong_values_is_more_than_refused(tmp_path: Path) -> None:
    path = tmp_path / "b.json"
    whole = json.loads(edited(path, lambda raw: None).read_text())
    for label, broken in changed(whole, FEW):
        path.write_text(json.dumps(broken))
        outcome(label, lambda: baseline.load(path))
    path.write_text("{")
    with pytest.raises(PipelineError, match="is not valid JSON"):
        baseline.load(path)


# Accepting


def whats(changes: tuple[acceptance.Change, ...]) -> list[tuple[str, str]]:
    return [(change.variant, change.what) for change in changes]


def test_the_first_records_are_new() -> None:
    after, changes = accept(Baseline(), {"a": a_record()}, ["a", "b"])
    assert after.records == {"a": (a_record(),)}
    assert whats(changes) == [("a", NEW)]


def test_the_same_again_changes_nothing() -> None:
    before = Baseline({"a": (a_record(),)})
    after, changes = accept(before, {"a": a_record()}, ["a"])
    assert after.records == before.records
    assert whats(changes) == [("a", SAME)]
    assert changes[0].difference is not None
    assert changes[0].difference.growth is not None
    assert changes[0].difference.growth.value == 0.0


def test_a_record_takes_the_place_of_the_same_engines_whatever_its_version() -> None:
    before = Baseline({"a": (a_record(), a_record(engine=AVX512))})
    now = a_record(engine={"version": "b2"}, window_nll=tuple(loss + 0.5 for loss in LOSSES))
    after, changes = accept(before, {"a": now}, ["a"])
    assert set(map(id, after.records["a"])) == {id(now), id(before.records["a"][1])}
    assert whats(changes) == [("a", CHANGED)]
    assert changes[0].reason == "engine b1 -> b2"
    assert changes[0].difference is not None
    assert changes[0].difference.growth is not None
    assert changes[0].difference.growth.value == 0.5


@pytest.mark.parametrize("key", ["name", "instruction_set", "device", "kv_type", "flash_attention"])
def test_records_of_other_engines_stay_beside_it(key: str) -> None:
    other = a_record(engine={key: "another"})
    after, changes = accept(Baseline({"a": (other,)}), {"a": a_record()}, ["a"])
    assert len(after.records["a"]) == 2
    assert whats(changes) == [("a", NEW)]


def test_what_can_be_compared_with_nothing_any_more_is_dropped() -> None:
    before = Baseline({"a": (a_record(), a_record(engine=AVX512))})
    now = a_record(identity={"text_sha256": "99" * 32, "ids_sha256": "98" * 32})
    after, changes = accept(before, {"a": now}, ["a"])
    assert after.records == {"a": (now,)}
    assert whats(changes) == [("a", NOT_COMPARABLE), ("a", DROPPED)]
    assert changes[1].reason == "of another text, sequence of token ids than is accepted now"


def test_variants_that_are_gone_are_dropped_and_the_others_untouched() -> None:
    timed = {**SPEEDS["1a2b3c4d"], "variants": {"a": {}, "gone": {}}}
    before = Baseline({"gone": (a_record(),), "b": (a_record(),)}, {"1a2b3c4d": timed})
    after, changes = accept(before, {"a": a_record()}, ["a", "b"])
    assert list(after.records) == ["a", "b"]
    assert whats(changes) == [("a", NEW), ("gone", DROPPED)]
    assert list(after.speeds["1a2b3c4d"]["variants"]) == ["a"]


# Speeds


def test_speeds_are_kept_by_machine() -> None:
    measured = hand_made()
    after, timed, dropped = accept_speeds(Baseline({}, SPEEDS), measured, ["big", "small"])
    assert (timed, dropped) == (("big", "small"), ())
    at = short_id(measured["machine"])
    assert after.speeds.keys() == {"1a2b3c4d", at}
    found, big = after.speeds[at], measured["variants"]["big"]
    assert {key: found[key] for key in ("machine", "power_source", "timing")} == {
        key: measured[key] for key in ("machine", "power_source", "timing")
    }
    assert found["variants"]["big"] == {
        "tensors": big["tensors_sha256"],
        "engine": big["timing_engine"],
        "prefill": big["prefill"],
        "decode": big["decode"],
    }


def test_speeds_taken_in_the_same_way_stay_and_others_are_dropped() -> None:
    measured = hand_made()
    before = accept_speeds(Baseline(), measured, ["big"])[0]
    after, _, dropped = accept_speeds(before, measured, ["small"])
    assert (*after.speeds[short_id(measured["machine"])]["variants"], dropped) == ("big", "small", ())
    after, _, dropped = accept_speeds(before, measured | {"power_source": "battery"}, ["small"])
    assert (*after.speeds[short_id(measured["machine"])]["variants"], dropped) == ("small", ("big",))


def test_what_was_not_timed_or_is_no_users_speed_is_left_out() -> None:
    measured = hand_made()
    measured["variants"]["big"] |= {"prefill": {}, "decode": {}}
    measured["variants"]["small"]["unrepresentative"] = "MLX on a CPU"
    assert accept_speeds(Baseline(), measured, ["big", "small", "middle"])[1] == ("middle",)
