"""`quantgate baseline`: what later runs are compared with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from pipeline import paths
from pipeline.console import Group

if TYPE_CHECKING:
    from pipeline.checks.baseline import Baseline


@click.group(cls=Group)
def baseline() -> None:
    """reports/baseline.json: the losses and tensors that were accepted, which the gate compares with."""


@baseline.command()
@click.argument("variants", metavar="[VARIANT]...", nargs=-1)
@click.option("--speed", is_flag=True, help="Also keep the speeds of this machine, for gate.limits.*.max_slowdown.")
def accept(variants: tuple[str, ...], speed: bool) -> None:
    """Accept what the stages left of each VARIANT of params.yaml, or of all. Commit the file that it writes.

    A record takes the place of an earlier one by the same engine on the same instruction set; others stay beside it.
    """
    from pipeline import console_baseline, params
    from pipeline.checks import acceptance, record
    from pipeline.checks import baseline as baselines
    from pipeline.errors import MeasurementError, ParamsError, listed, some
    from pipeline.files import read_object

    given = params.load(paths.PARAMS)
    names = list(dict.fromkeys(variants)) or [*given.variants]
    for name in names:
        given.variant(name)
    root, corpus = Path(), given.corpus
    asked_corpus = {"corpus": corpus.name, "windows": corpus.windows, "context": corpus.context}
    found = acceptance.problems(names, given.asked, asked_corpus, root, given.checkpoint)
    measurements = read_object(paths.MEASUREMENTS, ParamsError) if speed else {}
    if speed and not found:
        found = acceptance.speed_problems(names, measurements, root)
    if found:
        raise MeasurementError(
            f"nothing was accepted: figures are not those of {paths.PARAMS}.\n{listed(some(found, 'problems', 10))}"
        )
    before = baselines.load(paths.BASELINE) or baselines.Baseline()
    after, changes = acceptance.accept(before, record.gather(names, root), [*given.variants])
    timed: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    if speed:
        after, timed, dropped = acceptance.accept_speeds(after, measurements, names)
    baselines.save(paths.BASELINE, after)
    console_baseline.changes(changes)
    if speed:
        click.echo(f"\nspeeds of this machine: {', '.join(timed) or 'none was timed'}")
    if dropped:
        click.echo(f"speeds dropped, which were timed in another way: {', '.join(dropped)}")
    click.echo(f"\nwrote {paths.BASELINE}. Commit it.")


@baseline.command()
def show() -> None:
    """What was accepted: each variant by each engine, and whose speeds there are."""
    from pipeline import console_baseline

    console_baseline.baseline(_load())


@baseline.command()
@click.argument("variants", metavar="[VARIANT]...", nargs=-1)
def diff(variants: tuple[str, ...]) -> None:
    """What the stages left of each VARIANT, or of all, beside what was accepted. Nothing is judged: exit code 0."""
    from pipeline import console_baseline, params
    from pipeline.checks import acceptance, record

    given = params.load(paths.PARAMS)
    names = list(dict.fromkeys(variants)) or [*given.variants]
    for name in names:
        given.variant(name)
    console_baseline.changes(acceptance.beside(_load(), record.gather(names), names, [*given.variants]))


def _load() -> Baseline:
    from pipeline.checks import baseline as baselines
    from pipeline.errors import ParamsError

    found = baselines.load(paths.BASELINE)
    if found is None:
        raise ParamsError(
            f"{paths.BASELINE} is absent: nothing was ever accepted here. Run `quantgate baseline accept` once the "
            "figures of a dvc repro are as you want them."
        )
    return found
