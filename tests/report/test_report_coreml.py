"""The report where Core ML is among the formats: what it says of packages, and what only a Mac could measure."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from figures import (
    COREML_ENGINE,
    NEEDS_MACOS,
    TIMING_ENGINE,
    UNREPRESENTATIVE,
    coreml_variant,
    costs,
    mlx_variant,
    picks_of,
    rate,
    rows_of,
    with_fronts,
)
from figures import rendered as render
from matplotlib.figure import Figure

from pipeline.report.build import _csv
from pipeline.report.fronts import SIZE_KLD, on_front
from pipeline.report.pareto import prompt_length
from pipeline.report.plots import _legend, draw

NOTHING = "not measured (needs macOS)"


@pytest.fixture
def three(measurements: dict[str, Any]) -> dict[str, Any]:
    """GGUF's four variants, one of MLX and three of Core ML."""
    measurements["variants"] |= {
        "mlx": mlx_variant(5_000_000, 0.05, 0.03),
        "coreml-fp16": coreml_variant(8_000_000, 0.0009, 0.0005, scheme="fp16", effective_types={"F16": 99, "F32": 1}),
        "coreml-int8": coreml_variant(4_100_000, 0.003, 0.002),
        "coreml-pal4": coreml_variant(2_000_000, 0.4, 0.3, scheme="pal4", effective_types={"pal4-g16": 99, "F32": 1}),
    }
    return measurements


def only(measurements: dict[str, Any], format_name: str) -> dict[str, Any]:
    return measurements | {
        "variants": {n: v for n, v in measurements["variants"].items() if v["format"] == format_name}
    }


def rendered(measurements: dict[str, Any]) -> str:
    text = render(measurements, [*measurements["variants"]])
    for trace in ("{{", "}}", "{%", "None", "nan", "Undefined"):
        assert trace not in text
    return text


def lines_with(text: str, word: str) -> list[str]:
    return [line for line in text.splitlines() if word in line]


# What cannot be measured here


def test_what_needs_macos_says_so_in_every_cell(three: dict[str, Any]) -> None:
    text = rendered(three)
    in_all, types, rates, costs_ = rows_of(text, "coreml-int8")
    assert in_all == [
        *("**coreml-int8**", "Core ML", "4.1", "4.7", "0.00300 [0.00270, 0.00330]", "+0.0020 [+0.0000, +0.0040]"),
        *(NOTHING, NOTHING),
    ]
    assert types[2] == "int8 100 %, F32 <1 %"
    assert (rates[1:], costs_[1:]) == ([NOTHING] * 3, [NOTHING] * 4)
    assert rows_of(text, "mlx")[3][1:] == ["not measured"] * 4  # for another reason, which its note tells
    assert lines_with(text, "Not measured:") == [
        "Not measured: speed and memory of coreml-fp16, coreml-int8, coreml-pal4: needs macOS."
    ]
    assert "Core ML: timed by" not in text
    gguf_only = three["variants"]["mlx"] | {"timing_engine": {}, "prefill": {}, "decode": {}}
    assert "\n- GGUF: timed by" in rendered(three | {"variants": three["variants"] | {"mlx": gguf_only}})


def test_each_reason_is_said_once(three: dict[str, Any]) -> None:
    beyond = "beyond its context"
    three["variants"]["big"]["not_measured"] = three["variants"]["small"]["not_measured"] = {"prefill 8192": beyond}
    three["variants"]["coreml-int8"]["not_measured"] = dict.fromkeys(("prefill 128", "decode 64"), NEEDS_MACOS)
    text = rendered(three)
    assert lines_with(text, "Not measured:") == [
        f"Not measured: prefill 8192 of big, small: {beyond}.",
        "Not measured: speed and memory of coreml-fp16, coreml-int8, coreml-pal4: needs macOS.",
    ]
    assert rows_of(text, "big")[2][3] == "not measured"
    assert rows_of(text, "coreml-int8")[2][1:] == [NOTHING] * 4
    three["variants"]["coreml-int8"]["not_measured"]["decode 64"] = "also this"
    text = rendered(three)
    assert rows_of(text, "coreml-int8")[2][1:] == ["not measured"] * 4  # one reason does not tell it
    assert "Not measured: decode 64 of coreml-int8: also this." in lines_with(text, "Not measured:")


