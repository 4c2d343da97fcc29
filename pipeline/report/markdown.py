"""reports/pareto.md from measurements.json: the template is pareto.md.j2, this file gives it its numbers as text."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.metrics.machine import short_id
from pipeline.report.pareto import front, percent, picks, prompt_length

NOT_MEASURED = "not measured"


def render(measurements: Mapping[str, Any], names: Sequence[str]) -> str:
    """The report on the variants `names`, those without a measurement named as such.

    Raises:
        KeyError, TypeError: measurements that are not as `gather` makes them.
    """
    from jinja2 import Environment, PackageLoader, StrictUndefined, UndefinedError

    environment = Environment(
        loader=PackageLoader("pipeline.report", "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    variants = measurements["variants"]
    lengths = sorted({n for v in variants.values() for n in v["prefill"]}, key=int)
    decodes = sorted({n for v in variants.values() for n in v["decode"]}, key=int)
    on_front = front(variants)
    ordered = sorted((n for n in names if n in variants), key=lambda n: -variants[n]["size_bytes"])
    shown = {
        "measurements": measurements,
        "identity": measurements["identity"],
        "machine": measurements["machine"],
        "machine_id": short_id(measurements["machine"]),
        "rows": [_row(n, variants[n], lengths, decodes, n in on_front) for n in ordered],
        "missing": [n for n in names if n not in variants],
        "front": on_front,
        "picks": picks(variants),
        "lengths": lengths,
        "decodes": decodes,
        "pick_length": prompt_length(variants),
        "engines": distinct(v["engine"] for v in variants.values()),
        "timing_engines": distinct(v["timing_engine"] for v in variants.values() if v["timing_engine"]),
        "disturbed": any(task["disturbed_rounds"] for v in variants.values() for task in _tasks(v)),
    }
    try:
        return environment.get_template("pareto.md.j2").render(shown)
    except UndefinedError as error:
        raise KeyError(str(error)) from error


def _row(
    name: str, variant: Mapping[str, Any], lengths: Sequence[str], decodes: Sequence[str], on_front: bool
) -> dict[str, Any]:
    return {
        "name": f"**{name}**" if on_front else name,
        "size": megabytes(variant["size_bytes"]),
        "bits": f"{variant['bits_per_weight']:.2f}",
        "types": effective(variant["effective_types"]),
        "kld": ranged(variant["kld"]["mean"], decimals(variant["kld"]["mean"]["value"])),
        "ratio": ranged(variant["ln_ppl_ratio"], 4, signed=True),
        "ppl": ranged(variant["ppl"], 2),
        "same_top": ranged({k: v and v * 100 for k, v in variant["same_top"].items()}, 1) + " %",
        "bits_per_byte": f"{variant['bits_per_byte']:.4f}",
        "prefill": [_speed(variant["prefill"].get(n)) for n in lengths],
        "decode": [_speed(variant["decode"].get(n)) for n in decodes],
    }


def _tasks(variant: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [*variant["prefill"].values(), *variant["decode"].values()]


def _speed(task: Mapping[str, Any] | None) -> str:
    if task is None:
        return NOT_MEASURED
    return ranged(task, 0) + (" †" if task["disturbed_rounds"] else "")


def ranged(figure: Mapping[str, Any], digits: int, signed: bool = False) -> str:
    """'0.0119 [0.0104, 0.0133]'; the bracket is left out where there is no interval."""
    sign = "+" if signed else ""
    text = f"{figure['value']:{sign}.{digits}f}"
    if figure["low"] is None or figure["high"] is None:
        return text
    return f"{text} [{figure['low']:{sign}.{digits}f}, {figure['high']:{sign}.{digits}f}]"


def decimals(value: float, significant: int = 3) -> int:
    """Decimal places that show `significant` digits of a figure that may be small."""
    return max(0, significant - 1 - math.floor(math.log10(abs(value)))) if value else 1


def megabytes(size: int) -> str:
    """MB of 10^6 bytes, as files are counted on disk."""
    return f"{size / 1e6:.1f}" if size < 1e9 else f"{size / 1e6:,.0f}"


def effective(types: Mapping[str, int]) -> str:
    """'Q4_K 62 %, Q6_K 37 %, F32 <1 %': shares of the weights."""
    total = sum(types.values())
    return ", ".join(f"{name} {_share(weights / total)}" for name, weights in types.items())


def _share(share: float) -> str:
    return percent(share) if share >= 0.005 else "<1 %"


def distinct(engines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each engine once, in order."""
    found: list[dict[str, Any]] = []
    for engine in engines:
        if engine not in found:
            found.append(engine)
    return found
