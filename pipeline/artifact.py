"""A converted checkpoint on disk: a folder with its weight file and artifact.json."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ArtifactError
from pipeline.files import new_folder, read_object, sha256, write_json
from pipeline.formats import room
from pipeline.models import spec_of
from pipeline.progress import progress
from pipeline.source.hub import open_checkpoint
from pipeline.types import Artifact, EffectiveType, SourceIdentity

FILE = "artifact.json"


def convert(checkpoint: str | Path, format_name: str, scheme: str, out: Path, revision: str | None = None) -> Artifact:
    """Make the artifact of a scheme in the new folder `out`; nothing is left there on any failure.

    Raises:
        PipelineError: as the format's `write`, or `out` exists.
    """
    write = room(format_name, "write").write
    with open_checkpoint(checkpoint, revision) as source, new_folder(out) as folder:
        with progress(f"{format_name} {scheme}", spec_of(source.config).weights) as advance:
            artifact: Artifact = write(source, scheme, folder, advance)
        write_json(folder / FILE, artifact)
    return artifact


def load(folder: Path) -> Artifact:
    """The artifact of a folder, its files checked against their hashes.

    Raises:
        ArtifactError: no artifact there, or a file that is absent or changed.
    """
    if not (folder / FILE).is_file():
        raise ArtifactError(f"{folder} holds no {FILE}. Give the folder that `quantgate convert` made.")
    raw = read_object(folder / FILE, ArtifactError)
    try:
        types = {name: EffectiveType(**value) for name, value in raw.pop("effective_types").items()}
        artifact = Artifact(source=SourceIdentity(**raw.pop("source")), effective_types=types, **raw)
    except (AttributeError, KeyError, TypeError) as error:
        raise ArtifactError(f"{folder / FILE} is not of this version ({error}). Convert again.") from error
    absent = [name for name in artifact.files if not (folder / name).is_file()]
    if absent:
        raise ArtifactError(f"{folder}: {', '.join(absent)} is absent. Convert again.")
    for name, expected in artifact.files.items():
        if (found := sha256(folder / name)) != expected:  # not from the cache: a flipped byte may keep size and time
            raise ArtifactError(
                f"{folder / name} is not what {FILE} says: expected sha256 {expected}, found {found}. Convert again."
            )
    return artifact
