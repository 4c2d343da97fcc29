"""measurements.json -> reports/gate.json. Exits 0 whatever the verdict: a failing stage would lose a `dvc exp`."""

from __future__ import annotations

import click

from pipeline import gate, params, paths
from pipeline.console import Command
from pipeline.files import write_json


@click.command(cls=Command)
def main() -> None:
    """Judge the measurements; `quantgate gate` does so too, and exits 1 where the gate fails."""
    result = gate.of_project(params.load(paths.PARAMS))
    write_json(paths.GATE, result.as_json())
    click.echo(f"gate: {result.verdict}. `quantgate gate` shows every check.")


if __name__ == "__main__":
    main()
