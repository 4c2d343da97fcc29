"""The report as text and as a picture, from measurements made by hand."""

from __future__ import annotations

import math
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from figures import IDENTITY, TIMING_ENGINE, figure, rate, row_of, variant

from pipeline.report.markdown import render
from pipeline.report.pareto import change, percent
from pipeline.report.plots import DPI, HEIGHT, WIDTH, draw
from pipeline.report.text import decimals, effective, megabytes, ranged


def header_of(text: str) -> list[str]:
    (line,) = [line for line in text.splitlines() if line.startswith("| variant |")]
    return [cell.strip() for cell in line.strip("|").split("|")]


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
