"""How a command line fails: a PipelineError is shown without a traceback, exit code 2."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from pipeline.errors import PipelineError

BAD_INPUT = 2
GATE_FAILED = 1


@contextmanager
def _shown() -> Iterator[None]:
    try:
        yield
    except PipelineError as error:
        raise _BadInput(str(error)) from error


class _BadInput(click.ClickException):
    exit_code = BAD_INPUT


class Command(click.Command):
    def invoke(self, ctx: click.Context) -> Any:
        with _shown():
            return super().invoke(ctx)


class Group(click.Group):
    command_class = Command
