"""text -> artifacts/corpus/: windows of token ids by the checkpoint's own tokenizer."""

from __future__ import annotations

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.models import spec_of
from pipeline.source.hub import fetched_revision, open_checkpoint
from pipeline.source.tokenizer import Tokenizer


@click.command(cls=Command)
def main() -> None:
    """Cut the text into windows."""
    given = params.load(paths.PARAMS)
    with open_checkpoint(given.checkpoint, fetched_revision(given.checkpoint)) as checkpoint:
        spec, tokenizer = spec_of(checkpoint.config), Tokenizer(checkpoint.path)
    asked = given.corpus
    path = corpus.text_path(asked.name, asked.path)
    corpus.save(corpus.cut(asked.name, path, tokenizer, spec, asked.context, asked.windows), paths.CORPUS)


if __name__ == "__main__":
    main()
