"""reports/pareto.md from measurements.json: the template is pareto.md.j2, this file gives it its numbers as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pipeline.metrics.machine import short_id
from pipeline.report.pareto import front, picks, prompt_length
from pipeline.report.speeds import COSTS, cost_notes, costs, rate, rate_notes, tasks_of, tokens_of
from pipeline.report.text import decimals, effective, megabytes, ranged


def render(measurements: Mapping[str, Any], names: Sequence[str]) -> str:
    """The report on the variants `names`, those without a measurement named as such."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pipeline.report", "."), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    variants = measurements["variants"]
    lengths, decodes, length = tokens_of(variants, "prefill"), tokens_of(variants, "decode"), prompt_length(variants)
    on_front = front(variants)
    ordered = sorted((n for n in names if n in variants), key=lambda n: -variants[n]["size_bytes"])
    shown = {name: variants[name] for name in ordered}
    return environment.get_template("pareto.md.j2").render(
        measurements=measurements,
        identity=measurements["identity"],
        machine=measurements["machine"],
        machine_id=short_id(measurements["machine"]),
        rows=[_row(n, variants[n], length, decodes, n in on_front) for n in ordered],
        speed_rows=[_speed_row(n, variants[n], lengths, decodes, n in on_front) for n in ordered],
        missing=[n for n in names if n not in variants],
        front=on_front,
        picks=picks(variants),
        lengths=lengths,
        decodes=decodes,
        pick_length=length,
        cost_columns=COSTS,
        rate_notes=rate_notes(shown),
        cost_notes=cost_notes(shown),
        rounds=max((task["rounds"] for v in shown.values() for _, task in tasks_of(v)), default=0),
        engines=distinct(v["engine"] for v in variants.values()),
        timing_engines=distinct(v["timing_engine"] for v in variants.values() if v["timing_engine"]),
    )


def _row(
    name: str, variant: Mapping[str, Any], length: str | None, decodes: Sequence[str], on_front: bool
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
        "prefill": rate(variant["prefill"].get(length), bracket=False),
        "decode": [rate(variant["decode"].get(n), bracket=False) for n in decodes],
    }


def _speed_row(
    name: str, variant: Mapping[str, Any], lengths: Sequence[str], decodes: Sequence[str], on_front: bool
) -> dict[str, Any]:
    tasks = [variant["prefill"].get(n) for n in lengths] + [variant["decode"].get(n) for n in decodes]
    return {
        "name": f"**{name}**" if on_front else name,
        "rates": [rate(task) for task in tasks],
        "costs": costs(variant),
    }


def distinct(engines: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each engine once, in order."""
    found: list[dict[str, Any]] = []
    for engine in engines:
        if engine not in found:
            found.append(engine)
    return found
