"""reports/pareto.png: size against KL and, where speeds were measured, against prefill, with the fronts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.report.fronts import SIZE_KLD, SIZE_PREFILL, on_front, tied
from pipeline.report.labels import Box, along, around, place, upright
from pipeline.report.text import called
from pipeline.report.text import device as device_name

WIDTH, HEIGHT, LOWER_HEIGHT, DPI = 8.0, 5.0, 3.6, 130
STYLES = (("o", "#0b6e4f"), ("s", "#b3541e"), ("^", "#3b5ba5"))
"""Marker and colour of each format, in order of appearance."""
FILLS = {"on the front": "full", "on the front, tied with another on it": "bottom", "beaten": "none"}
"""How a marker is filled, by what its variant is."""
INK, LINE = "#222222", "#9a9a9a"
FONT_SIZE, MARKER_SIZE, LINE_WIDTH = 9, 6, 1.2  # points
POINT = DPI / 72  # pixels

Point = tuple[float, float]
Figures = Mapping[str, Any]


@dataclass(frozen=True)
class Panel:
    """A picture of size against a figure (`value`, `low`, `high`) of variants, with the fronts of some of them each."""

    figures: Mapping[str, Figures]
    fronts: Sequence[Mapping[str, Figures]]
    higher_is_better: bool
    title: str
    label: str

    def points(self, sizes: Mapping[str, float]) -> dict[str, Point]:
        """Size and figure of each variant."""
        return {name: (sizes[name], float(figure["value"])) for name, figure in self.figures.items()}

    def lines(self, points: Mapping[str, Point]) -> list[list[Point]]:
        """Of each front, from its smallest variant on, those that are better than all smaller ones by point values.

        The others on it are there because nothing says surely that they are worse.
        """
        sign, lines = -1 if self.higher_is_better else 1, []
        for front in self.fronts:
            line: list[Point] = []
            for x, y in sorted(
                (points[name] for name in on_front(front)), key=lambda point: (point[0], sign * point[1])
            ):
                if not line or sign * y < sign * line[-1][1]:
                    line.append((x, y))
            lines.append(line)
        return lines

    def standing(self, name: str) -> str:
        """One of FILLS."""
        front = next(front for front in self.fronts if name in front)
        on, on_and_tied, beaten = FILLS
        return beaten if not front[name]["on_front"] else on_and_tied if tied(front, name) else on


def draw(measurements: Figures, path: Path) -> None:
    """Write the picture to `path`: size in MB on a linear axis, mean KL in nats per token on a logarithmic one, below
    it tokens per second on a linear one.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants, shown = measurements["variants"], panels(measurements)
    heights = [HEIGHT, LOWER_HEIGHT][: len(shown)]
    figure = Figure(figsize=(WIDTH, sum(heights)), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(len(shown), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    formats = list(dict.fromkeys(v["format"] for v in variants.values()))
    sizes = {name: v["size_bytes"] / 1e6 for name, v in variants.items()}
    for axes, panel in zip(all_axes, shown, strict=True):
        points = panel.points(sizes)
        for name, (x, y) in points.items():
            marker, color = STYLES[formats.index(variants[name]["format"]) % len(STYLES)]
            bars, fill = _bars(panel.figures[name]), FILLS[panel.standing(name)]
            look = _filled(fill, color)
            axes.errorbar([x], [y], yerr=bars, fmt=marker, color=color, capsize=3, zorder=2, **look)
        for line in panel.lines(points):
            axes.plot([x for x, _ in line], [y for _, y in line], color=LINE, linewidth=LINE_WIDTH, zorder=1)
        if not panel.higher_is_better and any(y > 0 for _, y in points.values()):
            axes.set_yscale("log")
        axes.margins(x=0.16, y=0.12)
        axes.set_ylabel(panel.label, fontsize=FONT_SIZE)
        axes.set_title(panel.title, fontsize=11)
        axes.grid(True, which="major", color="#e2e2e2", linewidth=0.8)
        axes.set_axisbelow(True)
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    all_axes[-1].set_xlabel("size of the weight files, MB")
    standings = {panel.standing(name) for panel in shown for name in panel.figures}
    has_lines = any(len(line) > 1 for panel in shown for line in panel.lines(panel.points(sizes)))
    _legend(all_axes[0], formats, standings, has_lines)
    figure.canvas.draw()  # settles the scales that pixels are read from
    for axes, panel in zip(all_axes, shown, strict=True):
        _label(axes, sizes, panel)
    figure.savefig(path, format="png", metadata={"Software": None})


def panels(measurements: Figures) -> list[Panel]:
    """What is drawn: KL of all variants, and prefill of those that are on a front of it or beaten there."""
    variants, fronts = measurements["variants"], measurements["fronts"]
    klds = {name: v["kld"]["mean"] for name, v in variants.items()}
    title = f"{measurements['identity']['source']['name']}: smaller and lower is better"
    found = [Panel(klds, [fronts[SIZE_KLD]], False, title, "mean KL divergence to the reference, nats/token")]
    if by_device := fronts[SIZE_PREFILL]:
        length, devices = fronts["prompt_length"], " and, not to be compared, on ".join(map(device_name, by_device))
        rates = {name: variants[name]["prefill"][length] for front in by_device.values() for name in front}
        title = f"on {devices}: smaller and higher is better"
        found.append(Panel(rates, [*by_device.values()], True, title, f"prefill of {length} tokens, tokens/s"))
    return found


def _bars(figure: Figures) -> list[list[float]] | None:
    """Lengths of the error bars; none without an interval. A logarithmic axis has no 0."""
    if figure["low"] is None:
        return None
    return [[max(0.0, figure["value"] - max(figure["low"], 1e-12))], [figure["high"] - figure["value"]]]


def _filled(fill: str, color: str) -> dict[str, Any]:
    look: dict[str, Any] = {"fillstyle": fill, "markersize": MARKER_SIZE, "markerfacecoloralt": "white"}
    return look | ({"fillstyle": "full", "markerfacecolor": "white"} if fill == "none" else {"markerfacecolor": color})


def _legend(axes: Any, formats: Sequence[str], standings: Iterable[str], has_lines: bool) -> None:
    """Formats by marker where there are several, and what fillings mean where there are several."""
    from matplotlib.lines import Line2D

    def marked(label: str, **look: Any) -> Line2D:
        return Line2D([], [], linestyle="none", label=label, **{"markersize": MARKER_SIZE, **look})

    handles = []
    if len(formats) > 1:
        styled = zip(formats, STYLES * len(formats), strict=False)
        handles += [marked(called(name), marker=marker, color=color) for name, (marker, color) in styled]
    fills = [name for name in FILLS if name in standings]
    if fills != [*FILLS][:1]:
        handles += [marked(name, marker="o", color=LINE, **_filled(FILLS[name], LINE)) for name in fills]
    if handles and has_lines:
        handles.append(Line2D([], [], color=LINE, linewidth=LINE_WIDTH, label="the front, by point values"))
    if handles:
        axes.legend(handles=handles, loc="upper right", fontsize=FONT_SIZE, frameon=False)


def _label(axes: Any, sizes: Mapping[str, float], panel: Panel) -> None:
    """Names beside their points, clear of each other, the points, the fronts and the legend."""
    from matplotlib.patheffects import withStroke

    renderer = axes.figure.canvas.get_renderer()
    inside = Box(*axes.get_window_extent(renderer).extents)
    points = panel.points(sizes)

    def pixels(point: Point) -> Point:
        return inside.nearest(axes.transData.transform(point))

    at = {name: pixels(point) for name, point in points.items()}
    taken = [around(point, MARKER_SIZE * POINT) for point in at.values()]
    for line in panel.lines(points):
        taken += along([pixels(point) for point in line], LINE_WIDTH * POINT)
    bars = []
    for name, figure in panel.figures.items():
        if figure["low"] is not None:
            low, high = (pixels((sizes[name], figure[end])) for end in ("low", "high"))
            bars.append(upright(low, high, LINE_WIDTH * POINT))
    if axes.get_legend() is not None:
        taken.append(Box(*axes.get_legend().get_window_extent(renderer).extents))
    look = {"fontsize": FONT_SIZE, "color": INK, "path_effects": [withStroke(linewidth=2, foreground="white")]}
    labels = {name: axes.annotate(name, point, **look) for name, point in points.items()}
    extents = {name: label.get_window_extent(renderer) for name, label in labels.items()}
    boxes = {name: (extent.width, extent.height) for name, extent in extents.items()}
    for name, (x, y) in place(at, boxes, taken, inside, bars).items():
        label = labels[name]
        label.set_anncoords("offset pixels")
        label.xyann = (x - at[name][0], y - at[name][1])
