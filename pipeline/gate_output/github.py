"""What a GitHub Actions job shows of the gate: annotations on the run, and a summary.

Sources: docs.github.com, "Workflow commands for GitHub Actions"; escapes as in github.com/actions/toolkit,
packages/core/src/command.ts.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pipeline.checks.verdicts import PASS, Check, Result
from pipeline.gate_output import markdown, words

SHOWN = 10
"""Annotations of a level that GitHub shows of one step; it drops the rest without a word."""


def is_there(environment: Mapping[str, str]) -> bool:
    """Whether this runs in a job of GitHub Actions."""
    return environment.get("GITHUB_ACTIONS") == "true"


def commands(result: Result) -> list[str]:
    """A line for each check that does not pass, errors first, then one that says the verdict.

    Where GitHub would show fewer, the last of a level says how many more there are.
    """
    result = words.printable(result)
    lines = []
    for level in ("error", "warning"):
        checks = [check for check in result.checks if check.verdict != PASS and words.level(result, check) == level]
        room = SHOWN - 1 if level == words.outcome(result) else SHOWN  # the verdict takes one
        shown = checks if len(checks) <= room else checks[: room - 1]
        lines += [_command(level, f"{c.variant}: {words.named(c)}: {c.verdict}", _message(c)) for c in shown]
        if more := len(checks) - len(shown):
            lines.append(_command(level, f"{more} more", f"{more} more checks: see the summary of this job."))
    return [*lines, _command(words.outcome(result), "quantgate gate", words.last_line(result))]


def append_summary(result: Result, environment: Mapping[str, str]) -> None:
    """Add the Markdown to the summary of the job, where it has one.

    Raises:
        OSError: the file cannot be written.
    """
    if place := environment.get("GITHUB_STEP_SUMMARY"):
        with Path(place).open("a", encoding="utf-8") as file:
            file.write(f"{markdown.text(result)}\n")


def _message(check: Check) -> str:
    nats = words.in_nats(check)
    figures = f"Asked {words.asked(check)}, found {words.found(check)}{f' ({nats})' if nats else ''}."
    known = check.limit is not None
    return "\n".join([*([figures] if known else []), check.reason, *words.details(check)])


def _command(level: str, title: str, message: str) -> str:
    return f"::{level} title={_property(title)}::{_data(message)}"


def _data(text: str) -> str:
    """The message of a command: a line end would end it."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    """The value of a property: a colon would end them all, a comma this one."""
    return _data(text).replace(":", "%3A").replace(",", "%2C")
