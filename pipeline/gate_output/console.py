"""The gate on a terminal of 80 columns: what passes in a line, what does not with its reason, the verdict last."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from pipeline.checks.verdicts import FAILING, PASS, Check, Result
from pipeline.gate_output import words

COLUMNS = ("check", "asked", "found", "needed")


def show(result: Result) -> None:
    """Print the checks by variant and what follows from them."""
    console, result = Console(highlight=False), words.printable(result)
    groups = words.grouped(result.checks)
    passing = {name: checks for name, checks in groups.items() if all(check.verdict == PASS for check in checks)}
    if passing:
        console.print("Every check of these passes; shown is the one nearest its limit.", _nearest(passing), sep="\n")
        console.print()
    for alike in words.alike({name: checks for name, checks in groups.items() if name not in passing}):
        _group(console, alike, groups[alike[0]])
    if note := words.brackets(result):
        console.print(Text(note, "dim"))
    console.print(Text(words.verdict(result), _color(result)))
    steps = words.next_steps(result)
    if len(steps) > 1:
        console.print("Next:")
    for step in steps:
        console.print(Text(f"- {step}." if len(steps) > 1 else f"Next: {step}."))


def _color(result: Result) -> str:
    return "green" if result.verdict == PASS else "yellow" if result.passes else "red"


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _nearest(passing: dict[str, list[Check]]) -> Table:
    table = _table("variant", "checks", *COLUMNS[:3])
    for name, checks in passing.items():
        check = words.nearest(checks) or checks[0]
        table.add_row(*map(Text, (name, str(len(checks)), words.named(check), words.asked(check), words.found(check))))
    return table


def _group(console: Console, names: Sequence[str], checks: Sequence[Check]) -> None:
    """A variant of which some check does not pass: those as a table, and below it why. `names` has others that stand
    as it does, each.
    """
    bad = [check for check in checks if check.verdict != PASS]
    name = names[0]
    each = "" if len(names) == 1 else "of each "
    console.print(Text.assemble((", ".join(names), "bold"), f": {each}{words.counted(checks)}"))
    table = _table(*COLUMNS)
    for check in bad:
        table.add_row(*map(Text, (words.named(check), words.asked(check), words.found(check), words.needed(check))))
    console.print(Padding(table, (0, 0, 0, 2)))
    for (verdict, reason), alike in _by_reason(bad).items():
        color = "red" if verdict in FAILING else "yellow"
        nats = "".join(f" ({text})" for check in alike if (text := words.in_nats(check)))
        whose = name if len(names) == 1 else f"all {len(names)}"
        said = f" {whose}, {', '.join(check.name for check in alike)}: {reason}{nats}"
        console.print(Padding(Text.assemble((verdict, color), said), (0, 0, 0, 2)))
        for line in (line for check in alike for line in words.details(check)):
            console.print(Padding(Text(line), (0, 0, 0, 4)))
    console.print()


def _by_reason(checks: Sequence[Check]) -> dict[tuple[str, str], list[Check]]:
    """Checks of the same verdict for the same reason, told once."""
    groups: dict[tuple[str, str], list[Check]] = {}
    for check in checks:
        groups.setdefault((check.verdict, check.reason), []).append(check)
    return groups
