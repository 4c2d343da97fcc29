"""windows -> artifacts/reference/: the float32 reference's log-probabilities and hidden states."""

from __future__ import annotations

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.progress import progress
from pipeline.source.hub import fetched_revision, open_checkpoint
from pipeline.torch_forward import write_reference


@click.command(cls=Command)
def main() -> None:
    """Score the windows by the reference."""
    given = params.load(paths.PARAMS)
    windows = corpus.load(paths.CORPUS)
    with (
        open_checkpoint(given.checkpoint, fetched_revision(given.checkpoint)) as checkpoint,
        progress("reference", len(windows.ids)) as advance,
    ):
        write_reference(checkpoint, checkpoint.identity(), windows, paths.REFERENCE, advance)


if __name__ == "__main__":
    main()
