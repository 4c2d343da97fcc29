"""LanguageModel.swift, for the developer of an app: the template beside this file with a package's constants."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.formats.coreml.plan import Sizes

FILE = "LanguageModel.swift"


def text(scheme: str, source: str, sizes: Sizes, stop_ids: Sequence[int]) -> str:
    """The file for a package of `sizes`; `stop_ids` end a reply. `source` is the checkpoint's name."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("pipeline.formats.coreml", "."), undefined=StrictUndefined, keep_trailing_newline=True
    )
    template = environment.get_template(f"{FILE}.j2")
    one_line = " ".join(source.split())  # it stands in a comment
    return template.render(scheme=scheme, source=one_line, sizes=sizes, stop_ids=stop_ids)
