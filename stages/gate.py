"""measurements.json -> reports/gate.json. Exits 0 whatever the verdict: a failing stage would lose a `dvc exp`."""

from __future__ import annotations

import click

from pipeline import gate, params, paths
from pipeline.console import Command
from pipeline.files import read_object, write_json


@click.command(cls=Command)
def main() -> None:
    """Judge the measurements; `quantgate gate` does so too, and exits 1 where the gate fails."""
    given = params.load(paths.PARAMS)
    result = gate.judge(
        read_object(paths.MEASUREMENTS), given.variants, given.gate.limits_of, given.gate.inconclusive, given.asked
    )
    write_json(paths.GATE, result.as_json())
    click.echo(f"gate: {result.verdict}. `quantgate gate` shows every check.")


if __name__ == "__main__":
    main()
