"""all artifacts -> artifacts/speed.json: prefill and decode times, cold starts and memory."""

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
    settings = {key: getattr(asked, key) for key in ("device", "threads", "flash_attention", "kv_type")}
    own = {name: given.timed_as(name) for name in given.variants}
    speed = benchmark_folders(folders, asked.prompt_lengths, asked.decode, asked.rounds, settings, own)
    write_json(paths.SPEED, speed)


if __name__ == "__main__":
    main()
