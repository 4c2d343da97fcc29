"""checkpoint -> artifacts/variants/NAME/: one variant's artifact."""

from __future__ import annotations

import click

from pipeline import artifact, params, paths
from pipeline.console import Command
from pipeline.source.hub import fetched_revision


@click.command(cls=Command)
@click.argument("name")
def main(name: str) -> None:
    """Convert the variant NAME of params.yaml."""
    given = params.load(paths.PARAMS)
    variant = given.variant(name)
    revision = fetched_revision(given.checkpoint)
    artifact.convert(given.checkpoint, variant.format, variant.scheme, paths.variant(name), revision)


if __name__ == "__main__":
    main()
