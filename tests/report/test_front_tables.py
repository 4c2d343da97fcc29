"""The report's section on fronts: readable, with the reason of each standing."""

from __future__ import annotations

from typing import Any

import numpy as np
from figures import (
    TIMING_ENGINE,
    UNREPRESENTATIVE,
    coreml_variant,
    fronts_in,
    klds_of,
    rate,
    row_of,
    variant,
)
from figures import (
    rendered as render,
)

from pipeline.report import markdown
from pipeline.report.fronts import fronts

TEXT = np.resize([0.01, -0.01], 40)  # what windows have in common
NOISE = np.repeat([0.002, -0.002], 20)


def section_of(measurements: dict[str, Any], klds: dict[str, Any] | None = None) -> str:
    """The section on fronts, of variants whose KL of windows is the text's and their own."""
    variants = measurements["variants"]
    found = fronts(variants, klds_of(variants) | {name: TEXT + own for name, own in (klds or {}).items()})
    return fronts_in(markdown.render({**measurements, "fronts": found}, [*variants]))


def cells(section: str) -> dict[str, list[str]]:
    lines = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("| ")]
    return {name.strip(): [cell.strip() for cell in row] for name, *row in lines}


def test_the_section_tells_who_is_on_each_front_and_who_is_beaten_by_whom(measurements: dict[str, Any]) -> None:
    measurements["variants"]["slow"] = variant(6_600_000, 0.03, 0.02, 800.0)
    section = section_of(measurements)
    assert cells(section) == {
        "variant": ["size × KL", "size × prefill 512", "all three"],
        "big": [
            "**on it**",
            "beaten by small: 2000 [1990, 2010] tokens/s against 900 [890, 910]",
            "**on it**",
        ],
        "slow": [
            "beaten by middle: KL 0.0200 [0.0200, 0.0200] less",
            "beaten by small: 2000 [1990, 2010] tokens/s against 800 [790, 810]",
            "beaten by middle: KL 0.0200 [0.0200, 0.0200] less, 1100 [1090, 1110] tokens/s against 800 [790, 810]; "
            "also by worse",
        ],
        "worse": [
            "beaten by middle: KL 0.0100 [0.0100, 0.0100] less",
            "beaten by small: 2000 [1990, 2010] tokens/s against 1500 [1490, 1510]",
            "**on it**",
        ],
        "middle": [
            "**on it**",
            "beaten by small: 2000 [1990, 2010] tokens/s against 1100 [1090, 1110]",
            "**on it**",
        ],
        "small": ["**on it**", "**on it**", "**on it**"],
    }
    words = " ".join(section.split())
    assert "the paired interval, over 40 windows, of the difference of their KL must lie wholly above 0" in words
    assert "Each is a 95 % interval of one pair, not widened for the number of pairs" in words
    for absent in ("One window", "Fewer than 6", "without a speed", "different devices"):
        assert absent not in words


def test_ties_are_told_with_their_difference(measurements: dict[str, Any]) -> None:
    measurements["variants"]["worse"]["prefill"]["512"] = rate(1995.0)
    measurements["variants"]["middle"]["prefill"]["512"] = rate(1977.0)
    found = cells(section_of(measurements, {"big": NOISE + 0.0002, "middle": -NOISE, "worse": 0.001, "small": 1.0}))
    assert found["big"][0] == "**on it**, tied with middle (KL +0.00020 [-0.00110, +0.00150])"
    assert found["middle"][0] == "**on it**, tied with big (KL -0.00020 [-0.00150, +0.00110])"
    assert found["middle"][2] == "**on it**, tied with worse, big"  # each not surely beaten in one thing
    assert (found["worse"][1], found["small"][1]) == ("**on it**, tied with small", "**on it**, tied with worse")


