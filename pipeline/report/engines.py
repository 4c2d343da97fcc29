"""The engines that scored and timed, each told once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.report.text import called, device, parity


def distinct(variants: Mapping[str, Any], key: str) -> list[dict[str, Any]]:
    """The engines under `key` of the variants that have one, each once, in order, with `of` and `checked`.

    `of` is whose it is: of the most common one of a format the format, or nothing where there is no other format; of
    others the variants. `checked` says how far a native engine was from it.
    """
    found: list[tuple[dict[str, Any], str, list[str]]] = []
    for name, v in variants.items():
        if not v[key]:
            continue
        names = next((names for known, of, names in found if (known, of) == (v[key], v["format"])), None)
        if names is None:
            found.append((v[key], v["format"], [name]))
        else:
            names.append(name)
    formats = {v["format"]: called(v["format"]) for v in variants.values()}
    usual = {of: max((names for _, other, names in found if other == of), key=len) for _, of, _ in found}
    return [
        engine
        | {
            "device": device(engine["device"]),
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
