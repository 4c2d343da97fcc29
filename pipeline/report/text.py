"""Figures as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.metrics.machine import short_id
from pipeline.types import ExpertUse, UsedImatrix


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


def shortened(text: str, limit: int = 100) -> str:
    """A text in one line that a terminal can show, at most `limit` characters."""
    line = "".join(c if c.isprintable() else "\ufffd" for c in " ".join(text.split()))
    return line if len(line) <= limit else line[: limit - 1] + "…"


def escaped(text: str) -> str:
    """A text that Markdown shows as it is, in a cell of a table too."""
    return re.sub(r"([\\`*_{}\[\]<>()#+!|~$&-])", r"\\\1", text)


def percent(share: float) -> str:
    """'1 %'."""
    return f"{share * 100:.0f} %"


def megabytes(size: int) -> str:
    """MB of 10^6 bytes, as files are counted on disk."""
    return f"{size / 1e6:.1f}" if size < 1e9 else f"{size / 1e6:,.0f}"


def binary(size: int) -> str:
    """'64 KiB', '149.6 MiB': memory in units of 1024, with at most one decimal."""
    unit = next((power for power in (3, 2, 1) if size >= 1 << 10 * power), 0)
    text = f"{size / (1 << 10 * unit):.1f}".removesuffix(".0")
    return f"{text} {('bytes', 'KiB', 'MiB', 'GiB')[unit]}"


def parity(found: Mapping[str, Any]) -> str:
    """'mlx (mlx 0.32.4) on 2 windows: log-probabilities differ by at most 8.0e-06 nats (limit 1e-03)'."""
    return (
        f"{found['engine']['name']} ({found['engine']['version']}) on {found['windows']} windows: log-probabilities "
        f"differ by at most {found['max_difference']:.1e} nats (limit {found['limit']:.0e})"
    )


def machine(found: Mapping[str, Any], power_sources: Sequence[str]) -> str:
    """'A CPU, 2 cores, 23.5 GiB, Linux 6 (x86_64; avx2). Power source: mains. Fingerprint `1a2b3c4d`.'"""
    kind = "; ".join(filter(None, (found["architecture"], found["instruction_set"])))
    return (
        f"{found['cpu']}, {found['physical_cores']} cores, {found['memory_gib']} GiB, {found['os']} ({kind}). Power "
        f"source: {' or '.join(dict.fromkeys(power_sources))}. Fingerprint `{short_id(found)}`."
    )


def called(format_name: str) -> str:
    """A format as people write it."""
    return {"coreml": "Core ML"}.get(format_name, format_name.upper())


def device(name: str) -> str:
    """A device as people write it; those of Core ML are the compute units that it may use."""
    units = {"all": "all compute units", "cpu+gpu": "the GPU and CPU", "cpu+ne": "the Neural Engine and CPU"}
    return units.get(name, name)


def effective(types: Mapping[str, float]) -> str:
    """'Q4_K 62 %, Q6_K 37 %, F32 <1 %': shares of the weights, or of what else is counted."""
    total = sum(types.values())
    return ", ".join(f"{name} {_share(weights / total)}" for name, weights in types.items())


def _share(share: float) -> str:
    return percent(share) if share >= 0.005 else "<1 %"


def importance(used: UsedImatrix, known: bool) -> str:
    """'importance matrix of english.txt, 32 chunks of 512 tokens, for 42 matrices; 1 went without: token_embd.weight',
    and how far it reaches into experts; of a file of others as far as it says. `known`: whether its text was, or can
    be, compared with the scored one.
    """
    of = ", ".join(used.datasets) or "an unknown text"
    name = "" if used.file is None else f" {used.file}"
    chunks = "" if used.chunks is None else f", {used.chunks} chunks"
    size = "" if used.chunk_size is None else f" of {used.chunk_size} tokens"
    matrices = "" if used.matrices is None else f", for {used.matrices} matrices"
    went = f"; {len(used.without)} went without: {listing(used.without)}" if used.without else ""
    unknown = "" if known else "; overlap with the scored text: not known"
    text = f"importance matrix{name} of {of}{chunks}{size}{matrices}{went}{unknown}"
    return "\n".join([text, *([experts(used.experts)] if used.experts else [])])


def experts(uses: Sequence[ExpertUse]) -> str:
    """'experts: all 8 of each of 4 layers had tokens, the least of them 12', or in which layers some had none."""
    least = min(uses, key=lambda use: use.fewest)
    idle = [use for use in uses if use.activated < use.experts]
    if not idle:
        return (
            f"experts: all {least.experts} of each of {len(uses)} layers had tokens, the fewest {least.fewest} (layer "
            f"{least.layer})"
        )
    shown = listing([f"layer {use.layer}: {use.experts - use.activated} of {use.experts}" for use in idle])
    return f"experts without any token, whose inputs count alike: {shown}. A longer calibration text would reach more."


def listing(items: Sequence[str], shown: int = 3) -> str:
    """'a, b, c and 4 more'."""
    more = f" and {len(items) - shown} more" if len(items) > shown else ""
    return ", ".join(items[:shown]) + more
