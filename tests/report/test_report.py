"""The front, the picks, and the files of the report from measurements made by hand."""

from __future__ import annotations

import csv
import json
import math
import re
import struct
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest

from pipeline import paths
from pipeline.errors import MeasurementError
from pipeline.files import write_json
from pipeline.report.build import build
from pipeline.report.markdown import decimals, effective, megabytes, ranged, render
from pipeline.report.measurements import gather
from pipeline.report.pareto import change, front, percent, picks, prompt_length
from pipeline.report.plots import DPI, HEIGHT, WIDTH, draw

IDENTITY = {
    "source": {"name": "tiny", "revision": None, "files": {"model.safetensors": "ab" * 32}},
    "corpus": "sample",
    "text_sha256": "11" * 32,
    "tokenizer_sha256": "22" * 32,
    "ids_sha256": "33" * 32,
    "context": 512,
    "windows": 40,
}
ENGINE = {
    "name": "llama.cpp",
    "version": "b1",
    "instruction_set": "AVX2",
    "device": "cpu",
    "kv_type": "f16",
    "flash_attention": "off",
    "threads": 2,
    "batch": 2048,
    "micro_batch": 512,
    "mmap": True,
}
TIMING_ENGINE = {**ENGINE, "device": "gpu", "flash_attention": "auto", "threads": 4}
TIMING = {"decode": 64, "rounds": 9, "device": "auto", "threads": 0, "flash_attention": "auto"}
MACHINE = {
    "cpu": "A CPU",
    "architecture": "x86_64",
    "instruction_set": "avx2",
    "physical_cores": 2,
    "logical_cores": 4,
    "memory_gib": 23.5,
    "os": "Linux 6",
}


def figure(value: float, spread: float | None) -> dict[str, float | None]:
    if spread is None:
        return {"value": value, "low": None, "high": None}
    return {"value": value, "low": value - spread, "high": value + spread}


def rate(value: float, disturbed: int = 0) -> dict[str, Any]:
    return {**figure(value, 10.0), "rounds": 7, "disturbed_rounds": disturbed}


def variant(size: int, kld: float, ratio: float, prefill: float | None = 1000.0, **other: Any) -> dict[str, Any]:
    speed = {} if prefill is None else {"128": rate(prefill / 2), "512": rate(prefill)}
    return {
        "format": "gguf",
        "scheme": "q4_0",
        "size_bytes": size,
        "bits_per_weight": 4.5,
        "effective_types": {"Q4_0": 900, "Q6_K": 98, "F32": 2},
        "ppl": figure(80.5, 5.0),
        "ln_ppl_ratio": figure(ratio, 0.002),
        "kld": {name: figure(kld, kld / 10) for name in ("mean", "median", "p99", "p99_9")} | {"max": {"value": 9.0}},
        "same_top": figure(0.9, 0.01),
        "target_probability_rms": 0.02,
        "bits_per_byte": 2.01234,
        "windows": 40,
        "scored_tokens": 40 * 255,
        "engine": ENGINE,
        "timing_engine": {} if prefill is None else TIMING_ENGINE,
        "identity": IDENTITY,
        "prefill": speed,
        "decode": {} if prefill is None else {"64": rate(300.0)},
        **other,
    }


@pytest.fixture
def measurements() -> dict[str, Any]:
    variants = {
        "big": variant(8_000_000, 0.001, 0.001, 900.0),
        "middle": variant(6_000_000, 0.01, 0.006, 1100.0),
        "worse": variant(6_500_000, 0.02, 0.02, 1500.0),
        "small": variant(4_000_000, 0.1, 0.06, 2000.0),
    }
    return {
        "reference": {"ppl": 80.0, "engine": {**ENGINE, "name": "transformers", "version": "transformers 5"}},
        "identity": IDENTITY,
        "machine": MACHINE,
        "power_source": "mains",
        "timing": TIMING,
        "variants": variants,
    }


def row_of(text: str, name: str) -> list[str]:
    """Cells of the table's row of a variant, bold or not."""
    (line,) = [
        line
        for line in text.splitlines()
        if line.startswith((f"| {name} |", f"| **{name}** |")) and line.split(" | ")[0].strip("| *") == name
    ]
    return [cell.strip() for cell in line.strip("|").split("|")]


