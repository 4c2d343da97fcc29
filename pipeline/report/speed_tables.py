"""What the tables of speeds hold, of this machine or another one: speeds.md.j2 is their template."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.speeds import COSTS, cost_notes, costs, placements, rate, rate_notes, tasks_of, tokens_of


def tables(variants: Mapping[str, Mapping[str, Any]], on_front: Sequence[str] = ()) -> dict[str, Any]:
    """Rates, costs and placement of variants as text, in their order, with notes.

    Raises:
        KeyError, TypeError, ValueError: figures that are not as `timed_figures` makes them.
    """
    lengths, decodes = tokens_of(variants, "prefill"), tokens_of(variants, "decode")
    tasks = [("prefill", n) for n in lengths] + [("decode", n) for n in decodes]
    shown = {name: f"**{name}**" if name in on_front else name for name in variants}
    return {
        "lengths": lengths,
        "decodes": decodes,
        "rows": [
            {"name": shown[name], "rates": [rate(v, kind, n) for kind, n in tasks], "costs": costs(v)}
            for name, v in variants.items()
        ],
        "cost_columns": COSTS,
        "placements": {shown[name]: placed for name, placed in placements(variants).items()},
        "rate_notes": rate_notes(variants),
        "cost_notes": cost_notes(variants),
        "rounds": max((task["rounds"] for v in variants.values() for _, task in tasks_of(v)), default=0),
    }
