"""The picks, and what speeds they go by."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.metrics.pairs import faster
from pipeline.report.text import device as device_name
from pipeline.report.text import megabytes, percent, ranged

WITHIN_CLOSE = 0.01  # of the reference's perplexity
WITHIN_FAST = 0.03
PREFERRED_PROMPT = "512"


@dataclass(frozen=True)
class Pick:
    """What was asked, and the variant that answers it; None where none does."""

    question: str
    variant: str | None
    why: str


def picks(variants: Mapping[str, Mapping[str, Any]], by_kld: Mapping[str, Mapping[str, Any]]) -> list[Pick]:
    """Three answers for someone who wants one variant; where speeds are of several devices, a fastest one on each.

    'Within' means the whole 95 % interval is. `by_kld` is the front of size and KL in measurements.json, which knows
    whose KL is not told apart.
    """
    smallest = min((n for n, v in variants.items() if _within(v, WITHIN_CLOSE)), key=_by_size(variants), default=None)
    of_all = min(variants, key=_by_size(variants), default=None)
    return [
        Pick(
            f"smallest within {percent(WITHIN_CLOSE)} of the reference's perplexity",
            smallest,
            _close(smallest, variants, by_kld) if smallest else f"no variant is surely within {percent(WITHIN_CLOSE)}",
        ),
        *_fastest(variants),
        Pick("smallest of all", of_all, _weighs(variants[of_all]) if of_all else "nothing was measured"),
    ]


def _by_size(variants: Mapping[str, Mapping[str, Any]]) -> Callable[[str], tuple[Any, ...]]:
    """The smallest first, of equal ones the nearest: whatever the order of the variants."""
    return lambda name: (variants[name]["size_bytes"], variants[name]["kld"]["mean"]["value"], name)


def _close(name: str, variants: Mapping[str, Mapping[str, Any]], by_kld: Mapping[str, Mapping[str, Any]]) -> str:
    """What it weighs, what is known of the smaller ones, and whose KL is the same as far as is known."""
    smaller = [n for n, v in variants.items() if v["size_bytes"] < variants[name]["size_bytes"]]
    doubted = [n for n in smaller if variants[n]["ln_ppl_ratio"]["low"] <= math.log1p(WITHIN_CLOSE)]
    why = _weighs(variants[name])
    if doubted:
        why += f"; smaller, and neither surely within nor beyond: {', '.join(doubted)}"
    elif smaller:
        why += "; all smaller ones are surely beyond"
    alike = [n for n in variants if n in by_kld[name]["ties"]]
    return f"{why}; KL not told apart from {', '.join(alike)}" if alike else why


def _weighs(variant: Mapping[str, Any]) -> str:
    """'5.6 MB of weights, 6.1 MB to ship; perplexity +0.30 % …': formats differ in what they ship beside weights."""
    size, folder = variant["size_bytes"], variant["folder_bytes"]
    weighs = (
        f"{megabytes(size)} MB"
        if size == folder
        else f"{megabytes(size)} MB of weights, {megabytes(folder)} MB to ship"
    )
    return f"{weighs}; {change(variant)}{_over(variant)}"


def _over(variant: Mapping[str, Any]) -> str:
    """What the interval of `change` is."""
    return "" if variant["ln_ppl_ratio"]["low"] is None else f", the paired interval of {variant['windows']} windows"


def _fastest(variants: Mapping[str, Mapping[str, Any]]) -> list[Pick]:
    """A pick of each device that speeds were measured on; only representative speeds are compared."""
    length = prompt_length(variants)
    fair = {name: v for name, v in variants.items() if length in v["prefill"] and v["unrepresentative"] is None}
    near = {name: v for name, v in fair.items() if _within(v, WITHIN_FAST)}
    question = f"fastest prefill within {percent(WITHIN_FAST)} of the reference's perplexity"
    if not near or length is None:
        return [Pick(question, None, _no_fastest(variants))]
    found = []
    devices = sorted({v["timing_engine"]["device"] for v in near.values()})
    for device in devices:
        rates = {name: v["prefill"][length] for name, v in near.items() if v["timing_engine"]["device"] == device}
        best = min(rates, key=lambda n: (-rates[n]["value"], near[n]["size_bytes"], n))
        others = [name for name in rates if name != best]
        alike = [name for name in others if not faster(rates[best], rates[name])]
        why = f"{ranged(rates[best], 0)} tokens/s at {length} tokens, the median of {rates[best]['rounds']} rounds; "
        why += change(near[best]) + _over(near[best])
        if others:
            why += f"; not told apart from {', '.join(alike)}" if alike else "; surely faster than all others within"
        found.append(Pick(f"{question}, on {device_name(device)}" if len(devices) > 1 else question, best, why))
    return found


def _no_fastest(variants: Mapping[str, Mapping[str, Any]]) -> str:
    """Why no variant is the fastest: speeds of no meaning are named with their reasons."""
    unfair = unrepresentative(variants)
    kind = "representative" if unfair else "measured"
    why = f"no variant with a {kind} prefill is surely within {percent(WITHIN_FAST)}"
    left_out = [("representative", unfair), ("measured", unmeasurable(variants))]
    return "; ".join(
        [why, *(f"not {what}: {', '.join(names)}: {reason}" for what, by in left_out for reason, names in by.items())]
    )


def unrepresentative(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Timed variants by the reason why nobody would run them so."""
    found: dict[str, list[str]] = {}
    for name, v in variants.items():
        if v["unrepresentative"] is not None and (v["prefill"] or v["decode"]):
            found.setdefault(v["unrepresentative"], []).append(name)
    return found


def unmeasured(variant: Mapping[str, Any]) -> str | None:
    """Why nothing of a variant could be timed ("needs macOS"); None where something was, or nothing was asked."""
    reasons = {*variant["not_measured"].values()}
    return None if variant["prefill"] or variant["decode"] or len(reasons) != 1 else str(*reasons)


def unmeasurable(variants: Mapping[str, Mapping[str, Any]]) -> dict[str, list[str]]:
    """Variants of which nothing could be timed, by the reason."""
    found: dict[str, list[str]] = {}
    for name, v in variants.items():
        if (reason := unmeasured(v)) is not None:
            found.setdefault(reason, []).append(name)
    return found


def prompt_length(variants: Mapping[str, Mapping[str, Any]]) -> str | None:
    """The prompt length that picks are made at: 512 where it was measured, else the middle one.

    Lengths of speeds that are not representative count only where there are no others.
    """
    fair = {n for v in variants.values() if v["unrepresentative"] is None for n in v["prefill"]}
    lengths = sorted(fair or {n for v in variants.values() for n in v["prefill"]}, key=int)
    return preferred(lengths)


def preferred(lengths: Sequence[str]) -> str | None:
    """512 where it is among the lengths, else the middle one."""
    if not lengths:
        return None
    return PREFERRED_PROMPT if PREFERRED_PROMPT in lengths else lengths[len(lengths) // 2]


def _within(variant: Mapping[str, Any], share: float) -> bool:
    high = variant["ln_ppl_ratio"]["high"]
    return high is not None and high <= math.log1p(share)


def change(variant: Mapping[str, Any]) -> str:
    """'perplexity +0.57 % (+0.15 to +0.99)'."""
    ratio = variant["ln_ppl_ratio"]
    text = f"perplexity {math.expm1(ratio['value']) * 100:+.2f} %"
    if ratio["low"] is None:
        return f"{text} (one window: no interval)"
    return f"{text} ({math.expm1(ratio['low']) * 100:+.2f} to {math.expm1(ratio['high']) * 100:+.2f})"
