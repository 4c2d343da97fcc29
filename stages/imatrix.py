"""calibration text -> artifacts/imatrix/: the importance matrix of it, where a variant asks for one."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from pipeline import calibration, params, paths
from pipeline.console import Command
from pipeline.files import new_folder, sha256, write_json
from pipeline.source.hub import fetched_revision, open_checkpoint


@click.command(cls=Command)
def main() -> None:
    """Compute the importance matrix of params.yaml's calibration text.

    Whether it overlaps a scored text is seen when an artifact is evaluated: other windows need no other matrix.
    """
    given = params.load(paths.PARAMS)
    with new_folder(paths.IMATRIX) as folder:
        own: dict[str, Any] | None = None
        if given.calibrated and given.calibration.path is not None:
            asked, file = given.calibration, folder / paths.IMATRIX_FILE
            with open_checkpoint(given.checkpoint, fetched_revision(given.checkpoint)) as checkpoint:
                made = calibration.make(
                    checkpoint, Path(given.calibration.path), asked.windows, asked.context, [], file
                )
            own = {"sha256": sha256(file), **asdict(made)}
        write_json(folder / "meta.json", {"own": own})


if __name__ == "__main__":
    main()
