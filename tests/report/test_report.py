"""The report as text and as a picture, from measurements made by hand."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
from figures import (
    ENGINE,
    IDENTITY,
    PARITY,
    TIMING_ENGINE,
    UNREPRESENTATIVE,
    costs,
    figure,
    figures_in,
    mlx_variant,
    rate,
    row_of,
    rows_of,
    variant,
)
from figures import rendered as render

from pipeline.report.pareto import change
from pipeline.report.text import decimals, effective, megabytes, percent, ranged


def headers_of(text: str) -> list[list[str]]:
    """Of the tables of all variants, of rates and of what they cost."""
    lines = [line for line in figures_in(text).splitlines() if line.startswith("| variant |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def order_of(text: str) -> list[str]:
    """Variants of the rows of all tables of figures, of which all are on the front but "worse"."""
    lines = [line for line in figures_in(text).splitlines() if line.startswith(("| **", "| worse"))]
    return [line.split("|")[1].strip(" *") for line in lines]


# Markdown


def test_the_table_holds_every_figure(measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"]["folder_bytes"] = 4_100_000
    text = render(measurements, [*measurements["variants"]])
    in_all, types, rates, costs = headers_of(text)
    assert in_all == [
        *("variant", "format", "size, MB", "to ship, MB", "KL to reference, nats/token", "ln perplexity ratio"),
        *("prefill 512, tokens/s", "decode 64, tokens/s"),
    ]
    assert types == ["variant", "bits per weight", "effective types", "same top-1", "perplexity", "bits per byte"]
    assert rates == ["variant", "prefill 128, tokens/s", "prefill 512, tokens/s", "decode 64, tokens/s"]
    assert costs == ["variant", "load, s", "first prefill, s", "peak memory, MB", "KV cache, MB"]
    in_all, types, rates, costs = rows_of(text, "small")
    assert in_all == [
        *("**small**", "GGUF", "4.0", "4.1", "0.100 [0.090, 0.110]", "+0.0600 [+0.0580, +0.0620]"),
        *("2000", "300"),
    ]
    assert types == [
        *("**small**", "4.50", "Q4_0 90 %, Q6_K 10 %, F32 <1 %", "90.0 [89.0, 91.0] %", "80.50 [75.50, 85.50]"),
        "2.0123",
    ]
    assert rates == ["**small**", "1000 [990, 1010]", "2000 [1990, 2010]", "300 [290, 310]"]
    assert costs == ["**small**", "0.25", "1.50", "123.4", "6.3"]
    assert row_of(text, "worse")[0] == "worse"  # not on the front
    assert "| reference, float32 | | F32 | 100 % | 80.00 | |" in text
    order = [
        line.split("|")[1].strip(" *") for line in figures_in(text).splitlines() if line.startswith(("| **", "| worse"))
    ]
    assert order == ["big", "worse", "middle", "small"] * 4
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
    assert len(row_of(text, "reference, float32")) == lengths[1]
    lines = figures_in(text).splitlines()
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
    assert row_of(text, "big")[-1] == "300 †"
    assert rows_of(text, "big")[2][1:] == ["300 [290, 310] †", "900 [890, 910]", "300 [290, 310] †"]
    assert rows_of(text, "small")[2][-1] == "300 [290, 310]"
    assert "\n\n† Some rounds were disturbed, at most 2 of 7: other work took the cores" in text
    assert "what their marks mean" in text
    assert "‡" not in text
    assert "†" not in render(measurements, ["small"])  # only what is shown


def test_a_drift_is_marked_and_told(measurements: dict[str, Any]) -> None:
    measurements["variants"]["big"]["decode"]["64"] = rate(300.0, drifted=-0.183)
    measurements["variants"]["small"]["prefill"]["512"] = rate(2000.0, disturbed=1, drifted=0.07)
    text = render(measurements, [*measurements["variants"]])
    assert row_of(text, "big")[-1] == "300 ‡"
    assert rows_of(text, "small")[2][2] == "2000 [1990, 2010] †‡"
    (note,) = [line for line in text.splitlines() if line.startswith("‡")]
    assert note.endswith("big decode 64 -18 %, small prefill 512 +7 %.")


def test_a_length_that_was_not_measured_says_why(measurements: dict[str, Any]) -> None:
    for name in ("big", "small"):
        measurements["variants"][name]["not_measured"] = {"prefill 8192": "beyond the context"}
    text = render(measurements, [*measurements["variants"]])
    assert headers_of(text)[2][1:4] == [f"prefill {n}, tokens/s" for n in (128, 512, 8192)]
    assert rows_of(text, "big")[2][3] == "not measured"
    assert "\n\nNot measured: prefill 8192 of big, small: beyond the context.\n" in text
    measurements["variants"]["big"]["not_measured"] |= {"decode 9": "slow", "prefill 4096": "beyond the context"}
    measurements["variants"]["small"]["not_measured"] |= {"prefill 4096": "beyond the context"}
    notes = [line for line in render(measurements, ["big", "small"]).splitlines() if line.startswith("Not measured:")]
    assert notes == [
        "Not measured: prefill 8192, prefill 4096 of big, small: beyond the context.",
        "Not measured: decode 9 of big: slow.",
    ]


@pytest.mark.parametrize("dropped", [True, False])
def test_a_cold_start_says_how_cold_it_was(dropped: bool, measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"]["cold_start"]["page_cache_dropped"] = dropped
    text = render(measurements, [*measurements["variants"]])
    assert "Load and first prefill (128 tokens) are of a cold start: medians of 3, each in a process of its own" in text
    assert " KV cache: for the longest prompt and the tokens decoded, a hybrid's state included." in text
    assert ("the weights dropped from the page cache before" in text) == dropped
    assert ("the page cache not dropped before" in text) != dropped


def test_a_variant_without_speed_reads_not_measured(measurements: dict[str, Any]) -> None:
    measurements["variants"]["small"] = variant(4_000_000, 0.1, 0.06, None)
    in_all, _, rates, costs = rows_of(render(measurements, [*measurements["variants"]]), "small")
    assert in_all[6:] == ["not measured"] * 2
    assert (rates[1:], costs[1:]) == (["not measured"] * 3, ["not measured"] * 4)


def test_nothing_timed_is_a_report_without_speeds(measurements: dict[str, Any]) -> None:
    measurements["variants"] = {"a": variant(5, 0.1, 0.0, None)}
    text = render(measurements, ["a"])
    assert len(rows_of(text, "a")) == 2
    assert "Speed and memory" not in text


def test_one_window_has_no_brackets(measurements: dict[str, Any]) -> None:
    one = measurements["variants"]["big"]
    for key in ("ppl", "ln_ppl_ratio", "same_top"):
        one[key] = figure(one[key]["value"], None)
    one["kld"]["mean"] = figure(0.001, None)
    measurements["variants"] = {"big": one}
    in_all, types = rows_of(render(measurements, ["big"]), "big")[:2]
    assert (in_all[4:6], types[3:5]) == (["0.00100", "+0.0010"], ["90.0 %", "80.50"])


def test_nothing_measured_at_all_is_a_report_too(measurements: dict[str, Any]) -> None:
    measurements["variants"] = {}
    measurements["reference"]["ppl"] = None
    text = render(measurements, ["a", "b"])
    assert row_of(text, "a")[1] == row_of(text, "b")[1] == "not measured"
    assert "| smallest of all | none | nothing was measured |" in text


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
    assert rows_of(text, "big")[1][2] == f"{types}; same bytes as middle"
    assert rows_of(text, "middle")[1][2] == f"{types}; same bytes as big; KV cache q8_0, flash attention on"
    assert rf"| {types}; mix q4\_0\+ffn\_\(up\|down\)=q8\_0 |" in text
    assert rows_of(text, "small")[1][2] == f"{types}; made elsewhere, says q4_k_m"


# Two formats


def test_rows_of_two_formats_stand_side_by_side(two: dict[str, Any]) -> None:
    text = render(two, [*two["variants"]])
    in_all, types, rates, costs = rows_of(text, "mlx-a")
    assert in_all == [
        *("**mlx-a**", "MLX", "5.0", "5.5", "0.0500 [0.0450, 0.0550]", "+0.0300 [+0.0280, +0.0320]", "50 §", "300 §"),
    ]
    assert types[2] == "int4-g64 100 %, BF16 <1 %"  # the bytes of "big" are another format's, the settings its own
    assert rates[1:] == ["25 [15, 35] §", "50 [40, 60] §", "300 [290, 310] §"]
    assert costs[1:] == ["not measured"] * 4
    assert rows_of(text, "big")[0][1:4] == ["GGUF", "8.0", "8.0"]
    assert rows_of(text, "big")[1][2] == "Q4_0 90 %, Q6_K 10 %, F32 <1 %"
    order = [
        line.split("|")[1].strip(" *") for line in figures_in(text).splitlines() if line.startswith(("| **", "| worse"))
    ]
    assert order[:6] == ["big", "worse", "middle", "mlx-a", "small", "mlx-b"]  # by size, whatever the format
    assert f"\n\n§ Not representative, and so never picked: mlx-a, mlx-b: {UNREPRESENTATIVE}. Medians of 7.\n" in text
    assert "§" not in render(two, ["big", "small"])


def test_settings_and_bytes_are_compared_within_a_format(two: dict[str, Any]) -> None:
    variants = two["variants"]
    variants["mlx-b"]["tensors_sha256"] = variants["mlx-a"]["tensors_sha256"]
    variants["small"]["engine"] = ENGINE | {"kv_type": "q8_0"}
    for name in ("c", "d", "e", "f"):  # more of MLX than of GGUF: their settings are not the usual ones of GGUF
        variants[name] = mlx_variant(2_000_000, 0.3, 0.2)
    variants["f"]["engine"] = variants["f"]["engine"] | {"kv_type": "f16"}
    text = render(two, [*variants])
    notes = {name: rows_of(text, name)[1][2].split("; ", 1)[1:] for name in ("mlx-a", "mlx-b", "big", "small", "f")}
    assert notes == {
        "mlx-a": ["same bytes as mlx-b"],
        "mlx-b": ["same bytes as mlx-a"],
        "big": [],
        "small": ["KV cache q8_0, flash attention off"],
        "f": ["same bytes as c, d, e; KV cache f16, flash attention off"],
    }


def test_engines_are_told_by_format_and_checks_beside_them(two: dict[str, Any]) -> None:
    variants = two["variants"]
    variants["mlx-b"]["parity"] = PARITY | {"max_difference": 2.34e-5}
    variants["small"]["engine"] = ENGINE | {"kv_type": "q8_0"}
    text = render(two, [*variants])
    lines = [line for line in text.splitlines() if "scored by" in line or "timed by" in line]
    assert lines == [
        "- GGUF: scored by llama.cpp: b1; AVX2; on cpu, 2 threads, KV cache f16, flash attention off.",
        "- small: scored by llama.cpp: b1; AVX2; on cpu, 2 threads, KV cache q8_0, flash attention off.",
        "- MLX: scored by torch: torch 2; AVX2; on cpu, 2 threads, KV cache float32, flash attention off; checked "
        "against mlx (mlx 0.32) on 2 windows: log-probabilities differ by at most 2.3e-05 nats (limit 1e-03).",
        "- GGUF: timed by llama.cpp: b1; on gpu, 4 threads, KV cache f16, flash attention auto, batch 2048 in parts "
        "of 512, mmap on.",
        "- MLX: timed by mlx: mlx 0.32; on cpu, 2 threads, KV cache float32, flash attention off, batch 2048.",
    ]
    variants["mlx-b"]["parity"] = PARITY | {"windows": 1}
    assert "on 2 windows: log-probabilities differ by at most 8.0e-06 nats (limit 1e-03); checked against" in render(
        two, [*variants]
    )


def test_one_format_is_not_told_of_another(two: dict[str, Any]) -> None:
    gguf, mlx = (
        two | {"variants": {n: v for n, v in two["variants"].items() if v["format"] == of}} for of in ("gguf", "mlx")
    )
    both, of_gguf, of_mlx = (render(measured, [*measured["variants"]]) for measured in (two, gguf, mlx))
    for said, where in (("llama.cpp's", (both, of_gguf)), ("`int4-g64` is 4 bits", (both, of_mlx))):
        assert [said in text for text in (both, of_gguf, of_mlx)] == [text in where for text in (both, of_gguf, of_mlx)]
    assert "- Scored by torch: torch 2;" in of_mlx
    assert "| fastest prefill within 3 % of the reference's perplexity | none | no variant with a rep" in of_mlx


def test_memory_that_was_counted_in_another_way_is_told_apart(two: dict[str, Any]) -> None:
    variants = two["variants"]
    peak = "Peak memory, after the longest prompt and decoding, is "
    resident = "all that such a process had resident, mapped weights included (resident set)"
    assert f"{peak}{resident}. KV" in render(two, [*variants])
    own = {"unrepresentative": None, **costs(), "memory_by": "mlx.core.get_peak_memory"}
    variants["mlx-a"] |= own
    text = render(two, ["big", "small", "mlx-a", "mlx-b"])
    expected = (
        f"{peak}of big, small {resident}; of mlx-a the most that MLX had allocated, without what else the process held "
        "(mlx.core.get_peak_memory); do not compare one with the other."
    )
    assert expected in text
    assert rows_of(text, "mlx-a")[3][1:] == ["0.25", "1.50", "123.4", "6.3"]
