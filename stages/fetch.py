"""checkpoint and corpus -> artifacts/source.json, artifacts/text.json: what they are. Runs always."""

from __future__ import annotations

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.files import sha256, write_json
from pipeline.formats import room
from pipeline.source.hub import open_checkpoint


@click.command(cls=Command)
def main() -> None:
    """Identify the checkpoint and the corpus of params.yaml."""
    given = params.load(paths.PARAMS)
    for variant in given.variants.values():  # before hours of work
        room(variant.format, "schemes").scheme(variant.scheme)
    with open_checkpoint(given.checkpoint, given.revision) as checkpoint:
        write_json(paths.SOURCE, checkpoint.identity())
    path = corpus.text_path(given.corpus.name, given.corpus.path)
    write_json(paths.TEXT, {"name": given.corpus.name, "sha256": sha256(path)})


if __name__ == "__main__":
    main()
