"""checkpoint and corpus -> artifacts/source.json, artifacts/text.json: what they are, without machine paths. Runs
always.
"""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.files import sha256, write_json
from pipeline.source.checkpoint import Checkpoint


@click.command(cls=Command)
def main() -> None:
    """Identify the checkpoint and the corpus of params.yaml."""
    given = params.load(paths.PARAMS)
    with Checkpoint(Path(given.checkpoint)) as checkpoint:
        write_json(paths.SOURCE, checkpoint.identity(given.revision))
    path = corpus.text_path(given.corpus.name, given.corpus.path)
    write_json(paths.TEXT, {"name": given.corpus.name, "sha256": sha256(path)})


if __name__ == "__main__":
    main()
