"""windows -> artifacts/reference/: the float32 reference's log-probabilities and hidden states."""

from __future__ import annotations

from pathlib import Path

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.progress import progress
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_forward import write_reference


@click.command(cls=Command)
def main() -> None:
    """Score the windows by the reference."""
    given = params.load(paths.PARAMS)
    windows = corpus.load(paths.CORPUS)
    with (
        Checkpoint(Path(given.checkpoint)) as checkpoint,
        progress("reference", len(windows.ids)) as advance,
    ):
        write_reference(checkpoint, checkpoint.identity(given.revision), windows, paths.REFERENCE, advance)


if __name__ == "__main__":
    main()
