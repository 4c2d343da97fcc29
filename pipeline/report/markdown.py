"""reports/pareto.md from measurements.json: the template is pareto.md.j2, this file gives it its numbers as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.metrics.machine import short_id
from pipeline.report.pareto import front, picks, prompt_length
from pipeline.report.speeds import COSTS, cost_notes, costs, rate, rate_notes, tasks_of, tokens_of
from pipeline.report.text import decimals, effective, escaped, megabytes, parity, ranged, shortened


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
    lengths, decodes, length = tokens_of(variants, "prefill"), tokens_of(variants, "decode"), prompt_length(variants)
    on_front = front(variants)
    notes = _notes(variants)
    ordered = sorted((n for n in names if n in variants), key=lambda n: -variants[n]["size_bytes"])
    shown = {name: variants[name] for name in ordered}
    timed = {name: v for name, v in variants.items() if v["timing_engine"]}
    context = {
        "measurements": measurements,
        "identity": measurements["identity"],
        "machine": measurements["machine"],
        "machine_id": short_id(measurements["machine"]),
        "formats": sorted({v["format"] for v in shown.values()}),
        "rows": [_row(n, variants[n], length, decodes, n in on_front, notes[n]) for n in ordered],
        "speed_rows": [_speed_row(n, variants[n], lengths, decodes, n in on_front) for n in ordered],
        "missing": [n for n in names if n not in variants],
        "front": on_front,
        "picks": picks(variants),
        "lengths": lengths,
        "decodes": decodes,
        "pick_length": length,
        "cost_columns": COSTS,
        "rate_notes": rate_notes(shown),
        "cost_notes": cost_notes(shown),
        "rounds": max((task["rounds"] for v in shown.values() for _, task in tasks_of(v)), default=0),
        "engines": distinct(variants, "engine"),
        "timing_engines": distinct(timed, "timing_engine"),
        "asked": measurements["reference"]["reply"],
        "replies": [_reply(n, variants[n]["reply"]) for n in ordered if variants[n]["reply"]],
        "reference_reply": _said(measurements["reference"]["reply"]),
    }
    try:
        return environment.get_template("pareto.md.j2").render(context)
    except UndefinedError as error:
        raise KeyError(str(error)) from error


def _row(
    name: str,
    variant: Mapping[str, Any],
    length: str | None,
    decodes: Sequence[str],
    on_front: bool,
    notes: Sequence[str],
) -> dict[str, Any]:
    return {
        "name": f"**{name}**" if on_front else name,
        "format": _called(variant["format"]),
        "size": megabytes(variant["size_bytes"]),
        "to_ship": megabytes(variant["folder_bytes"]),
        "bits": f"{variant['bits_per_weight']:.2f}",
        "types": "; ".join([effective(variant["effective_types"]), *notes]),
        "kld": ranged(variant["kld"]["mean"], decimals(variant["kld"]["mean"]["value"])),
        "ratio": ranged(variant["ln_ppl_ratio"], 4, signed=True),
        "ppl": ranged(variant["ppl"], 2),
        "same_top": ranged({k: v and v * 100 for k, v in variant["same_top"].items()}, 1) + " %",
        "bits_per_byte": f"{variant['bits_per_byte']:.4f}",
        "prefill": rate(variant, "prefill", length, bracket=False) if length else "",
        "decode": [rate(variant, "decode", n, bracket=False) for n in decodes],
    }


def _called(format_name: str) -> str:
    """A format as people write it."""
    return format_name.upper()


def _notes(variants: Mapping[str, Any]) -> dict[str, list[str]]:
    """What sets a variant apart beside its types: its maker or mix, the same bytes elsewhere, engine settings.

    Bytes and settings are compared within a format: another one has another engine and other tensors.
    """
    settings = {name: _settings(v["engine"]) for name, v in variants.items()}
    alike = {
        name: [n for n, other in variants.items() if other["format"] == v["format"]] for name, v in variants.items()
    }
    notes: dict[str, list[str]] = {}
    for name, v in variants.items():
        usual = Counter(settings[n] for n in alike[name]).most_common(1)[0][0]
        twins = [n for n in alike[name] if n != name and variants[n]["tensors_sha256"] == v["tensors_sha256"]]
        notes[name] = [f"made elsewhere, says {v['scheme']}"] if v["path"] else []
        notes[name] += [f"mix {escaped(v['scheme'])}"] if "+" in v["scheme"] else []
        notes[name] += [f"same bytes as {', '.join(twins)}"] if twins else []
        notes[name] += [settings[name]] if settings[name] != usual else []
    return notes


def _settings(engine: Mapping[str, Any]) -> str:
    """What a variant may set of its own."""
    return f"KV cache {engine['kv_type']}, flash attention {engine['flash_attention']}"


def _reply(name: str, reply: Mapping[str, Any]) -> dict[str, str]:
    same = f"{reply['same_tokens']} of {reply['reference_tokens']}"
    return {"name": name, "same": same, "problem": escaped(reply["problem"] or ""), **_said(reply)}


def _said(reply: Mapping[str, Any] | None) -> dict[str, str]:
    """A reply's text and end as cells of a table."""
    if reply is None:
        return {}
    end = reply["stopped"]
    return {
        "text": escaped(shortened(reply["text"])),
        "end": f"at token {reply['tokens']}, {escaped(end)}" if end else f"not within {reply['tokens']} tokens",
    }


def _speed_row(
    name: str, variant: Mapping[str, Any], lengths: Sequence[str], decodes: Sequence[str], on_front: bool
) -> dict[str, Any]:
    tasks = [("prefill", n) for n in lengths] + [("decode", n) for n in decodes]
    return {
        "name": f"**{name}**" if on_front else name,
        "rates": [rate(variant, kind, n) for kind, n in tasks],
        "costs": costs(variant),
    }


def distinct(variants: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The engines under `key` of the variants, each once, in order, with `of` and `checked`.

    `of` is whose it is: of the most common one of a format the format, or nothing where there is no other format; of
    others the variants. `checked` says how far a native engine was from it.
    """
    found: list[tuple[dict[str, Any], str, list[str]]] = []
    for name, v in variants.items():
        names = next((names for known, of, names in found if (known, of) == (v[key], v["format"])), None)
        if names is None:
            found.append((v[key], v["format"], [name]))
        else:
            names.append(name)
    formats = {of: _called(of) for _, of, _ in found}
    usual = {of: max((names for _, other, names in found if other == of), key=len) for of in formats}
    return [
        engine
        | {
            "of": ", ".join(names) if names is not usual[of] else formats[of] if len(formats) > 1 else "",
            "checked": _checked([variants[name]["parity"] for name in names]),
        }
        for engine, of, names in found
    ]


def _checked(parities: Sequence[Mapping[str, Any] | None]) -> list[str]:
    """Each check once, with the largest difference of all variants that had it."""
    worst: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for found in parities:
        if found is not None:
            check = (found["engine"]["name"], found["engine"]["version"], found["windows"], found["limit"])
            worst[check] = max(worst.get(check, found), found, key=lambda p: p["max_difference"])
    return [parity(found) for found in worst.values()]
