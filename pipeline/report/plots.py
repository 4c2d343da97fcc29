"""reports/pareto.png: size against KL, the front drawn as a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline.report.labels import Box, along, around, place
from pipeline.report.pareto import front
from pipeline.report.text import called

WIDTH, HEIGHT, DPI = 8.0, 5.0, 130
STYLES = (("o", "#0b6e4f"), ("s", "#b3541e"), ("^", "#3b5ba5"))
"""Marker and colour of each format, in order of appearance."""
INK, LINE = "#222222", "#9a9a9a"
FONT_SIZE, MARKER_SIZE, LINE_WIDTH = 9, 6, 1.2  # points
POINT = DPI / 72  # pixels


def draw(measurements: Mapping[str, Any], path: Path) -> None:
    """Write the picture to `path`: size in MB on a linear axis, mean KL in nats per token on a logarithmic one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants = measurements["variants"]
    on_front = front(variants)
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    points = {name: (v["size_bytes"] / 1e6, _kld(v)) for name, v in variants.items()}
    axes.plot(
        *zip(*(points[n] for n in on_front), strict=True) if on_front else ((), ()),
        color=LINE,
        linewidth=LINE_WIDTH,
        zorder=1,
    )
    formats = list(dict.fromkeys(v["format"] for v in variants.values()))
    for name, variant in variants.items():
        marker, color = STYLES[formats.index(variant["format"]) % len(STYLES)]
        kld, bars = variant["kld"]["mean"], None
        if kld["low"] is not None:
            bars = [[max(0.0, kld["value"] - max(kld["low"], 1e-12))], [kld["high"] - kld["value"]]]
        face: dict[str, Any] = {"markerfacecolor": color if name in on_front else "white"}
        x, y = points[name]
        axes.errorbar([x], [y], yerr=bars, fmt=marker, color=color, capsize=3, markersize=MARKER_SIZE, zorder=2, **face)
    if any(kld > 0 for _, kld in points.values()):
        axes.set_yscale("log")
    axes.margins(x=0.16, y=0.12)
    axes.set_xlabel("size of the weight files, MB")
    axes.set_ylabel("mean KL divergence to the reference, nats/token")
    axes.set_title(f"{measurements['identity']['source']['name']}: smaller and lower is better", fontsize=11)
    axes.grid(True, which="major", color="#e2e2e2", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    _legend(axes, formats, len(on_front) < len(variants))
    _label(axes, points, on_front)
    figure.savefig(path, format="png", metadata={"Software": None})


def _kld(variant: Mapping[str, Any]) -> float:
    return float(variant["kld"]["mean"]["value"])


def _legend(axes: Any, formats: Sequence[str], others: bool) -> None:
    """Formats by marker where there are several, and what is hollow where something is not on the front."""
    from matplotlib.lines import Line2D

    look: dict[str, Any] = {"linestyle": "none", "markersize": MARKER_SIZE}
    styled = zip(formats, STYLES * len(formats), strict=False)
    handles = [Line2D([], [], marker=m, color=c, label=called(name), **look) for name, (m, c) in styled]
    handles = handles if len(formats) > 1 else []
    if others:
        handles.append(
            Line2D([], [], marker="o", color=LINE, markerfacecolor="white", label="not on the front", **look)
        )
    if handles:
        axes.legend(handles=handles, loc="upper right", fontsize=FONT_SIZE, frameon=False)


def _label(axes: Any, points: Mapping[str, tuple[float, float]], on_front: Sequence[str]) -> None:
    """Names beside their points, clear of each other, the points, the front and the legend."""
    axes.figure.canvas.draw()  # settles the scales that pixels are read from
    renderer = axes.figure.canvas.get_renderer()
    inside = Box(*axes.get_window_extent(renderer).extents)
    at = {name: inside.nearest(axes.transData.transform(point)) for name, point in points.items()}
    taken = [around(point, MARKER_SIZE * POINT) for point in at.values()]
    taken += along([at[name] for name in on_front], LINE_WIDTH * POINT)
    if axes.get_legend() is not None:
        taken.append(Box(*axes.get_legend().get_window_extent(renderer).extents))
    labels = {name: axes.annotate(name, point, fontsize=FONT_SIZE, color=INK) for name, point in points.items()}
    extents = {name: label.get_window_extent(renderer) for name, label in labels.items()}
    sizes = {name: (extent.width, extent.height) for name, extent in extents.items()}
    for name, (x, y) in place(at, sizes, taken, inside).items():
        label = labels[name]
        label.set_anncoords("offset pixels")
        label.xyann = (x - at[name][0], y - at[name][1])
