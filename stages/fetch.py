"""checkpoint, variants, corpus and baseline -> artifacts/source.json, builds.json, text.json, accepted.json: what they
are. Runs always.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipeline import corpus, params, paths
from pipeline.console import Command
from pipeline.files import sha256, write_json
from pipeline.formats import room
from pipeline.params import Variant
from pipeline.source.hub import open_checkpoint


@click.command(cls=Command)
def main() -> None:
    """Identify the checkpoint, the variants and the corpus of params.yaml, and the baseline, if there is one."""
    given = params.load(paths.PARAMS)
    builds = {name: _build(variant) for name, variant in given.variants.items()}  # refused before hours of work
    for name, variant in given.variants.items():
        run, scored = room(variant.format, "run"), given.evaluate_of(name)
        if variant.scheme is not None:
            scheme = room(variant.format, "schemes").scheme(variant.scheme, variant.types, variant.sizes)
            run.check_window(scheme, given.corpus.context)
        check = run.check_settings
        check(scored.kv_type, scored.flash_attention)
        timed = asdict(given.benchmark) | given.timed_as(name)
        flash = timed["flash_attention"]
        check(timed["kv_type"], None if flash == "auto" else flash, timed["device"])
    with open_checkpoint(given.checkpoint, given.revision) as checkpoint:
        write_json(paths.SOURCE, checkpoint.identity())
    write_json(paths.BUILDS, builds)
    path = corpus.text_path(given.corpus.name, given.corpus.path)
    write_json(paths.TEXT, {"name": given.corpus.name, "sha256": sha256(path)})
    accepted = sha256(paths.BASELINE) if paths.BASELINE.exists() else None  # DVC takes no dependency that may be absent
    write_json(paths.ACCEPTED, {"baseline": accepted})


def _build(variant: Variant) -> dict[str, Any]:
    """What decides a variant's artifact, beside the checkpoint: a file of others by its hashes."""
    if variant.path is not None:
        files = room(variant.format, "given").hashes(Path(variant.path))
        return {"format": variant.format, "path": variant.path, "files": files}
    room(variant.format, "schemes").scheme(variant.scheme, variant.types, variant.sizes)
    built = {"format": variant.format, "scheme": variant.scheme, "types": dict(variant.types)}
    return built | ({"sizes": variant.sizes} if variant.sizes else {})


if __name__ == "__main__":
    main()
