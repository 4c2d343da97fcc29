"""Importance matrices from a calibration text, which is never the scored one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pipeline import corpus
from pipeline.activations import gather
from pipeline.errors import OutputError
from pipeline.files import check_writable
from pipeline.formats import room
from pipeline.overlap import RUN, refuse_overlap
from pipeline.progress import progress
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_runtime import checked
from pipeline.types import Calibration, ExpertUse


@dataclass(frozen=True)
class Text:
    """A scored text by its name among corpora, or its path, and how many windows of it: None takes all."""

    name: str
    path: str | None = None
    windows: int | None = None
    context: int = RUN


def scored_text(given: str) -> Text:
    """All of the text that --corpus of `quantgate evaluate` would take."""
    return Text(given) if given in corpus.NAMES and given != "file" else Text("file", given)


@dataclass(frozen=True)
class Made:
    """How many matrices an importance matrix is of, and how its tokens were spread over experts."""

    matrices: int
    experts: tuple[ExpertUse, ...]


def make(checkpoint: Checkpoint, text: Path, windows: int, context: int, scored: Iterable[Text], out: Path) -> Made:
    """Compute an importance matrix over the first windows of a text, and write it as the new file `out`.

    Raises:
        CorpusError: the text is too short, or overlaps one of the `scored`.
        CheckpointError: the checkpoint is not whole.
        MeasurementError: activations that are not finite.
        OutputError: `out` exists, does not end in .gguf, or cannot be written.
    """
    if out.suffix != ".gguf":
        raise OutputError(f"{out} is a GGUF file to be: name it {out.stem}.gguf.")
    if os.path.lexists(out):
        raise OutputError(f"{out} exists. Remove it or name another output file.")
    check_writable(out)
    spec, tokenizer = checked(checkpoint), Tokenizer(checkpoint.path)
    name = os.fsencode(text.name).decode(errors="replace")  # it may be no UTF-8
    found = corpus.cut(name, text, tokenizer, spec, context, windows)
    calibration = Calibration(name, found.text_sha256, found.tokenizer_sha256, found.ids)
    for other in scored:
        path = corpus.text_path(other.name, other.path)
        windows_of = corpus.cut(other.name, path, tokenizer, spec, other.context, other.windows)
        refuse_overlap(calibration, windows_of, f"the calibration text {name}")
    out.absolute().parent.mkdir(parents=True, exist_ok=True)  # now that nothing is left to refuse
    with progress("importance matrix", windows) as advance:
        sums = gather(checkpoint, found, out.absolute().parent, advance)
    imatrix = room("gguf", "importance").of_sums(spec, sums, calibration)
    imatrices = room("gguf", "imatrix")
    imatrices.write(out, imatrix)
    return Made(len(imatrix.tensors), imatrices.experts(imatrix))
