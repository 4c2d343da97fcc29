"""What `quantgate baseline` prints."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipeline.checks import differences
from pipeline.checks.acceptance import ABSENT, CHANGED, DROPPED, NEW, NOT_COMPARABLE, SAME, Change
from pipeline.checks.baseline import Baseline
from pipeline.checks.record import Record, engine_key
from pipeline.console_tables import add_row, new_table
from pipeline.gate_output.words import printed

COLORS = {
    **{NEW: "yellow", SAME: "green", CHANGED: "red"},
    **{NOT_COMPARABLE: "red", DROPPED: "yellow", ABSENT: "yellow"},
}


def _row(table: Table, *cells: str | Text) -> None:
    add_row(table, *(cell if isinstance(cell, Text) else printed(cell) for cell in cells))


def changes(found: Sequence[Change]) -> None:
    """A row for each, and below it what differs where something does."""
    table = new_table("variant", "", "loss", "change, 95 % interval", right=("loss",))
    for change in found:
        difference = change.difference
        grown = "-" if difference is None or difference.growth is None else differences.growth(difference.growth)
        mean = "-" if change.record is None else f"{_mean(change.record):.5f}"
        _row(table, change.variant, Text(change.what, COLORS[change.what]), mean, grown)
    console = Console(highlight=False)
    console.print(table)
    for change in found:
        lines = _lines(change)
        if change.reason or lines:
            reason = f": {change.reason}" if change.reason else ""
            head = (change.what, COLORS[change.what]), printed(f" {change.variant}{reason}")
            console.print("", Text.assemble(*head), sep="\n")
        for line in lines:
            console.print(Padding(Text(printed(line)), (0, 0, 0, 2)))


def _lines(change: Change) -> list[str]:
    if change.difference is None:
        return []
    if change.what == SAME:  # to the last bit of every tensor and loss
        return [differences.beside(change.difference)] if change.difference.files else []
    return differences.lines(change.difference)


def baseline(found: Baseline) -> None:
    """Every record, by the engines that computed them, and the machines whose speeds there are."""
    keys = sorted({engine_key(record.engine) for records in found.records.values() for record in records})
    number = {key: i for i, key in enumerate(keys, 1)}
    right = ("engine", "windows", "loss", "perplexity", "tensors")
    table = new_table("variant", "scheme", *right, right=right)
    for name, records in found.records.items():
        for record in records:
            mean, engine = _mean(record), str(number[engine_key(record.engine)])
            counts = str(len(record.window_nll)), f"{mean:.5f}", f"{math.exp(mean):.3f}", str(len(record.tensors))
            _row(table, name, record.path or record.scheme, engine, *counts)
    console = Console(highlight=False)
    console.print(table, "", sep="\n")
    for key, i in number.items():
        name, version, instruction_set, device, kv_type, flash_attention = key
        text = f"engine {i}: {name} ({version}), {device}, {instruction_set}, KV {kv_type}, flash attention"
        console.print(Text(printed(f"{text} {flash_attention}")))
    for line in _scored_on(record for records in found.records.values() for record in records):
        console.print(Text(printed(line)))
    for machine, speed in found.speeds.items():
        text = f"speeds of {speed['machine']['cpu']} ({machine}): {', '.join(speed['variants']) or 'none'}"
        console.print(Text(printed(text)))


def _scored_on(records: Iterable[Record]) -> list[str]:
    """What the records are of: one line where all are of the same."""
    return [*dict.fromkeys(_identity(record.identity) for record in records)]


def _identity(identity: Mapping[str, Any]) -> str:
    text = f"{identity['corpus']} (text {identity['text_sha256'][:12]}…), {identity['windows']} windows"
    return f"scored on {text} of {identity['context']} tokens, of {identity['source']['name']}"


def _mean(record: Record) -> float:
    return math.fsum(record.window_nll) / len(record.window_nll)
