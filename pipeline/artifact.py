"""Artifacts on disk: a folder with artifact.json beside its weight files, or naming files that others made."""

from __future__ import annotations

from pathlib import Path

from pipeline.errors import ArtifactError, PipelineError, gathered
from pipeline.files import new_folder, read_array, read_as, sha256, write_json
from pipeline.formats import CALIBRATION_FILE, FILE_FORMAT, format_of, refuse_imatrix, room
from pipeline.models import spec_of
from pipeline.progress import progress
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.hub import open_checkpoint
from pipeline.types import PLAIN, Artifact, Calibration, Options

FILE = "artifact.json"


def convert(
    checkpoint: str | Path,
    format_name: str,
    scheme: str,
    out: Path,
    options: Options = PLAIN,
    revision: str | None = None,
) -> Artifact:
    """Make the artifact of a scheme in the new folder `out`; nothing is left there on any failure.

    Raises:
        PipelineError: as the format's `write`, with what is wrong with the checkpoint's files, or `out` exists.
    """
    write = room(format_name, "write").write
    refuse_imatrix(format_name, options.imatrix)  # before a checkpoint is downloaded
    unsound: list[PipelineError] = []  # what `write` raises, with whatever else is wrong
    with open_checkpoint(checkpoint, revision, unsound) as source, new_folder(out) as folder:
        weights = 0
        with gathered(unsound):
            weights = spec_of(source.config, source.shapes).weights
        with progress(f"{format_name} {scheme}", weights) as advance:
            artifact: Artifact = write(source, scheme, folder, advance, options)
        write_json(folder / FILE, artifact)
    return artifact


def take(path: Path, format_name: str, checkpoint: Checkpoint, out: Path) -> Artifact:
    """Describe files that others made in the new folder `out`, which then names them; they stay where they are.

    Raises:
        ArtifactError: not readable, or of another model than the checkpoint.
    """
    with new_folder(out) as folder:
        artifact = describe(path, format_name, checkpoint)
        write_json(folder / FILE, artifact)
    return artifact


def describe(path: Path, format_name: str, checkpoint: Checkpoint | None) -> Artifact:
    """The artifact that files of others are; compared with a checkpoint where one is given.

    Raises:
        ArtifactError: not readable, or of another model than the checkpoint.
    """
    artifact: Artifact = room(format_name, "given").describe(path, checkpoint)
    return artifact


def load(place: Path, checkpoint: Checkpoint | None = None) -> Artifact:
    """The artifact of a folder, its files checked against their hashes, or a GGUF file or MLX folder of others.

    `checkpoint` is what those of others are compared with.

    Raises:
        ArtifactError: no artifact there, a file that is absent or changed, or of another model than the checkpoint.
    """
    if not (place / FILE).is_file():
        format_name = format_of(place)
        if format_name is None:
            raise ArtifactError(
                f"{place} holds no {FILE}. Give the folder that `quantgate convert` made, the path of a GGUF file, or "
                "an MLX folder, which holds config.json and model*.safetensors."
            )
        return describe(place, format_name, checkpoint)
    artifact = _parse(place / FILE)
    folder = location(place, artifact)
    absent = [name for name in artifact.files if not (folder / name).is_file()]
    if absent:
        raise ArtifactError(f"{folder}: {', '.join(absent)} is absent. {_again(artifact)}")
    for name, expected in artifact.files.items():
        if (found := sha256(folder / name)) != expected:  # not from the cache: a flipped byte may keep size and time
            raise ArtifactError(
                f"{folder / name} is not what {FILE} says: expected sha256 {expected}, found {found}. "
                f"{_again(artifact)}"
            )
    return artifact


def location(place: Path, artifact: Artifact) -> Path:
    """The folder of the artifact's files, where `place` is what `load` was given."""
    if artifact.path is None:
        return place
    return Path(artifact.path).parent if artifact.format == FILE_FORMAT else Path(artifact.path)


def calibration(place: Path, artifact: Artifact) -> Calibration | None:
    """The text of the importance matrix that an artifact was made with, where `place` is what `load` was given: None
    without one, or where it does not say its text.

    Raises:
        ArtifactError: a file of ids that is broken.
    """
    used = artifact.imatrix
    if used is None or used.text_sha256 is None or used.tokenizer_sha256 is None:
        return None
    path = location(place, artifact) / CALIBRATION_FILE
    ids = read_array(path, ArtifactError)
    if ids.dtype != "int32" or ids.ndim != 2:
        raise ArtifactError(
            f"{path}: expected int32 [windows, context], found {ids.dtype} {[*ids.shape]}. {_again(artifact)}"
        )
    return Calibration(", ".join(used.datasets), used.text_sha256, used.tokenizer_sha256, ids)


def _parse(path: Path) -> Artifact:
    artifact = read_as(path, Artifact, ArtifactError)
    if not artifact.files:
        raise ArtifactError(f"{path} names no files. Convert again.")
    return artifact


def _again(artifact: Artifact) -> str:
    return "Convert again." if artifact.path is None else "Fetch it again, then run dvc repro."
