"""The gate as Markdown: a comment of a pull request, or the summary of a job."""

from __future__ import annotations

from collections.abc import Iterable

from pipeline.checks.verdicts import PASS, Check, Result
from pipeline.gate_output import words
from pipeline.report.text import escaped

BAD = ("variant", "check", "verdict", "asked", "found", "why, and what would decide")
GOOD = ("variant", "check", "asked", "found")


def text(result: Result) -> str:
    """What does not pass first, what passes folded away."""
    result = words.printable(result)
    bad = [check for check in result.checks if check.verdict != PASS]
    good = [check for check in result.checks if check.verdict == PASS]
    lines = [f"## {words.verdict(result)}"]
    if steps := words.next_steps(result):
        lines += ["", *(f"- {step[0].upper()}{step[1:]}." for step in steps)]
    if bad:
        lines += ["", *_table(BAD, [_bad(check) for check in bad])]
    for check in bad:
        if check.details:
            lines += ["", f"**{_cell(check.variant)}, {_cell(check.name)}**", ""]
            lines += [f"- {_cell(line)}" for line in words.details(check)]
    if good:
        rows = [(check.variant, check.name, words.asked(check), words.found(check)) for check in good]
        summary = f"<details><summary>{len(good)} of {len(result.checks)} checks pass</summary>"
        lines += ["", summary, "", *_table(GOOD, rows), "", "</details>"]
    if note := words.brackets(result):
        lines += ["", note]
    return "\n".join(lines) + "\n"


def _bad(check: Check) -> tuple[str, ...]:
    nats = words.in_nats(check)
    why = f"{check.reason} ({nats})" if nats else check.reason
    return check.variant, check.name, check.verdict, words.asked(check), words.found(check), why


def _table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> list[str]:
    columns = list(columns)
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(map(_cell, row))} |" for row in rows]


def _cell(content: str) -> str:
    """In one line, and shown as it is."""
    return escaped(" ".join(content.split()))
