"""The formats, each a folder with the same rooms: schemes, plan, write, run. They never import each other."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

from pipeline.errors import ParamsError, of

FORMATS = ("gguf",)


def room(format_name: str, name: str) -> ModuleType:
    """A room of a format, imported when it is used: a machine needs only the packages of the formats it works with.

    Raises:
        ParamsError: no such format.
    """
    if format_name not in FORMATS:
        raise ParamsError(f"format {format_name!r} does not exist; {of(format_name, FORMATS)}")
    return import_module(f"pipeline.formats.{format_name}.{name}")