def test_a_report_on_core_ml_alone_has_no_times(three: dict[str, Any]) -> None:
    alone = only(three, "coreml")
    text = rendered(alone)
    assert next(line for line in text.splitlines() if line.startswith("| variant |")).endswith(
        "| prefill 512, tokens/s | decode 64, tokens/s |"
    )
    assert rows_of(text, "coreml-int8")[0][6:] == [NOTHING] * 2
    for absent in ("Speeds are medians", "Times are medians", "cold start:", "imed by"):
        assert absent not in text
    assert prompt_length(alone["variants"]) is None
    fastest = picks_of(alone["variants"])[1]
    assert (fastest.variant, fastest.why) == (
        None,
        "no variant with a measured prefill is surely within 3 %; not measured: coreml-fp16, coreml-int8, "
        "coreml-pal4: needs macOS",
    )


def test_what_is_not_representative_and_what_needs_macos_are_told_apart(three: dict[str, Any]) -> None:
    left = {n: v for n, v in three["variants"].items() if v["format"] != "gguf"}
    assert picks_of(left)[1].why == (
        "no variant with a representative prefill is surely within 3 %; not representative: mlx: "
        f"{UNREPRESENTATIVE}; not measured: coreml-fp16, coreml-int8, coreml-pal4: needs macOS"
    )


def test_every_format_is_on_the_front_and_only_what_was_timed_is_the_fastest(three: dict[str, Any]) -> None:
    variants = three["variants"]
    assert on_front(with_fronts(three)["fronts"][SIZE_KLD]) == ["coreml-fp16", "coreml-int8", "small", "coreml-pal4"]
    assert [pick.variant for pick in picks_of(variants)] == ["coreml-int8", "worse", "coreml-pal4"]
    last = _csv(with_fronts(three)).splitlines()[-1]
    assert last == "coreml-pal4,2.0,0.4,0.3,,size_kld"


# On a Mac


def on_a_mac(measurements: dict[str, Any]) -> dict[str, Any]:
    placement = {
        "prefill": {"cpu": 0.09, "gpu": 0.0, "neural_engine": 0.91},
        "decode": {"cpu": 0.004, "gpu": 0.1, "neural_engine": 0.896},
    }
    timed = {"prefill": {"128": rate(700.0), "512": rate(3000.0)}, "decode": {"64": rate(90.0)}, "not_measured": {}}
    engine = {**COREML_ENGINE, "name": "Core ML", "version": "macOS 15", "device": "all", "threads": None}
    for name in ("coreml-int8", "coreml-pal4"):
        measurements["variants"][name] |= {**timed, **costs(), "timing_engine": engine, "placement": placement}
    measurements["variants"]["coreml-pal4"]["placement"] = None
    return measurements


def test_where_operations_run_is_a_table_of_its_own(three: dict[str, Any]) -> None:
    assert "operations of" not in rendered(three)
    assert "a load compiles" not in rendered(three)
    text = rendered(on_a_mac(three))
    assert "| variant | operations of prefill | operations of decode |\n|---|---|---|\n| **coreml-int8** |" in text
    assert rows_of(text, "coreml-int8")[4][1:] == [
        "CPU 9 %, Neural Engine 91 %",
        "CPU <1 %, GPU 10 %, Neural Engine 90 %",
    ]
    assert len(rows_of(text, "coreml-pal4")) == 4  # nobody asked where it runs
    assert "the share of operations for each compute unit" in text
    assert rows_of(text, "coreml-int8")[0][6:] == ["3000", "90"]
    assert rows_of(text, "coreml-int8")[3][1:] == ["0.25", "1.50", "123.4", "6.3"]
    assert "- Core ML: timed by Core ML: macOS 15; on all compute units, KV cache" in text
    assert "Of Core ML, a load compiles both functions" in text
    found = {pick.question: pick.variant for pick in picks_of(three["variants"])}
    question = "fastest prefill within 3 % of the reference's perplexity"
    assert found[f"{question}, on all compute units"] == "coreml-int8"
    assert found[f"{question}, on {TIMING_ENGINE['device']}"] == "worse"


# In words


def test_core_ml_is_explained_where_it_is(three: dict[str, Any]) -> None:
    text = rendered(three)
    for said in ("A **Core ML** variant is a package of three functions", "**reference executor** ones", "`pal4-g16`"):
        assert said in text
        assert said not in rendered(only(three, "gguf"))
    assert "- Core ML: scored by reference executor: coremltools 9; AVX2; on cpu, 2 threads, KV cache f16," in text
    assert "never a Core ML speed" in text
    on_mac = deepcopy(three)
    for name in ("coreml-fp16", "coreml-int8", "coreml-pal4"):
        on_mac["variants"][name]["engine"]["name"] = "Core ML"
    assert "reference executor" not in rendered(on_mac)
    assert "llama.cpp's" not in rendered(only(three, "coreml"))