def test_many_ties_are_counted(measurements: dict[str, Any]) -> None:
    kld = dict.fromkeys(measurements["variants"], 0.0)
    assert [row[0] for row in cells(section_of(measurements, kld)).values()][1:] == [
        "**on it**, tied with all others on it"
    ] * 4
    extra = {f"v{i}": variant(3_000_000 + i, 0.1, 0.06, 2000.0) for i in range(5)}
    measurements["variants"] |= extra
    section = section_of(measurements, {**dict.fromkeys(extra, 0.0), "small": -1.0, "middle": -2.0, "big": -3.0})
    differs = "(KL +0.0 [+0.0, +0.0])"
    ties = ", ".join(f"v{i} {differs}" for i in (0, 1, 2))
    assert cells(section)["v4"][0] == f"**on it**, tied with {ties} and 1 more"
    assert cells(section)["small"][0] == "**on it**"


def test_what_has_no_speed_to_compare_is_left_out_with_its_reason(two: dict[str, Any]) -> None:
    two["variants"]["untimed"] = variant(1_000_000, 0.9, 0.5, None)
    two["variants"]["long"] = variant(900_000, 0.9, 0.5, not_measured={"prefill 512": "beyond its context"})
    del two["variants"]["long"]["prefill"]["512"]
    two["variants"]["mac"] = coreml_variant(800_000, 0.9, 0.5)
    section = section_of(two)
    for name in ("mlx-a", "mlx-b", "untimed", "long", "mac"):
        assert cells(section)[name][1:] == ["–", "–"]
    assert (
        f"\n\nOn no front of prefill, without a speed to compare: mlx-a, mlx-b ({UNREPRESENTATIVE}); untimed (no speed "
        "was measured); long (beyond its context); mac (needs macOS).\n"
    ) in section
    alone = {**two, "variants": {name: two["variants"][name] for name in ("mlx-b", "mac")}}
    section = section_of(alone)
    assert cells(section) == {"variant": ["size × KL"], "mlx-b": ["**on it**"], "mac": ["**on it**"]}
    assert (
        "\n\nNo speed could be compared, and so there is no front of prefill: mlx-b "
        f"({UNREPRESENTATIVE}); mac (needs macOS).\n"
    ) in section
    assert "size × prefill" not in section


def test_devices_are_named_where_there_are_several(two: dict[str, Any]) -> None:
    two["variants"]["mlx-a"] |= {"unrepresentative": None, "timing_engine": TIMING_ENGINE | {"device": "cpu+ne"}}
    section = section_of(two)
    assert cells(section)["mlx-a"][1:] == ["on the Neural Engine and CPU: **on it**"] * 2
    assert cells(section)["small"][1] == "on gpu: **on it**"
    assert "Speeds on different devices are not compared" in section


def test_one_window_and_few_rounds_beat_nothing_and_say_so(measurements: dict[str, Any]) -> None:
    for v in measurements["variants"].values():
        v["prefill"]["512"] |= {"low": None, "high": None}
    text = render(measurements, [*measurements["variants"]], windows=1)
    section = fronts_in(text)
    assert [row for name, row in cells(section).items() if name != "variant"] == [["**on it**"] * 3] * 4
    assert "\nOne window has no interval: no KL is told apart from another" in section
    assert "\n\nFewer than 6 rounds have no interval: no speed is told apart from another.\n" in section
    assert "wholly above" not in section
    assert row_of(text, "worse")[0] == "**worse**"


def test_fifteen_variants_take_fifteen_rows(measurements: dict[str, Any]) -> None:
    measurements["variants"] = {f"v{i}": variant(9_000_000 - i, 0.1 + i / 100, 0.0, 500.0 + i) for i in range(15)}
    section = section_of(measurements)
    assert len(section.splitlines()) < 30
    assert max(map(len, section.splitlines())) < 300


def test_where_the_order_of_bits_is_another_it_is_said(measurements: dict[str, Any]) -> None:
    variants = measurements["variants"]
    assert "fewer bits per weight" not in render(measurements, [*variants])
    for name, bits in (("big", 8.5), ("middle", 6.5), ("worse", 5.0), ("small", 5.5)):
        variants[name]["bits_per_weight"] = bits
    text = render(measurements, [*variants])
    lines = text.partition("some variants are surely farther from the reference than one of fewer bits")[2].splitlines()
    assert lines[0].endswith("by the paired interval of 40")
    assert [line for line in lines[:6] if line.startswith("- ")] == [
        "- worse (5.00 bits) is nearer than **small** (5.50 bits): KL 0.0800 [0.0800, 0.0800] less."
    ]