def header_of(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("| variant |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


# The front


def points(**of: tuple[int, float]) -> dict[str, dict[str, Any]]:
    return {name: {"size_bytes": size, "kld": {"mean": {"value": kld}}} for name, (size, kld) in of.items()}


@pytest.mark.parametrize(
    ("variants", "expected"),
    [
        (points(a=(3, 0.1), b=(2, 0.2), c=(1, 0.3)), ["a", "b", "c"]),
        (points(c=(1, 0.3), a=(3, 0.1), b=(2, 0.2)), ["a", "b", "c"]),  # the largest first
        (points(a=(3, 0.1), b=(3, 0.2)), ["a"]),
        (points(a=(3, 0.1), b=(2, 0.1)), ["b"]),
        (points(a=(3, 0.1), b=(4, 0.2), c=(2, 0.3)), ["a", "c"]),
        (points(a=(2, 0.1), b=(2, 0.1), c=(3, 0.1)), ["a", "b"]),  # ties are kept
        (points(a=(2, 0.1)), ["a"]),
        ({}, []),
    ],
)
def test_what_another_beats_in_both_is_not_on_the_front(
    variants: dict[str, dict[str, Any]], expected: list[str]
) -> None:
    assert front(variants) == expected


# Picks


def test_picks_answer_three_questions(measurements: dict[str, Any]) -> None:
    close, fast, small = picks(measurements["variants"])
    assert (close.question, close.variant) == ("smallest within 1 % of the reference's perplexity", "middle")
    assert close.why == "perplexity +0.60 % (+0.40 to +0.80)"
    assert (fast.question, fast.variant) == ("fastest prefill within 3 % of the reference's perplexity", "worse")
    assert fast.why == "1500 tokens/s at 512 tokens; perplexity +2.02 % (+1.82 to +2.22)"
    assert (small.question, small.variant) == ("smallest of all", "small")


@pytest.mark.parametrize(("high", "variant_name"), [(math.log1p(0.01), "small"), (math.log1p(0.01) + 1e-9, "big")])
def test_within_means_the_whole_interval(high: float, variant_name: str) -> None:
    variants = {"big": variant(9, 0.1, 0.0), "small": variant(5, 0.1, 0.0)}
    variants["small"]["ln_ppl_ratio"] = {"value": 0.001, "low": -0.01, "high": high}
    assert picks(variants)[0].variant == variant_name


def test_no_pick_where_nothing_qualifies() -> None:
    close, fast, small = picks({"a": variant(5, 0.1, 0.5), "b": variant(4, 0.2, 0.7)})
    assert (close.variant, close.why) == (None, "no variant is surely within 1 %")
    assert (fast.variant, fast.why) == (None, "no variant with a measured prefill is surely within 3 %")
    assert small.variant == "b"


def test_no_pick_where_nothing_was_measured() -> None:
    assert [(pick.variant, bool(pick.why)) for pick in picks({})] == [(None, True)] * 3


def test_one_window_bounds_nothing_and_so_qualifies_for_nothing() -> None:
    one = variant(5, 0.1, 0.0)
    one["ln_ppl_ratio"] = figure(0.0, None)
    close, fast, small = picks({"a": one})
    assert (close.variant, fast.variant, small.variant) == (None, None, "a")
    assert small.why == "perplexity +0.00 % (one window: no interval)"


@pytest.mark.parametrize(
    ("rates", "alike"),
    [
        ((figure(1000.0, 10.0), figure(981.0, 10.0)), True),
        ((figure(1000.0, 10.0), figure(980.0, 10.0)), True),  # they share a point
        ((figure(1000.0, 10.0), figure(979.0, 10.0)), False),
        ((figure(1000.0, 0.0), figure(1000.0, 0.0)), True),  # points are intervals too
        ((figure(1000.0, 0.0), figure(999.0, 0.0)), False),
        ((figure(1000.0, 10.0), figure(500.0, None)), True),  # an unbounded one says nothing
        ((figure(1000.0, None), figure(500.0, 1.0)), True),
    ],
)
def test_speeds_whose_intervals_overlap_are_not_told_apart(rates: tuple[dict[str, Any], ...], alike: bool) -> None:
    variants = {"fast": variant(5, 0.1, 0.0), "other": variant(4, 0.1, 0.0), "far": variant(3, 0.1, 0.5, 1000.0)}
    for name, found in zip(("fast", "other"), rates, strict=True):
        variants[name]["prefill"]["512"] = rate(0.0) | found
    pick = picks(variants)[1]
    assert pick.variant == "fast"
    why = "1000 tokens/s at 512 tokens; perplexity +0.00 % (-0.20 to +0.20)"
    assert pick.why == (f"{why}; not told apart from other" if alike else why)  # and "far" is not asked for


def test_every_variant_that_is_not_told_apart_is_named() -> None:
    variants = {name: variant(5, 0.1, 0.0, speed) for name, speed in (("a", 995.0), ("b", 1000.0), ("c", 990.0))}
    assert picks(variants)[1].why.endswith("; not told apart from a, c")


def test_what_has_no_speed_is_not_the_fastest() -> None:
    variants = {"timed": variant(5, 0.1, 0.0, 10.0), "untimed": variant(4, 0.1, 0.0, None)}
    assert picks(variants)[1].variant == "timed"
    assert picks({"untimed": variants["untimed"]})[1].variant is None


def test_a_variant_without_the_length_of_the_pick_is_not_the_fastest() -> None:
    variants = {"a": variant(5, 0.1, 0.0, 10.0), "b": variant(4, 0.1, 0.0)}
    del variants["b"]["prefill"]["512"]
    assert picks(variants)[1].variant == "a"


@pytest.mark.parametrize(
    ("lengths", "expected"), [(["128", "512", "2048"], "512"), (["64", "128", "1024"], "128"), (["9"], "9"), ([], None)]
)
def test_picks_are_made_at_512_tokens_or_the_middle_length(lengths: list[str], expected: str | None) -> None:
    assert prompt_length({"a": {"prefill": dict.fromkeys(lengths, rate(1.0))}}) == expected


# Markdown


def test_the_table_holds_every_figure(measurements: dict[str, Any]) -> None:
    text = render(measurements, [*measurements["variants"]])
    assert header_of(text) == [
        *("variant", "size, MB", "bits per weight", "KL to reference, nats/token", "ln perplexity ratio", "perplexity"),
        *("same top-1", "bits per byte", "prefill 128, tokens/s", "prefill 512, tokens/s", "decode 64, tokens/s"),
        "effective types",
    ]
    assert row_of(text, "small") == [
        *("**small**", "4.0", "4.50", "0.100 [0.090, 0.110]", "+0.0600 [+0.0580, +0.0620]", "80.50 [75.50, 85.50]"),
        *("90.0 [89.0, 91.0] %", "2.0123", "1000 [990, 1010]", "2000 [1990, 2010]", "300 [290, 310]"),
        "Q4_0 90 %, Q6_K 10 %, F32 <1 %",
    ]
    assert row_of(text, "worse")[0] == "worse"  # not on the front
    assert "| reference, float32 | | | 0 | 0 | 80.00 |" in text
    order = [line.split("|")[1].strip(" *") for line in text.splitlines() if line.startswith(("| **", "| worse"))]
    assert order == ["big", "worse", "middle", "small"]
    assert "| smallest within 1 % of the reference's perplexity | **middle** |" in text
    assert "255 tokens with at least 256 of context" in text
    for trace in ("{{", "}}", "{%", "None", "nan", "Undefined"):
        assert trace not in text


def test_scoring_and_timing_are_said_with_their_engines(measurements: dict[str, Any]) -> None:
    text = render(measurements, [*measurements["variants"]])
    scored = "- Scored by llama.cpp: b1; AVX2; on cpu, 2 threads, KV cache f16, flash attention off."
    timed = (
        "- Timed by llama.cpp: b1; on gpu, 4 threads, KV cache f16, flash attention auto, "
        "batch 2048 in parts of 512, mmap on."
    )
    assert [line for line in text.splitlines() if line.startswith(("- Scored by", "- Timed by"))] == [scored, timed]
    assert "- Times are medians of 9 rounds of wall clock" in text
    measurements["variants"]["big"]["timing_engine"] = TIMING_ENGINE | {"mmap": False}
    assert "mmap off." in render(measurements, [*measurements["variants"]])
    untimed = measurements | {"variants": {"a": variant(5, 0.1, 0.0, None)}}
    assert "Timed by" not in render(untimed, ["a"])


def test_every_row_of_a_measured_variant_is_as_long_as_the_header(measurements: dict[str, Any]) -> None:
    text = render(measurements, [*measurements["variants"]])
    lines = [*measurements["variants"], "reference, float32"]
    assert {len(row_of(text, name)) for name in lines} == {len(header_of(text))}


def test_a_missing_variant_reads_not_measured(measurements: dict[str, Any]) -> None:
    text = render(measurements, ["big", "absent", "middle"])
    assert row_of(text, "absent")[:2] == ["absent", "not measured"]
    assert "| worse |" not in text  # only what was asked for


def test_a_disturbed_speed_is_marked_and_explained(measurements: dict[str, Any]) -> None:
    assert "†" not in render(measurements, ["big"])
    measurements["variants"]["big"]["decode"]["64"] = rate(300.0, disturbed=2)
    text = render(measurements, [*measurements["variants"]])
    assert row_of(text, "big")[-2] == "300 [290, 310] †"
    assert row_of(text, "small")[-2] == "300 [290, 310]"
    assert "† Some rounds were disturbed" in text


def test_a_variant_without_speed_reads_not_measured(measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"] = variant(4_000_000, 0.1, 0.06, None)
    text = render(measurements, [*measurements["variants"]])
    assert row_of(text, "small")[8:11] == ["not measured"] * 3


def test_one_window_has_no_brackets(measurements: dict[str, Any]) -> None:
    one = measurements["variants"]["big"]
    for key in ("ppl", "ln_ppl_ratio", "same_top"):
        one[key] = figure(one[key]["value"], None)
    one["kld"]["mean"] = figure(0.001, None)
    measurements["variants"] = {"big": one}
    assert row_of(render(measurements, ["big"]), "big")[3:8] == ["0.00100", "+0.0010", "80.50", "90.0 %", "2.0123"]


def test_nothing_measured_at_all_is_a_report_too(measurements: dict[str, Any], tmp_path: Path) -> None:
    measurements["variants"] = {}
    measurements["reference"]["ppl"] = None
    text = render(measurements, ["a", "b"])
    assert row_of(text, "a")[1] == row_of(text, "b")[1] == "not measured"
    assert "| smallest of all | none | nothing was measured |" in text
    draw(measurements, tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == (WIDTH * DPI, HEIGHT * DPI)


def test_a_revision_is_named(measurements: dict[str, Any]) -> None:
    measurements["identity"] = deepcopy(IDENTITY) | {"source": {"name": "Qwen/Q", "revision": "abc123", "files": {}}}
    assert "`Qwen/Q` at revision `abc123`" in render(measurements, ["big"])
    assert "revision" not in render(measurements | {"identity": IDENTITY}, ["big"])


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((0.0, 1), (0.0119, 4), (0.0000496, 7), (0.128, 3), (0.0999, 4), (1.5, 2), (12.0, 1), (123.0, 0)),
        *((-0.0119, 4), (4567.0, 0)),
    ],
)
def test_decimals_show_three_digits(value: float, expected: int) -> None:
    assert decimals(value) == expected


def test_figures_as_text() -> None:
    assert ranged({"value": 0.01194, "low": 0.0104, "high": 0.0133}, 4) == "0.0119 [0.0104, 0.0133]"
    assert ranged({"value": 0.5, "low": -0.25, "high": 1.25}, 2, signed=True) == "+0.50 [-0.25, +1.25]"
    assert ranged({"value": 0.5, "low": None, "high": None}, 1) == "0.5"
    assert effective({"Q4_K": 620, "Q6_K": 376, "F32": 4}) == "Q4_K 62 %, Q6_K 38 %, F32 <1 %"
    assert effective({"BF16": 1}) == "BF16 100 %"
    assert (megabytes(13_922_304), megabytes(1_234_567_890)) == ("13.9", "1,235")
    assert percent(0.03) == "3 %"
    ratio = {"value": math.log(1.5), "low": math.log(1.25), "high": math.log(2)}
    assert change({"ln_ppl_ratio": ratio}) == "perplexity +50.00 % (+25.00 to +100.00)"


# The picture


def size_of(png: Path) -> tuple[float, float]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_the_picture_is_a_png_of_its_size(measurements: dict[str, Any], tmp_path: Path) -> None:
    draw(measurements, tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == (1040, 650)
    draw(measurements, tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    moved = deepcopy(measurements)
    moved["variants"]["small"]["size_bytes"] += 1_000_000
    draw(moved, tmp_path / "c.png")
    assert (tmp_path / "a.png").read_bytes() != (tmp_path / "c.png").read_bytes()


@pytest.mark.parametrize("kld", [0.0, -1e-9])
@pytest.mark.parametrize("others", [True, False])
def test_a_divergence_of_nothing_is_drawn(
    others: bool, kld: float, measurements: dict[str, Any], tmp_path: Path
) -> None:
    """A bf16 checkpoint in bf16 may differ by nothing, which a logarithmic axis does not hold."""
    measurements["variants"]["big"]["kld"]["mean"] = figure(kld, 0.0)
    if not others:
        measurements["variants"] = {"big": measurements["variants"]["big"]}
    draw(measurements, tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == (1040, 650)


def test_one_window_is_drawn_without_bars(measurements: dict[str, Any], tmp_path: Path) -> None:
    measurements["variants"]["big"]["kld"]["mean"] = figure(0.001, None)
    draw(measurements, tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == (1040, 650)


# Files from what the stages left


FILES = {"model.gguf": "ef" * 32}


def leave(root: Path, names: list[str]) -> None:
    """What the stages leave of variants, in the shapes of their JSON files."""
    write_json(root / paths.REFERENCE / "meta.json", {**IDENTITY, "engine": ENGINE})
    task = {"seconds": [0.5] * 7, "warm_up_seconds": [0.5, 0.5], "disturbed_rounds": [2]}
    tasks = {
        "prefill": {"128": {**task, "tokens_per_second": figure(256.0, 0.0)}},
        "decode": {"64": {**task, "tokens_per_second": figure(128.0, 0.0)}},
    }
    speed = {
        "machine": MACHINE,
        "power_source": "mains",
        "settings": {"prompt_lengths": [128], **TIMING},
        "variants": {name: {"artifact": FILES, "engine": TIMING_ENGINE, **tasks} for name in names},
    }
    write_json(root / paths.SPEED, speed)
    kld = {"mean": 0.1, "median": 0.05, "p99": 0.5, "p99_9": 0.9}
    quality = {
        "ppl": 81.0,
        "ppl_interval": {"low": 75.0, "high": 88.0},
        "reference_ppl": 80.0,
        "ln_ppl_ratio": figure(0.01, 0.002),
        "kld": kld | {"max": 2.0},
        "kld_interval": {name: {"low": value / 2, "high": value * 2} for name, value in kld.items()},
        "same_top": 0.9,
        "same_top_interval": {"low": 0.88, "high": 0.92},
        "target_probability_rms": 0.02,
        "bits_per_byte": 2.0,
        "windows": 40,
        "scored_tokens": 40 * 255,
        "engine": ENGINE,
        "identity": IDENTITY,
        "artifact": FILES,
    }
    for i, name in enumerate(names):
        write_json(root / paths.quality(name), quality)
        artifact = {
            "format": "gguf",
            "scheme": "q4_0",
            "files": FILES,
            "size_bytes": 5_000_000 + i,
            "bits_per_weight": 4.5,
            "effective_types": {"Q4_0": {"tensors": 5, "weights": 900}, "F32": {"tensors": 3, "weights": 100}},
        }
        write_json(root / paths.variant(name) / "artifact.json", artifact)


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
    assert a["ppl"] == {"value": 81.0, "low": 75.0, "high": 88.0}
    assert a["same_top"] == {"value": 0.9, "low": 0.88, "high": 0.92}
    assert a["effective_types"] == {"Q4_0": 900, "F32": 100}
    assert a["prefill"]["128"] == {"value": 256.0, "low": 256.0, "high": 256.0, "rounds": 7, "disturbed_rounds": 1}
    assert found["reference"] == {"ppl": 80.0, "engine": ENGINE}
    assert found["identity"] == IDENTITY
    assert (a["engine"], a["timing_engine"], a["identity"]) == (ENGINE, TIMING_ENGINE, IDENTITY)
    assert (found["machine"], found["power_source"]) == (MACHINE, "mains")  # as speed.json says: no machine.json here
    assert found["timing"] == TIMING  # prompt_lengths is a list
    assert found.keys() == {"reference", "identity", "machine", "power_source", "timing", "variants"}
    assert "artifact" not in a


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(path.read_text())
    change(found)
    write_json(path, found)


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
    assert gather(["b"], tmp_path)["variants"]["b"]["timing_engine"] == {}
    build(["a", "b"], tmp_path)
    assert row_of((tmp_path / paths.PARETO_MD).read_text(), "b")[8:10] == ["not measured"] * 2
    rows = csv_rows(tmp_path)
    assert [row["prefill_tokens_per_second"] for row in rows] == ["256.0", ""]


def test_the_same_measurements_give_the_same_bytes(tmp_path: Path) -> None:
    files = (paths.MEASUREMENTS, paths.PARETO_MD, paths.PARETO_PNG, paths.PARETO_CSV)
    leave(tmp_path, ["a", "b"])
    build(["a", "b", "absent"], tmp_path)
    first = [(tmp_path / file).read_bytes() for file in files]
    assert {file.name for file in (tmp_path / paths.REPORTS).iterdir()} == {file.name for file in files}
    build(["a", "b", "absent"], tmp_path)
    assert [(tmp_path / file).read_bytes() for file in files] == first
    assert [row["variant"] for row in csv_rows(tmp_path)] == ["a", "b"]