def test_what_is_to_be_shipped_is_said_by_format(three: dict[str, Any]) -> None:
    parts = {
        "gguf": "a GGUF file holds its tokenizer",
        "mlx": "an MLX folder has tokenizer, config and index beside the weights",
        "coreml": "a Core ML folder has the package, tokenizer files, config and a Swift file that runs it",
    }
    begin = "**to ship** is all that has to be copied to run it"
    assert f"{begin}: {', '.join(parts.values())}. **bits" in " ".join(rendered(three).split())
    for format_name, part in parts.items():
        assert f"{begin}: {part}. **bits" in " ".join(rendered(only(three, format_name)).split())
    assert f"{begin}. **bits" in " ".join(render(three | {"variants": {}}, []).split())


def test_int16_says_what_it_is_beside_its_row_and_in_the_text(three: dict[str, Any]) -> None:
    assert "int16" not in rendered(three)
    types = {"int16": 998, "F32": 2}
    three["variants"]["coreml-int16"] = coreml_variant(8_010_000, 0.0009, 0.0, scheme="int16", effective_types=types)
    text = rendered(three)
    note = rows_of(text, "coreml-int16")[1][2]
    assert note == (
        "int16 100 %, F32 <1 %; real INT16 constants with a float32 scale for each row, dequantized in the graph: as "
        "large as fp16, and not what coremltools calls quantization"
    )
    words = " ".join(text.split())
    for said in (
        "- **int16** in Core ML is real INT16 constants with a float32 scale for each row;",
        "as large as fp16, and for bfloat16 sources no better than it.",
        "not what coremltools calls quantization, which has 4 and 8 bits.",
        "Whether Apple's compiler folds it when the package is loaded is not known without a Mac.",
    ):
        assert said in words
    assert text.count("real INT16") == 2  # no other row


def test_sizes_of_its_own_are_beside_the_types(three: dict[str, Any]) -> None:
    variants = three["variants"]
    variants["coreml-int8"]["scheme"] = "int8+chunk=256,max_context=4096"
    variants["coreml-pal4"]["scheme"] = "pal4+score_window=64"
    variants["big"]["scheme"] = "q8_0+attn_v=f16"
    text = rendered(three)
    assert rows_of(text, "coreml-int8")[1][2] == "int8 100 %, F32 <1 %; chunk 256, max context 4096 tokens"
    assert rows_of(text, "coreml-pal4")[1][2] == "pal4-g16 99 %, F32 1 %; score window 64 tokens"
    assert rows_of(text, "big")[1][2].endswith(r"; mix q8\_0\+attn\_v=f16")


def test_settings_and_bytes_of_core_ml_are_compared_among_its_own(three: dict[str, Any]) -> None:
    variants = three["variants"]
    variants["coreml-pal4"]["engine"] = COREML_ENGINE | {"kv_type": "f32"}
    variants["coreml-fp16"]["tensors_sha256"] = variants["big"]["tensors_sha256"]
    text = rendered(three)
    assert rows_of(text, "coreml-pal4")[1][2].endswith("; KV cache f32, flash attention off")
    assert rows_of(text, "coreml-fp16")[1][2] == "F16 99 %, F32 1 %"
    assert lines_with(text, "scored by reference executor")[1].startswith("- coreml-pal4: scored by")


def test_the_legend_calls_formats_by_their_names() -> None:
    axes = Figure().add_subplot()
    _legend(axes, ["gguf", "mlx", "coreml"], ["beaten", "on the front"], True)
    found = [text.get_text() for text in axes.get_legend().get_texts()]
    assert found == ["GGUF", "MLX", "Core ML", "on the front", "beaten", "the front, by point values"]


def test_three_formats_have_three_looks(three: dict[str, Any], tmp_path: Path) -> None:
    draw(with_fronts(three), tmp_path / "three.png")
    other = deepcopy(three)
    for name in ("coreml-fp16", "coreml-int8", "coreml-pal4"):
        other["variants"][name]["format"] = "mlx"
    draw(with_fronts(other), tmp_path / "other.png")
    assert (tmp_path / "three.png").read_bytes() != (tmp_path / "other.png").read_bytes()
