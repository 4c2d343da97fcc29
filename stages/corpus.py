"""text -> artifacts/corpus/: windows of token ids by the checkpoint's own tokenizer."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer


@click.command(cls=Command)
def main() -> None:
    """Cut the text into windows."""
    given = params.load(paths.PARAMS)
    folder = Path(given.checkpoint)
    with Checkpoint(folder) as checkpoint:
        spec = spec_of(checkpoint.config)
    asked = given.corpus
    path = corpus.text_path(asked.name, asked.path)
    corpus.save(corpus.cut(asked.name, path, Tokenizer(folder), spec, asked.context, asked.windows), paths.CORPUS)


if __name__ == "__main__":
    main()
