"""artifact, windows, reference -> artifacts/quality/NAME.json and artifacts/scores/NAME.npz."""

from __future__ import annotations

from dataclasses import asdict

import click
import numpy as np

from pipeline import artifact, corpus, params, paths
from pipeline.console import Command
from pipeline.evaluation import evaluate
from pipeline.files import new_file, write_json
from pipeline.source.hub import fetched_revision, open_checkpoint
from pipeline.torch_forward import load_reference


@click.command(cls=Command)
@click.argument("name")
def main(name: str) -> None:
    """Score the variant NAME of params.yaml."""
    given = params.load(paths.PARAMS)
    settings = given.evaluate_of(name)
    windows = corpus.load(paths.CORPUS)
    with open_checkpoint(given.checkpoint, fetched_revision(given.checkpoint)) as checkpoint:
        reference = load_reference(paths.REFERENCE, checkpoint)
    place = paths.variant(name)
    quality, scores = evaluate(place, artifact.load(place), windows, reference, asdict(settings))
    with new_file(paths.scores(name)) as partial, partial.open("wb") as file:
        np.savez(file, **asdict(scores))
    write_json(paths.quality(name), quality)


if __name__ == "__main__":
    main()
