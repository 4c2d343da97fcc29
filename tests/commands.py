"""Running the command line in a test."""

from __future__ import annotations

from click.testing import CliRunner, Result

from pipeline.cli import main
from pipeline.console import BAD_INPUT


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [str(argument) for argument in arguments])


def succeeded(*arguments: object) -> Result:
    result = run(*arguments)
    assert result.exit_code == 0, result.output or repr(result.exception)
    return result


def refused(*arguments: object) -> str:
    """What a command that fails with exit code 2 says on standard error, without a traceback."""
    result = run(*arguments)
    assert isinstance(result.exception, SystemExit), repr(result.exception)
    assert result.exit_code == BAD_INPUT == 2
    assert "Traceback" not in result.output
    assert result.stdout == ""
    return result.stderr


def squeezed(text: str) -> str:
    """Without the line ends that a terminal of 80 columns puts in."""
    return "".join(text.split())
