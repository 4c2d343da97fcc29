"""Figures as text."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any


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


def parity(found: Mapping[str, Any]) -> str:
    """'mlx (mlx 0.32.4) on 2 windows: log-probabilities differ by at most 8.0e-06 nats (limit 1e-03)'."""
    return (
        f"{found['engine']['name']} ({found['engine']['version']}) on {found['windows']} windows: log-probabilities "
        f"differ by at most {found['max_difference']:.1e} nats (limit {found['limit']:.0e})"
    )


def effective(types: Mapping[str, int]) -> str:
    """'Q4_K 62 %, Q6_K 37 %, F32 <1 %': shares of the weights."""
    total = sum(types.values())
    return ", ".join(f"{name} {_share(weights / total)}" for name, weights in types.items())


def _share(share: float) -> str:
    return percent(share) if share >= 0.005 else "<1 %"
