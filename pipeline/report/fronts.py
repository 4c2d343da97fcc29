"""The fronts: the variants that no other surely beats, by size and KL, by size and prefill, and by all three.

A variant beats another where its weight files are not larger and the statistics say that it is better in all else that
the front goes by: nearer the reference, by the paired interval over windows of the difference of KL; faster, by an
interval of its median rate that lies wholly above the other's. What is not sure removes nothing.

"Beats" is transitive and no variant beats itself, since sizes, paired t intervals (see metrics.pairs) and intervals
that do not overlap order variants so. A front of some variants is thus never empty, and what is beaten is beaten by one
on the front.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.metrics.pairs import difference, faster, surely_above
from pipeline.metrics.stats import interval_json
from pipeline.report.pareto import prompt_length

SIZE_KLD, SIZE_PREFILL, ALL_THREE = "size_kld", "size_prefill", "size_kld_prefill"
KLD, PREFILL = "kld_difference", "prefill"
BITS_DIGITS = 2  # of bits per weight, as they are shown: fewer ones must be seen to be fewer

Figures = Mapping[str, Any]
Variants = Mapping[str, Figures]


@dataclass(frozen=True)
class Criterion:
    """What a front goes by beside size: its name, whether one variant is surely better than another, and what says so
    of one and another.
    """

    key: str
    better: Callable[[str, str], bool]
    evidence: Callable[[str, str], dict[str, float | None]]


def fronts(variants: Variants, klds: Mapping[str, NDArray[np.float64]]) -> dict[str, Any]:
    """`fronts` of measurements.json, of variants as it has them and their mean KL of each window, [windows].

    Speeds that are not representative, and those of other devices, are in no front with others'.

    Raises:
        KeyError, TypeError, ValueError: variants that are not as `gather` makes them.
    """
    names = sorted(variants, key=lambda name: (-variants[name]["size_bytes"], name))
    nearer, length = _nearer({name: klds[name] for name in names}), prompt_length(variants)
    rates: dict[str, dict[str, Figures]] = {}
    for name in names:
        v = variants[name]
        if length in v["prefill"] and v["unrepresentative"] is None:
            rates.setdefault(v["timing_engine"]["device"], {})[name] = v["prefill"][length]
    by_device = dict(sorted(rates.items()))
    sizes = {name: variants[name]["size_bytes"] for name in names}
    return {
        "windows": max(map(len, klds.values()), default=0),
        "prompt_length": length,
        SIZE_KLD: _front(sizes, [nearer]),
        SIZE_PREFILL: {at: _front(_of(sizes, timed), [_faster(timed)]) for at, timed in by_device.items()},
        ALL_THREE: {at: _front(_of(sizes, timed), [nearer, _faster(timed)]) for at, timed in by_device.items()},
        "fewer_bits_nearer": _fewer_bits_nearer(variants, names, nearer),
    }


def on_front(front: Variants) -> list[str]:
    """Its variants that are on it, the largest first."""
    return [name for name, entry in front.items() if entry["on_front"]]


def fronts_of(name: str, fronts: Figures) -> list[str]:
    """The fronts, by their keys, that a variant is on."""
    of = {SIZE_KLD: [fronts[SIZE_KLD]]} | {key: [*fronts[key].values()] for key in (SIZE_PREFILL, ALL_THREE)}
    return [key for key, some in of.items() if any(name in on_front(front) for front in some)]


def tied(front: Variants, name: str) -> list[str]:
    """Those on the front that a variant on it is not told apart from, the smallest first."""
    return [other for other in reversed(on_front(front)) if other in front[name]["ties"]]


def _of(sizes: Mapping[str, int], names: Mapping[str, object]) -> dict[str, int]:
    return {name: size for name, size in sizes.items() if name in names}


def _nearer(klds: Mapping[str, NDArray[np.float64]]) -> Criterion:
    """Less KL to the reference; evidence is by how much the one's is more than the other's."""
    more = {(a, b): difference(klds[a], klds[b]) for a, b in product(klds, repeat=2)}
    return Criterion(KLD, lambda a, b: surely_above(more[b, a]), lambda a, b: interval_json(more[a, b]))


def _faster(rates: Mapping[str, Figures]) -> Criterion:
    """More tokens per second; evidence is the other's rate."""
    return Criterion(
        PREFILL,
        lambda a, b: faster(rates[a], rates[b]),
        lambda _, other: {key: rates[other][key] for key in ("value", "low", "high")},
    )


def _front(sizes: Mapping[str, int], criteria: Sequence[Criterion]) -> dict[str, Any]:
    """Each variant's standing: on the front or not, by which of those on it it is beaten, which it ties with.

    Two tie where the one that is not larger does not beat the other, and is not surely worse in anything either: only
    the doubt keeps the other. Where there are no intervals at all, no ties are listed.
    """

    def beats(a: str, b: str) -> bool:
        return sizes[a] <= sizes[b] and all(criterion.better(a, b) for criterion in criteria)

    def doubted(a: str, b: str) -> bool:
        return sizes[a] <= sizes[b] and not beats(a, b) and not any(c.better(b, a) for c in criteria)

    def evidence(of: str, others: Sequence[str]) -> dict[str, Any]:
        return {other: {c.key: c.evidence(of, other) for c in criteria} for other in others}

    beaten = {b: [a for a in sizes if beats(a, b)] for b in sizes}
    front = {}
    for name, by in beaten.items():
        ties = evidence(name, [a for a in sizes if a != name and (doubted(a, name) or doubted(name, a))])
        front[name] = {
            "on_front": not by,
            "beaten_by": evidence(name, [a for a in by if not beaten[a]]),
            "ties": {a: found for a, found in ties.items() if all(e["low"] is not None for e in found.values())},
        }
    return front


def _fewer_bits_nearer(variants: Variants, names: Sequence[str], nearer: Criterion) -> dict[str, Any]:
    """Variants that are surely farther from the reference than one of fewer bits per weight, with the one of fewest."""
    bits = {name: round(variants[name]["bits_per_weight"], BITS_DIGITS) for name in names}
    found = {}
    for name in names:
        fewer = [other for other in names if bits[other] < bits[name] and nearer.better(other, name)]
        if fewer:
            best = min(fewer, key=lambda other: (bits[other], other))
            found[name] = {best: {KLD: nearer.evidence(name, best)}}
    return found
