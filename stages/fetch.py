"""checkpoint and corpus -> artifacts/source.json, artifacts/text.json: what they are. Runs always."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.errors import ParamsError
from pipeline.files import sha256, write_json
from pipeline.formats import room
from pipeline.source.checkpoint import Checkpoint


@click.command(cls=Command)
def main() -> None:
    """Identify the checkpoint and the corpus of params.yaml."""
    given = params.load(paths.PARAMS)
    for variant in given.variants.values():  # before hours of work
        room(variant.format, "schemes").scheme(variant.scheme)
    if given.revision is not None and Path(given.checkpoint).is_dir():
        raise ParamsError(f"params.yaml: revision is {given.revision!r}, but {given.checkpoint} is a folder.")
    with Checkpoint(Path(given.checkpoint)) as checkpoint:
        write_json(paths.SOURCE, checkpoint.identity(given.revision))
    path = corpus.text_path(given.corpus.name, given.corpus.path)
    write_json(paths.TEXT, {"name": given.corpus.name, "sha256": sha256(path)})


if __name__ == "__main__":
    main()
