"""everything measured -> reports/: pareto.md, pareto.png, pareto.csv, measurements.json."""

from __future__ import annotations

import click

from pipeline import params, paths
from pipeline.console import Command
from pipeline.report.build import build


@click.command(cls=Command)
def main() -> None:
    """Report on the variants of params.yaml."""
    build([*params.load(paths.PARAMS).variants])


if __name__ == "__main__":
    main()
