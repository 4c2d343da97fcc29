"""Options that several commands have."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline.errors import OutputError

FOLDER = click.Path(path_type=Path)

revision_option = click.option("--revision", help="A commit, branch or tag of a Hub id.  [default: main]")


def _writable(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Refused before hours of work whose result could not be written."""
    from pipeline.files import check_writable

    if given not in {None, "-"}:
        try:
            check_writable(Path(str(given)))
        except OutputError as error:
            raise click.BadParameter(str(error)) from error
    return given


def file_option(text: str) -> dict[str, Any]:
    """What an option takes that names a file to write."""
    return {"type": click.Path(dir_okay=False, allow_dash=True), "callback": _writable, "metavar": "FILE", "help": text}


json_option = click.option("--json", "json_file", **file_option("Write JSON there; - is standard output."))


def emit(json_file: str | None, value: Any, show: Callable[[], None]) -> None:
    """JSON to standard output instead of the table, or to a file beside it."""
    from pipeline.files import json_text, write_json

    if json_file == "-":
        click.echo(json_text(value).encode(), nl=False)  # UTF-8 whatever the terminal has
        return
    show()
    if json_file:
        write_json(Path(json_file), value)
