"""reports/pareto.png: size against KL, the front drawn as a line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline.report.pareto import front

WIDTH, HEIGHT, DPI = 8.0, 5.0, 130
LABEL_WIDTH, LABEL_HEIGHT = 130.0, 20.0  # pixels
INK, FRONT, REST = "#222222", "#0b6e4f", "#8a8a8a"


def draw(measurements: Mapping[str, Any], path: Path) -> None:
    """Write the picture to `path`: size in MB on a linear axis, mean KL in nats per token on a logarithmic one."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    variants = measurements["variants"]
    on_front = front(variants)
    figure = Figure(figsize=(WIDTH, HEIGHT), dpi=DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    sizes = {name: v["size_bytes"] / 1e6 for name, v in variants.items()}
    axes.plot([sizes[n] for n in on_front], [_kld(variants[n]) for n in on_front], color=FRONT, linewidth=1.2, zorder=1)
    for name, variant in variants.items():
        kld, color = variant["kld"]["mean"], FRONT if name in on_front else REST
        bars = None
        if kld["low"] is not None:
            bars = [[max(0.0, kld["value"] - max(kld["low"], 1e-12))], [kld["high"] - kld["value"]]]
        axes.errorbar(
            [sizes[name]], [_kld(variant)], yerr=bars, fmt="o", color=color, capsize=3, markersize=6, zorder=2
        )
    if any(_kld(v) > 0 for v in variants.values()):
        axes.set_yscale("log")
    axes.margins(x=0.16, y=0.12)
    _label(axes, {name: (sizes[name], _kld(v)) for name, v in variants.items()})
    axes.set_xlabel("size of the weight file, MB")
    axes.set_ylabel("mean KL divergence to the reference, nats/token")
    axes.set_title(f"{measurements['identity']['source']['name']}: smaller and lower is better", fontsize=11)
    axes.grid(True, which="major", color="#e2e2e2", linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    figure.savefig(path, format="png", metadata={"Software": None})


def _kld(variant: Mapping[str, Any]) -> float:
    return float(variant["kld"]["mean"]["value"])


def _label(axes: Any, points: Mapping[str, tuple[float, float]]) -> None:
    """Names right of their points; one that would lie on the label below goes to the left."""
    axes.figure.canvas.draw()  # settles the scales that pixels are read from
    placed: list[tuple[float, float]] = []
    for name, point in sorted(points.items(), key=lambda item: item[1][1]):
        x, y = axes.transData.transform(point)
        crowded = any(abs(x - other_x) < LABEL_WIDTH and abs(y - other_y) < LABEL_HEIGHT for other_x, other_y in placed)
        offset, side = ((-8, -2), "right") if crowded else ((8, 4), "left")
        axes.annotate(name, point, xytext=offset, textcoords="offset points", ha=side, fontsize=9, color=INK)
        if not crowded:
            placed.append((x, y))
