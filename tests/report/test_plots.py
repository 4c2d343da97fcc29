"""The picture: its panels, what they show, and names that lie on nothing."""

from __future__ import annotations

import struct
from copy import deepcopy
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from figures import (
    TIMING_ENGINE,
    figure,
    hand_made,
    rate,
    variant,
    with_fronts,
)

from pipeline.report.labels import Box, place
from pipeline.report.plots import draw, panels

ONE_PANEL, TWO_PANELS = (1040, 650), (1040, 1118)


def size_of(png: Path) -> tuple[float, float]:
    data = png.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert data[12:16] == b"IHDR"
    assert data[-8:-4] == b"IEND"
    return struct.unpack(">II", data[16:24])


def test_the_picture_is_a_png_of_its_size(measurements: dict[str, Any], tmp_path: Path) -> None:
    draw(with_fronts(measurements), tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == TWO_PANELS
    draw(with_fronts(measurements), tmp_path / "b.png")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    moved = deepcopy(measurements)
    moved["variants"]["small"]["size_bytes"] += 1_000_000
    draw(with_fronts(moved), tmp_path / "c.png")
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
    draw(with_fronts(measurements), tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == TWO_PANELS


def test_nothing_measured_is_an_empty_picture(measurements: dict[str, Any], tmp_path: Path) -> None:
    measurements["variants"] = {}
    draw(with_fronts(measurements), tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == ONE_PANEL


def test_there_is_one_panel_without_speeds(two: dict[str, Any], tmp_path: Path) -> None:
    two["variants"] = {name: two["variants"][name] for name in ("mlx-a", "mlx-b")}
    assert [panel.higher_is_better for panel in panels(with_fronts(two))] == [False]
    draw(with_fronts(two), tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == ONE_PANEL


def test_panels_show_standings_and_lines(two: dict[str, Any]) -> None:
    """Ties on the front are marked, and the line is that of those better than all smaller ones by point values."""
    kld, prefill = panels(with_fronts(two))
    assert [*kld.figures] == [*two["variants"]]
    assert {name: kld.standing(name) for name in ("big", "worse")} == {"big": "on the front", "worse": "beaten"}
    sizes = {name: v["size_bytes"] / 1e6 for name, v in two["variants"].items()}
    line = [(3.0, 0.2), (4.0, 0.1), (5.0, 0.05), (6.0, 0.01), (8.0, 0.001)]
    assert kld.lines(kld.points(sizes)) == [line]
    assert prefill.figures.keys() == {"big", "middle", "worse", "small"}  # not what nobody runs so
    assert {name: prefill.standing(name) for name in prefill.figures} == {
        **dict.fromkeys(("big", "middle", "worse"), "beaten"),
        "small": "on the front",
    }
    assert prefill.lines(prefill.points(sizes)) == [[(4.0, 2000.0)]]
    assert prefill.title == "on gpu: smaller and higher is better"
    assert prefill.label == "prefill of 512 tokens, tokens/s"
    two["variants"]["middle"]["prefill"]["512"] = rate(2005.0)
    two["variants"]["big"]["prefill"]["512"] = rate(1996.0)
    _, prefill = panels(with_fronts(two))
    tie = "on the front, tied with another on it"
    assert {name: prefill.standing(name) for name in prefill.figures} == {
        **dict.fromkeys(("big", "middle", "small"), tie),
        "worse": "beaten",
    }
    assert prefill.lines(prefill.points(sizes)) == [[(4.0, 2000.0), (6.0, 2005.0)]]
    two["variants"]["mlx-a"] |= {"unrepresentative": None, "timing_engine": TIMING_ENGINE | {"device": "cpu+ne"}}
    _, prefill = panels(with_fronts(two))
    assert prefill.title == (
        "on the Neural Engine and CPU and, not to be compared, on gpu: smaller and higher is better"
    )
    assert prefill.standing("mlx-a") == "on the front"
    assert len(prefill.lines(prefill.points(sizes))) == 2


def test_names_in_a_picture_of_two_panels_lie_on_no_other(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Sizes and figures as a report of GGUF has them, whose intervals of speed are wide."""
    found: list[dict[str, Box]] = []

    def kept(at: Any, sizes: Any, *others: Any) -> dict[str, tuple[float, float]]:
        placed = place(at, sizes, *others)
        found.append({n: Box(x, y, x + sizes[n][0], y + sizes[n][1]) for n, (x, y) in placed.items()})
        return placed

    made = {
        "gguf-bf16": (13.92, 5e-5, 5301, 4662, 6077),
        "gguf-q8_0": (7.53, 1.7e-3, 5513, 5250, 7518),
        "gguf-q6_k": (5.88, 1.2e-2, 5101, 4567, 7375),
        "gguf-q5_k_m": (5.32, 2.6e-2, 5700, 5506, 7220),
        "gguf-q5_0": (5.26, 3.4e-2, 4514, 4094, 6037),
        "gguf-q4_k_m": (4.78, 7.8e-2, 5880, 5466, 7342),
        "gguf-q4_0": (4.67, 0.13, 6071, 5592, 9088),
    }
    measurements = hand_made()
    measurements["variants"] = {name: variant(int(size * 1e6), kld, 0.0) for name, (size, kld, *_) in made.items()}
    for name, (*_, value, low, high) in made.items():
        measurements["variants"][name]["prefill"]["512"] |= {"value": value, "low": low, "high": high}
    monkeypatch.setattr("pipeline.report.plots.place", kept)
    draw(with_fronts(measurements), tmp_path / "a.png")
    assert [len(boxes) for boxes in found] == [7, 7]
    for boxes in found:
        assert max(a.shared(b) for a, b in combinations(boxes.values(), 2)) == 0.0


def test_one_window_is_drawn_without_bars(measurements: dict[str, Any], tmp_path: Path) -> None:
    measurements["variants"]["big"]["kld"]["mean"] = figure(0.001, None)
    draw(with_fronts(measurements), tmp_path / "a.png")
    assert size_of(tmp_path / "a.png") == TWO_PANELS


def test_formats_are_told_apart_in_the_picture(two: dict[str, Any], tmp_path: Path) -> None:
    draw(with_fronts(two), tmp_path / "two.png")
    one = deepcopy(two)
    for name in ("mlx-a", "mlx-b"):
        one["variants"][name]["format"] = "gguf"
    draw(with_fronts(one), tmp_path / "one.png")
    assert size_of(tmp_path / "two.png") == TWO_PANELS
    assert (tmp_path / "two.png").read_bytes() != (tmp_path / "one.png").read_bytes()
