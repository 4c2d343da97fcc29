"""artifacts/imatrix/, builds.json -> artifacts/imatrix.json: which importance matrix each variant is made with.

Of its own, so that a variant that is added neither computes the matrix again nor converts the others again.
"""

from __future__ import annotations

import click

from pipeline import paths
from pipeline.console import Command
from pipeline.files import read_object, write_json


@click.command(cls=Command)
def main() -> None:
    """Say which importance matrix each variant of params.yaml is made with."""
    own = read_object(paths.IMATRIX / "meta.json")["own"]
    asked = {name: build.get("imatrix") for name, build in read_object(paths.BUILDS).items()}
    write_json(paths.MATRICES, {name: own["sha256"] if of is True else of for name, of in asked.items()})


if __name__ == "__main__":
    main()
