"""-> artifacts/machine.json: the machine's fingerprint. Runs always; the same machine writes the same bytes."""

from __future__ import annotations

import click

from pipeline import paths
from pipeline.console import Command
from pipeline.files import write_json
from pipeline.metrics.machine import fingerprint


@click.command(cls=Command)
def main() -> None:
    """Say which machine this is."""
    write_json(paths.MACHINE, fingerprint())


if __name__ == "__main__":
    main()
