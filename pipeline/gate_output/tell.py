"""Where a gate's result goes: the terminal, files, and the job of GitHub Actions that it runs in."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from pipeline.checks.verdicts import Result
from pipeline.files import write_text
from pipeline.gate_output import console, github, junit, markdown


def all_of(result: Result, markdown_file: str | None, junit_file: str | None, environment: Mapping[str, str]) -> None:
    """Write the files asked for, then print the checks. Of what `-` asks, standard output holds nothing else.

    Raises:
        OutputError: a file cannot be written.
    """
    rooms = ((markdown_file, markdown.text), (junit_file, junit.text))
    for file, text in rooms:
        if file not in {None, "-"}:
            write_text(Path(str(file)), text(result))
    piped = [text(result) for file, text in rooms if file == "-"]
    for document in piped:
        click.echo(document.encode(), nl=False)  # UTF-8 whatever the terminal has
    if not piped:
        console.show(result)
    if github.is_there(environment):
        for line in github.commands(result):
            click.echo(line, err=bool(piped))
        github.append_summary(result, environment)
