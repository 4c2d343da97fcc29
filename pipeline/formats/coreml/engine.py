"""coremltools as a library: imported when it is used, without its remarks on other packages."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version as version_of
from typing import Any

from pipeline.errors import PipelineError

INSTALL = "Run: make setup, or pip install -e '.[coreml]'"


UNUSED = ("torch", "transformers", "sklearn", "tensorflow", "xgboost")
"""What coremltools imports, where it is installed, for converters that are not used here: seconds, and 200 MB."""


@cache
def tools() -> Any:
    """coremltools. Its import takes seconds.

    Raises:
        PipelineError: coremltools is not installed.
    """
    logging.getLogger("coremltools").setLevel(logging.ERROR)  # it remarks on every native library that only macOS has
    try:
        with warnings.catch_warnings(action="ignore"), _hidden(UNUSED):
            import coremltools
    except ImportError as error:
        raise PipelineError(f"coremltools does not load ({error}). {INSTALL}") from error
    return coremltools


@contextmanager
def _hidden(packages: Sequence[str]) -> Iterator[None]:
    """Packages that are not imported yet look as if they were not installed."""
    modules: dict[str, Any] = sys.modules
    hidden = [package for package in packages if package not in modules]
    modules |= dict.fromkeys(hidden)  # None stands for a module that is not there
    try:
        yield
    finally:
        for package in hidden:
            del modules[package]


def version() -> str:
    """'coremltools 9.0'."""
    return f"coremltools {version_of('coremltools')}"
