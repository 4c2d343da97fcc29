"""all artifacts -> artifacts/speed.json: prefill and decode times in interleaved rounds."""

from __future__ import annotations

import click

from pipeline import params, paths
from pipeline.benchmarking import benchmark_folders
from pipeline.console import Command
from pipeline.files import write_json


@click.command(cls=Command)
def main() -> None:
    """Time every variant of params.yaml."""
    given = params.load(paths.PARAMS)
    folders = {name: paths.variant(name) for name in given.variants}
    asked = given.benchmark
    settings = {"device": asked.device, "threads": asked.threads, "flash_attention": asked.flash_attention}
    write_json(paths.SPEED, benchmark_folders(folders, asked.prompt_lengths, asked.decode, asked.rounds, settings))


if __name__ == "__main__":
    main()
