"""What commands print: tables that fit a terminal of 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from rich.console import Console, ConsoleOptions, RenderResult
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from pipeline.chat import sameness
from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.report.measurements import timed_figures
from pipeline.report.pareto import change, unmeasured
from pipeline.report.speeds import (
    COSTS,
    PLACED,
    cost_notes,
    costs,
    marks,
    not_measured,
    placements,
    rate_notes,
    tasks_of,
)
from pipeline.report.text import decimals, parity, ranged, shortened

COLORS = {PASS: "green", FAIL: "red", INCONCLUSIVE: "yellow"}


NO_BREAK = "\u00a0"  # textwrap breaks a line at ASCII spaces alone


@dataclass(frozen=True)
class Listed:
    """Items of a cell that is too long, which goes on below behind a comma: not within 'F32 <1 %'."""

    items: Sequence[str]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        text = ", ".join(item.replace(" ", NO_BREAK) for item in self.items)
        yield Text(textwrap.fill(text, options.max_width, break_on_hyphens=False).replace(NO_BREAK, " "))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        return Text(", ".join(self.items)).__rich_measure__(console, options)


def new_table(*columns: str, right: Sequence[str] = ()) -> Table:
    """A table without lines; cells that are too long go on below."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def add_row(table: Table, *cells: str | Text | Listed) -> None:
    """A row of plain text: names may hold brackets, which rich would read as markup."""
    table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in cells))


def show(*parts: Any) -> None:
    """Tables and lines of markup on standard output."""
    console = Console(highlight=False)
    for part in parts:
        console.print(part)


def schemes(listed: Sequence[Mapping[str, Any]]) -> None:
    for format_name, rows in groupby(listed, key=lambda row: row["format"]):
        table = new_table("format", "scheme", "bits/weight", right=("bits/weight",))
        where = ""
        for row in rows:
            add_row(table, format_name, row["scheme"], f"{row['bits_per_weight']:.2f}")
            where = row["runs_on"]
        show(f"[bold]{format_name}[/bold] runs on {where}", table, "")
    show("Nominal bits: `quantgate inspect CHECKPOINT` shows what a checkpoint really gets.")


def quality(name: str, found: Mapping[str, Any], brackets: str = "95 % intervals over windows") -> None:
    table = new_table("", "")
    table.show_header = False
    add_row(table, "perplexity", ranged({"value": found["ppl"], **found["ppl_interval"]}, 4))
    add_row(table, "reference", f"{found['reference_ppl']:.4f}")
    add_row(table, "change", change(found).removeprefix("perplexity "))
    kld = found["kld"]
    add_row(
        table, "KL, nats/token", ranged({"value": kld["mean"], **found["kld_interval"]["mean"]}, decimals(kld["mean"]))
    )
    add_row(table, "  median, p99, max", f"{kld['median']:.5f}, {kld['p99']:.5f}, {kld['max']:.5f}")
    same = {"value": found["same_top"], **found["same_top_interval"]}
    add_row(table, "same top-1", ranged({key: share and share * 100 for key, share in same.items()}, 2) + " %")
    add_row(table, "bits per byte", f"{found['bits_per_byte']:.4f}")
    add_row(table, "scored", f"{found['scored_tokens']} tokens in {found['windows']} windows")
    add_row(table, "by", f"{found['engine']['name']} ({found['engine']['version']})")
    if found["parity"]:
        add_row(table, "checked", f"against {parity(found['parity'])}")
    if found["calibration_overlap"] is not None:
        add_row(table, "calibration", f"overlap with the scored text: {found['calibration_overlap']}")
    for label, text in _reply(found["reply"]):
        add_row(table, label, text)
    show(f"[bold]{escape(name)}[/bold] (brackets: {brackets})", table)


def sequential(name: str, found: Mapping[str, Any]) -> None:
    """What was asked, found and decided, under the figures."""
    stop = found["sequential"]
    quality(name, found, "95 % intervals over windows, valid at any stop")
    table = new_table("limit", "found", "verdict")
    for limit, check in stop["checks"].items():
        level = "" if check["confidence"] == stop["confidence"] else f" at {100 * check['confidence']:.1f} %"
        verdict = check["verdict"]
        add_row(table, f"{limit} {check['limit']:g}", ranged(check, 4) + level, Text(verdict, COLORS[verdict]))
    verdict, used, held = stop["verdict"], stop["windows_used"], stop["windows_of_corpus"]
    ends = "Undecided" if verdict == INCONCLUSIVE else f"Decided, [{COLORS[verdict]}]{verdict}[/],"
    show("", table, "", f"{ends} after {used} of {held} windows.")


def _reply(reply: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Rows: what was said, how much of it is the reference's, and how it ended."""
    if reply is None:
        return [("reply", "no chat template")]
    end = f"ends with {reply['stopped']}" if reply["stopped"] else f"no end within {reply['tokens']}"
    same = sameness(reply) if reply["reference_tokens"] is None else f"first {sameness(reply)} tokens"
    problem = [("  problem", reply["problem"])] if reply["problem"] else []
    return [("reply", f'"{shortened(reply["text"], 56)}"'), ("  as reference", f"{same}; {end}"), *problem]


def speed(found: Mapping[str, Any]) -> None:
    variants = {name: timed_figures(timed) for name, timed in found["variants"].items()}
    rates = new_table("artifact", "task", "tokens/s", "", "rounds", right=("tokens/s", "rounds"))
    memory = new_table("artifact", *COSTS, right=COSTS)
    for name, variant in variants.items():
        for task, figures in tasks_of(variant):
            add_row(rates, name, task, ranged(figures, 1), marks(variant, figures), str(figures["rounds"]))
        for task in variant["not_measured"]:
            add_row(rates, name, task, not_measured(variant))
        if unmeasured(variant) is None:  # else a note says it of speed and memory
            add_row(memory, name, *costs(variant))
    is_timed = any(True for variant in variants.values() for _ in tasks_of(variant))
    intervals = ", medians with 95 % intervals" if is_timed else ""
    notes = [f"{found['machine']['cpu']}{intervals}", *rate_notes(variants)]
    show(rates, "", *map(escape, notes))
    if memory.row_count:
        show("", memory, "", *map(escape, cost_notes(variants)))
    placed = new_table("artifact", *(f"operations of {task}" for task in PLACED))
    for name, cells in placements(variants).items():
        add_row(placed, name, *cells)
    if placed.row_count:
        show("", placed)
