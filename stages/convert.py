"""checkpoint -> artifacts/variants/NAME/: one variant's artifact."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import artifact, params, paths
from pipeline.console import Command
from pipeline.source.hub import fetched_revision, open_checkpoint


@click.command(cls=Command)
@click.argument("name")
def main(name: str) -> None:
    """Convert the variant NAME of params.yaml, or describe the file it names."""
    given = params.load(paths.PARAMS)
    variant = given.variant(name)
    out, revision = paths.variant(name), fetched_revision(given.checkpoint)
    if variant.path is not None:
        with open_checkpoint(given.checkpoint, revision) as checkpoint:
            artifact.take(Path(variant.path), variant.format, checkpoint, out)
    elif variant.scheme is not None:
        artifact.convert(given.checkpoint, variant.format, variant.scheme, out, variant.options, revision)


if __name__ == "__main__":
    main()
