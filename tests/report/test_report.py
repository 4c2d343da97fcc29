"""The report as text and as a picture, from measurements made by hand."""

from __future__ import annotations

import math
import struct
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from figures import ENGINE, IDENTITY, TIMING_ENGINE, figure, rate, row_of, rows_of, variant

from pipeline.report.markdown import render
from pipeline.report.pareto import change, percent
from pipeline.report.plots import DPI, HEIGHT, WIDTH, draw
from pipeline.report.text import decimals, effective, megabytes, ranged


def headers_of(text: str) -> list[list[str]]:
    """Of the tables of all variants, of rates and of what they cost."""
    lines = [line for line in text.splitlines() if line.startswith("| variant |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


# Markdown


def test_the_table_holds_every_figure(measurements: dict[str, Any]) -> None:
    text = render(measurements, [*measurements["variants"]])
    in_all, rates, costs = headers_of(text)
    assert in_all == [
        *("variant", "size, MB", "bits per weight", "KL to reference, nats/token", "ln perplexity ratio", "perplexity"),
        *("same top-1", "bits per byte", "prefill 512, tokens/s", "decode 64, tokens/s", "effective types"),
    ]
    assert rates == ["variant", "prefill 128, tokens/s", "prefill 512, tokens/s", "decode 64, tokens/s"]
    assert costs == ["variant", "load, s", "first prefill, s", "peak memory, MB", "KV cache, MB"]
    in_all, rates, costs = rows_of(text, "small")
    assert in_all == [
        *("**small**", "4.0", "4.50", "0.100 [0.090, 0.110]", "+0.0600 [+0.0580, +0.0620]", "80.50 [75.50, 85.50]"),
        *("90.0 [89.0, 91.0] %", "2.0123", "2000", "300", "Q4_0 90 %, Q6_K 10 %, F32 <1 %"),
    ]
    assert rates == ["**small**", "1000 [990, 1010]", "2000 [1990, 2010]", "300 [290, 310]"]
    assert costs == ["**small**", "0.25", "1.50", "123.4", "6.3"]
    assert row_of(text, "worse")[0] == "worse"  # not on the front
    assert "| reference, float32 | | | 0 | 0 | 80.00 |" in text
    order = [line.split("|")[1].strip(" *") for line in text.splitlines() if line.startswith(("| **", "| worse"))]
    assert order == ["big", "worse", "middle", "small"] * 3
    for line in text.splitlines()[text.splitlines().index("## Speed and memory") :]:
        assert len(line) <= 100 or not line.startswith("|")  # both tables fit a page
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
    assert "- Times are medians of 7 rounds of wall clock that visit the variants in rotated order, after" in text
    alone = measurements | {"timing": measurements["timing"] | {"order": "abba"}}
    one_at_a_time = "one variant at a time, each in a process of its own, through all variants and back, after"
    assert f"7 rounds of wall clock of {one_at_a_time}" in render(alone, [*measurements["variants"]])
    measurements["variants"]["big"]["timing_engine"] = TIMING_ENGINE | {"mmap": False}
    assert "mmap off." in render(measurements, [*measurements["variants"]])
    untimed = measurements | {"variants": {"a": variant(5, 0.1, 0.0, None)}}
    assert "Timed by" not in render(untimed, ["a"])


def test_every_row_of_a_measured_variant_is_as_long_as_the_header(measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"] = variant(4_000_000, 0.1, 0.06, None)
    text = render(measurements, [*measurements["variants"]])
    lengths = [len(header) for header in headers_of(text)]
    for name in measurements["variants"]:
        assert [len(row) for row in rows_of(text, name)] == lengths
    assert len(row_of(text, "reference, float32")) == lengths[0]
    lines = text.splitlines()
    for at, line in enumerate(lines):  # and each table begins at once with its rule, its rows without a gap
        if line.startswith("| variant |"):
            assert lines[at + 1].startswith("|---|")
            assert lines[at + 2].startswith("| **big** |")


def test_a_missing_variant_reads_not_measured(measurements: dict[str, Any]) -> None:
    text = render(measurements, ["big", "absent", "middle"])
    assert row_of(text, "absent")[:2] == ["absent", "not measured"]
    assert "| worse |" not in text  # only what was asked for


def test_a_disturbed_speed_is_marked_and_explained(measurements: dict[str, Any]) -> None:
    assert "†" not in render(measurements, ["big"])
    measurements["variants"]["big"]["decode"]["64"] = rate(300.0, disturbed=2)
    measurements["variants"]["big"]["prefill"]["128"] = rate(300.0, disturbed=1)
    text = render(measurements, [*measurements["variants"]])
    assert row_of(text, "big")[-2] == "300 †"
    assert rows_of(text, "big")[1][1:] == ["300 [290, 310] †", "900 [890, 910]", "300 [290, 310] †"]
    assert rows_of(text, "small")[1][-1] == "300 [290, 310]"
    assert "\n\n† Some rounds were disturbed, at most 2 of 7: other work took the cores" in text
    assert "what their marks mean" in text
    assert "‡" not in text
    assert "†" not in render(measurements, ["small"])  # only what is shown


def test_a_drift_is_marked_and_told(measurements: dict[str, Any]) -> None:
    measurements["variants"]["big"]["decode"]["64"] = rate(300.0, drifted=-0.183)
    measurements["variants"]["small"]["prefill"]["512"] = rate(2000.0, disturbed=1, drifted=0.07)
    text = render(measurements, [*measurements["variants"]])
    assert row_of(text, "big")[-2] == "300 ‡"
    assert rows_of(text, "small")[1][2] == "2000 [1990, 2010] †‡"
    (note,) = [line for line in text.splitlines() if line.startswith("‡")]
    assert note.endswith("big decode 64 -18 %, small prefill 512 +7 %.")


def test_a_length_that_was_not_measured_says_why(measurements: dict[str, Any]) -> None:
    for name in ("big", "small"):
        measurements["variants"][name]["not_measured"] = {"prefill 8192": "beyond the context"}
    text = render(measurements, [*measurements["variants"]])
    assert headers_of(text)[1][1:4] == [f"prefill {n}, tokens/s" for n in (128, 512, 8192)]
    assert rows_of(text, "big")[1][3] == "not measured"
    assert "\n\nNot measured: prefill 8192 of big, small: beyond the context.\n" in text


@pytest.mark.parametrize("dropped", [True, False])
def test_a_cold_start_says_how_cold_it_was(dropped: bool, measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"]["cold_start"]["page_cache_dropped"] = dropped
    text = render(measurements, [*measurements["variants"]])
    assert "Load and first prefill (128 tokens) are of a cold start: medians of 3, each in a process of its own" in text
    assert ("the weights dropped from the page cache before" in text) == dropped
    assert ("the page cache not dropped before" in text) != dropped


def test_a_variant_without_speed_reads_not_measured(measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"] = variant(4_000_000, 0.1, 0.06, None)
    in_all, rates, costs = rows_of(render(measurements, [*measurements["variants"]]), "small")
    assert in_all[8:10] == ["not measured"] * 2
    assert (rates[1:], costs[1:]) == (["not measured"] * 3, ["not measured"] * 4)


def test_nothing_timed_is_a_report_without_speeds(measurements: dict[str, Any]) -> None:
    measurements["variants"] = {"a": variant(5, 0.1, 0.0, None)}
    text = render(measurements, ["a"])
    assert len(rows_of(text, "a")) == 1
    assert "Speed and memory" not in text


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


def test_replies_are_shown_beside_the_references(measurements: dict[str, Any]) -> None:
    assert "## A reply" not in render(measurements, ["big"])
    measurements["reference"]["reply"] = {"asked": "Where?", "text": "There.", "tokens": 3, "stopped": "<|im_end|>"}
    same = {"same_tokens": 3, "reference_tokens": 3, "problem": None}
    measurements["variants"]["big"]["reply"] = {"text": "There.", "tokens": 3, "stopped": "<|im_end|>", **same}
    text = "a | b\n**c** <d>" + "e" * 100
    measurements["variants"]["small"]["reply"] = {"text": text, "tokens": 32, "stopped": None, **same, "same_tokens": 1}
    measurements["variants"]["small"]["reply"]["problem"] = "another prompt, from *"
    section = render(measurements, ["big", "small"]).split("## A reply\n")[1].split("\n## ")[0]
    assert section.splitlines()[1].startswith('To "Where?", each token the most likely')
    assert [line for line in section.splitlines() if line.startswith("|")][2:] == [
        r"| reference, float32 | There. | | at token 3, \<\|im\_end\|\> |",
        r"| big | There. | 3 of 3 | at token 3, \<\|im\_end\|\> |",
        rf"| small | a \| b \*\*c\*\* \<d\>{'e' * 84}… | 1 of 3 | not within 32 tokens |",
    ]
    assert [line for line in section.splitlines() if line.startswith("- ")] == [
        r"- **small**: another prompt, from \*."
    ]


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


def test_engines_that_differ_name_their_variants(measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"]["engine"] = ENGINE | {"kv_type": "q8_0"}
    text = render(measurements, ["big", "small"])
    assert "- Scored by llama.cpp: b1; AVX2; on cpu, 2 threads, KV cache f16," in text
    assert "- small: scored by llama.cpp: b1; AVX2; on cpu, 2 threads, KV cache q8_0," in text


def test_what_sets_a_variant_apart_is_beside_its_types(measurements: dict[str, Any]) -> None:
    variants = measurements["variants"]
    variants["middle"]["tensors_sha256"] = variants["big"]["tensors_sha256"]
    variants["middle"]["engine"] = ENGINE | {"kv_type": "q8_0", "flash_attention": "on"}
    variants["small"] |= {"path": "some/file.gguf", "scheme": "q4_k_m"}
    variants["worse"]["scheme"] = "q4_0+ffn_(up|down)=q8_0"
    text = render(measurements, [*variants])
    types = "Q4_0 90 %, Q6_K 10 %, F32 <1 %"
    assert row_of(text, "big")[-1] == f"{types}; same bytes as middle"
    assert row_of(text, "middle")[-1] == f"{types}; same bytes as big; KV cache q8_0, flash attention on"
    assert rf"| {types}; mix q4\_0\+ffn\_\(up\|down\)=q8\_0 |" in text
    assert row_of(text, "small")[-1] == f"{types}; made elsewhere, says q4_k_m"
