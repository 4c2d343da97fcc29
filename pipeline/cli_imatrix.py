"""`quantgate imatrix`: how much each input of a matrix matters, by a calibration text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from pipeline import paths
from pipeline.cli_options import FOLDER, revision_option
from pipeline.console import Command


@click.command(cls=Command)
@click.argument("checkpoint")
@revision_option
@click.option("--corpus", required=True, type=FOLDER, metavar="FILE", help="The calibration text, UTF-8.")
@click.option(
    "--windows", type=click.IntRange(1), default=32, show_default=True, help="How many, from the text's beginning on."
)
@click.option("--context", type=click.IntRange(4), default=512, show_default=True, help="Tokens per window.")
@click.option("--scored", multiple=True, help="What it must not overlap, as --corpus of evaluate. Repeatable.")
@click.option("--out", required=True, type=FOLDER, metavar="FILE", help="A new file, which ends in .gguf.")
def imatrix(
    checkpoint: str,
    revision: str | None,
    corpus: Path,
    windows: int,
    context: int,
    scored: tuple[str, ...],
    out: Path,
) -> None:
    """Compute an importance matrix of CHECKPOINT over a calibration text: how large the inputs of each matrix are.

    The calibration text may be no part of a text that artifacts are scored on: that of --scored, or of params.yaml in
    this folder.

    A checkpoint whose float32 weights take more than half of the machine's memory is run layer by layer: the same
    matrix.
    """
    from pipeline import calibration
    from pipeline.report.text import experts
    from pipeline.source.hub import open_checkpoint

    texts = [calibration.scored_text(given) for given in scored] or _project_texts()
    with open_checkpoint(checkpoint, revision) as source:
        made = calibration.make(source, corpus, windows, context, texts, out)
    click.echo(f"{out}: {made.matrices} matrices, over {windows} windows of {context} tokens of {corpus.name}")
    names = " and ".join(text.path or text.name for text in texts)
    click.echo(f"no overlap with {names}" if texts else "compared with no scored text: name it by --scored")
    if made.experts:
        click.echo(experts(made.experts))


def _project_texts() -> list[Any]:
    """The scored text of params.yaml in this folder, if there is one."""
    from pipeline import calibration, params

    if not paths.PARAMS.exists():
        return []
    corpus = params.load(paths.PARAMS).corpus
    return [calibration.Text(corpus.name, corpus.path, corpus.windows, corpus.context)]
