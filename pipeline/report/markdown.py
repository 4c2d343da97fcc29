"""reports/pareto.md from measurements.json: the template is pareto.md.j2, this file gives it its numbers as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from pipeline.chat import NOT_MEASURED, sameness
from pipeline.metrics.machine import short_id
from pipeline.report import parts
from pipeline.report.engines import distinct
from pipeline.report.front_tables import order_notes, section
from pipeline.report.fronts import SIZE_KLD, on_front
from pipeline.report.notes import SHIPS, is_int16, notes
from pipeline.report.pareto import picks, preferred, prompt_length
from pipeline.report.speed_tables import tables
from pipeline.report.speeds import rate
from pipeline.report.text import called, decimals, effective, escaped, machine, megabytes, ranged, shortened
from pipeline.runtimes import REFERENCE_EXECUTOR


def render(measurements: Mapping[str, Any], names: Sequence[str]) -> str:
    """The report on the variants `names`, those without a measurement named as such.

    Raises:
        KeyError, TypeError: measurements that are not as `gather` makes them.
    """
    from jinja2 import UndefinedError

    variants, fronts = measurements["variants"], measurements["fronts"]
    marked, noted = on_front(fronts[SIZE_KLD]), notes(variants)
    ordered = sorted((n for n in names if n in variants), key=lambda n: -variants[n]["size_bytes"])
    shown = {name: variants[name] for name in ordered}
    speeds = tables(shown, marked)
    length = prompt_length(variants) or preferred(speeds["lengths"])
    formats = list(dict.fromkeys(v["format"] for v in shown.values()))
    context = {
        "measurements": measurements,
        "identity": measurements["identity"],
        "model": parts.checkpoint(measurements["reference"]["model"]),
        "dropped": parts.dropped(shown),
        "imatrices": parts.imatrices(shown),
        "has_routers": any(v["routers"] for v in shown.values()),
        "machine": machine(measurements["machine"], [measurements["power_source"]]),
        "formats": formats,
        "ships": ",\n  ".join(SHIPS[name] for name in SHIPS if name in formats),
        "executed": any(v["engine"]["name"] == REFERENCE_EXECUTOR for v in shown.values()),
        "has_int16": any(is_int16(v) for v in shown.values()),
        "rows": [_row(n, variants[n], length, speeds["decodes"], n in marked, noted[n]) for n in ordered],
        "speeds": speeds,
        "missing": [n for n in names if n not in variants],
        "fronts": section(shown, fronts),
        "order_notes": order_notes(shown, fronts),
        "picks": picks(variants, fronts[SIZE_KLD]),
        "pick_length": length,
        "engines": distinct(variants, "engine"),
        "timing_engines": distinct(variants, "timing_engine"),
        "others": [_other(found, shown) for found in measurements["also"].values()],
        "asked": measurements["reference"]["reply"],
        "replies": [_reply(n, variants[n]["reply"]) for n in ordered if variants[n]["reply"]],
        "reference_reply": _said(measurements["reference"]["reply"]),
    }
    try:
        text: str = _template().render(context)
    except UndefinedError as error:
        raise KeyError(str(error)) from error
    return text


@cache
def _template() -> Any:
    from jinja2 import Environment, PackageLoader, StrictUndefined

    loader = PackageLoader("pipeline.report", ".")
    environment = Environment(loader=loader, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("pareto.md.j2")


def _row(
    name: str,
    variant: Mapping[str, Any],
    length: str | None,
    decodes: Sequence[str],
    marked: bool,
    noted: Sequence[str],
) -> dict[str, Any]:
    return {
        "name": f"**{name}**" if marked else name,
        "format": called(variant["format"]),
        "size": megabytes(variant["size_bytes"]),
        "to_ship": megabytes(variant["folder_bytes"]),
        "bits": f"{variant['bits_per_weight']:.2f}",
        "types": "; ".join([effective(variant["effective_types"]), *noted]),
        "kld": ranged(variant["kld"]["mean"], decimals(variant["kld"]["mean"]["value"])),
        "ratio": ranged(variant["ln_ppl_ratio"], 4, signed=True),
        "ppl": ranged(variant["ppl"], 2),
        "same_top": ranged({k: v and v * 100 for k, v in variant["same_top"].items()}, 1) + " %",
        "bits_per_byte": f"{variant['bits_per_byte']:.4f}",
        "prefill": rate(variant, "prefill", length, bracket=False) if length else "",
        "decode": [rate(variant, "decode", n, bracket=False) for n in decodes],
    }


def _reply(name: str, reply: Mapping[str, Any]) -> dict[str, str]:
    return {"name": name, "same": sameness(reply), "problem": escaped(reply["problem"] or ""), **_said(reply)}


def _said(reply: Mapping[str, Any] | None) -> dict[str, str]:
    """A reply's text and end as cells of a table."""
    if reply is None:
        return {}
    if reply["text"] is None:
        return {"text": NOT_MEASURED, "end": ""}
    end = reply["stopped"]
    return {
        "text": escaped(shortened(reply["text"])),
        "end": f"at token {reply['tokens']}, {escaped(end)}" if end else f"not within {reply['tokens']} tokens",
    }


def _other(found: Mapping[str, Any], shown: Mapping[str, Any]) -> dict[str, Any]:
    """Another machine and its tables, rows in the order of this report's; of several runs with their devices."""
    runs = found["runs"]
    figures = {
        f"{name} ({device})" if len(runs) > 1 else name: {
            **run["variants"][name],
            "format": v["format"],
            "parity": None,
        }
        for name, v in shown.items()
        for device, run in runs.items()
        if name in run["variants"]
    }
    return {
        "machine": machine(found["machine"], [run["power_source"] for run in runs.values()]),
        "id": short_id(found["machine"]),
        "speeds": tables(figures) if figures else None,
        "engines": distinct(figures, "timing_engine"),
        "orders": [*dict.fromkeys(run["timing"]["order"] for run in runs.values())],
        "left_out": [*dict.fromkeys(escaped(name) for run in runs.values() for name in run["left_out"])],
    }
