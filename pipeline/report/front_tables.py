"""The fronts as text: who is on each, who is beaten by whom and by how much, what is not told apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pipeline.report.fronts import ALL_THREE, BITS_DIGITS, KLD, PREFILL, SIZE_KLD, SIZE_PREFILL, on_front, tied
from pipeline.report.pareto import unmeasured
from pipeline.report.text import decimals, ranged
from pipeline.report.text import device as device_name

NAMED = 3  # ties that a cell names
OUT = "–"
NO_SPEED = "no speed was measured"

Figures = Mapping[str, Any]
Variants = Mapping[str, Figures]


def section(variants: Variants, fronts: Figures) -> dict[str, Any]:
    """What the report's section on fronts holds, of variants in the order that they are shown in.

    Raises:
        KeyError, TypeError: fronts that are not as `fronts.fronts` makes them.
    """
    by_device, length = fronts[SIZE_PREFILL], fronts["prompt_length"]
    device = {name: at for at, front in by_device.items() for name in front}
    rates = {name: v["prefill"][length] for name, v in variants.items() if name in device}
    rows = []
    for name in variants:
        cells = [_cell(name, fronts[SIZE_KLD], rates)]
        for of in (by_device, fronts[ALL_THREE]) if by_device else ():
            at = device.get(name)
            on = f"on {device_name(at)}: " if at is not None and len(by_device) > 1 else ""
            cells.append(OUT if at is None else on + _cell(name, of[at], rates))
        rows.append({"name": name, "cells": cells})
    return {
        "rows": rows,
        "windows": fronts["windows"],
        "length": length,
        "devices": [device_name(at) for at in by_device],
        "left_out": _left_out({name: v for name, v in variants.items() if name not in device}, length),
        "few_rounds": any(rate["low"] is None for rate in rates.values()),
    }


def order_notes(variants: Variants, fronts: Figures) -> list[str]:
    """'int8 (8.07 bits) is nearer than q8_0 (8.51 bits): KL 0.000697 [0.000659, 0.000736] less', of each that is so."""
    bits = {name: f"{v['bits_per_weight']:.{BITS_DIGITS}f} bits" for name, v in variants.items()}
    return [
        f"{other} ({bits[other]}) is nearer than **{name}** ({bits[name]}): KL {_interval(found[KLD])} less"
        for name, nearer in fronts["fewer_bits_nearer"].items()
        for other, found in nearer.items()
        if {name, other} <= bits.keys()
    ]


def _cell(name: str, front: Variants, rates: Variants) -> str:
    """'**on it**, tied with …' or 'beaten by …', with what says so."""
    entry = front[name]
    if not entry["on_front"]:
        return _beaten(name, entry["beaten_by"], rates)
    ties = tied(front, name)
    if not ties:
        return "**on it**"
    if len(ties) == len(on_front(front)) - 1 > 1:
        return "**on it**, tied with all others on it"
    more = f" and {len(ties) - NAMED} more" if len(ties) > NAMED else ""
    return f"**on it**, tied with {', '.join(other + _doubt(entry['ties'][other]) for other in ties[:NAMED])}{more}"


def _doubt(found: Figures) -> str:
    """The difference of KL that is not sure; the intervals of speeds are in a table of their own."""
    return f" (KL {_interval(found[KLD], signed=True)})" if found.keys() == {KLD} else ""


def _beaten(name: str, by: Variants, rates: Variants) -> str:
    """By the one that is best of those on the front, in KL where the front goes by it; the others by name."""

    def best_first(other: str) -> tuple[float, str]:
        figure = by[other].get(KLD, by[other].get(PREFILL))
        return -figure["value"], other

    first, *others = sorted(by, key=best_first)
    said = []
    if KLD in by[first]:
        said.append(f"KL {_interval(by[first][KLD])} less")
    if PREFILL in by[first]:
        said.append(f"{ranged(by[first][PREFILL], 0)} tokens/s against {ranged(rates[name], 0)}")
    return f"beaten by {first}: {', '.join(said)}" + (f"; also by {', '.join(others)}" if others else "")


def _interval(figure: Figures, signed: bool = False) -> str:
    """With as many digits as its ends have, since its middle may be next to nothing."""
    return ranged(figure, decimals(max(abs(figure["low"]), abs(figure["high"]))), signed)


def _left_out(variants: Variants, length: str | None) -> dict[str, list[str]]:
    """Variants without a speed that is compared, by the reason."""
    found: dict[str, list[str]] = {}
    for name, v in variants.items():
        asked = v["not_measured"].get(f"prefill {length}")
        found.setdefault(v["unrepresentative"] or asked or unmeasured(v) or NO_SPEED, []).append(name)
    return found
