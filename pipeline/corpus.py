"""Text -> windows of token ids, the same for every variant."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from pipeline.errors import CorpusError, suggestion
from pipeline.files import new_folder, read_array, read_object, reading, write_json
from pipeline.paths import SAMPLE_TEXT
from pipeline.source.tokenizer import Tokenizer
from pipeline.source.wikitext import wikitext_2
from pipeline.types import ModelSpec, Windows

NAMES = ("sample", "wikitext-2", "file")


def text_path(name: str, path: str | Path | None) -> Path:
    """Where a corpus of params lies: `sample` is embedded, `wikitext-2` comes from the Hub, `file` is the user's.

    Raises:
        CorpusError: an unknown name, `file` without a path, a path that is not a file, or WikiText-2 out of reach.
    """
    if name not in NAMES:
        raise CorpusError(f"corpus {name!r} does not exist; {suggestion(name, NAMES)}")
    if (name == "file") != (path is not None):
        raise CorpusError("corpus: `file` needs a path to a UTF-8 text, `sample` and `wikitext-2` take none.")
    if name == "wikitext-2":
        return wikitext_2()
    found = SAMPLE_TEXT if path is None else Path(path)
    with reading(found, CorpusError):
        is_file = found.is_file()
    if not is_file:
        raise CorpusError(f"corpus: {found} is not a file. Give the path of a UTF-8 text.")
    return found


def read_text(path: Path) -> tuple[str, str]:
    """The text, its line ends untouched, and the sha256 of its bytes: a copy with other line ends is another corpus.

    Raises:
        CorpusError: not to be read, or not UTF-8, with the offset of the first bad byte.
    """
    with reading(path, CorpusError):
        data = path.read_bytes()
    try:
        return data.decode("utf-8"), hashlib.sha256(data).hexdigest()
    except UnicodeDecodeError as error:
        raise CorpusError(
            f"{path} is not UTF-8: byte {error.start} is 0x{data[error.start]:02x} ({error.reason}). "
            "Convert it to UTF-8."
        ) from error


def cut(name: str, path: Path, tokenizer: Tokenizer, spec: ModelSpec, context: int, windows: int | None) -> Windows:
    """Consecutive windows of `context` tokens that share none; the tail is dropped. None takes all windows there are.

    Raises:
        CorpusError: a context too short to score, or a text too short for the windows asked for.
    """
    if not 4 <= context <= spec.context_length:
        raise CorpusError(
            f"a context of {context} tokens cannot be scored: at least 4 are needed, and the model takes at most "
            f"{spec.context_length}. Set corpus.context (--context)."
        )
    text, digest = read_text(path)
    ids = tokenizer.encode(text)
    held = len(ids) // context
    wanted = held if windows is None else windows
    if held < max(1, wanted):
        raise CorpusError(
            f"corpus {path.name} has {len(ids)} tokens: {held} windows of {context}. {max(1, wanted)} windows need "
            f"{max(1, wanted) * context} tokens: give a longer text, or ask for fewer windows or a shorter context."
        )
    cut_ids = ids[: wanted * context].reshape(wanted, context)
    lengths = tokenizer.byte_lengths(spec.vocab_size)
    targets = cut_ids[:, context // 2 + 1 :]
    return Windows(name, digest, tokenizer.sha256, cut_ids, lengths[targets].sum(axis=1))


def save(windows: Windows, folder: Path) -> None:
    """ids.npy and meta.json in a new folder.

    Raises:
        OutputError: as new_folder.
    """
    with new_folder(folder) as partial:
        np.save(partial / "ids.npy", windows.ids)
        meta = {
            "name": windows.name,
            "text_sha256": windows.text_sha256,
            "tokenizer_sha256": windows.tokenizer_sha256,
            "span_bytes": windows.span_bytes.tolist(),
        }
        write_json(partial / "meta.json", meta)


def load(folder: Path) -> Windows:
    """What `save` left.

    Raises:
        CorpusError: no corpus there, or a broken one.
    """
    meta = read_object(folder / "meta.json", CorpusError)
    ids = read_array(folder / "ids.npy", CorpusError)
    match meta:
        case {
            "name": str(name),
            "text_sha256": str(text_sha256),
            "tokenizer_sha256": str(tokenizer_sha256),
            "span_bytes": [*lengths],
        } if ids.dtype == np.int32 and ids.ndim == 2 and len(ids) == len(lengths):
            if all(type(n) is int and 0 <= n < 1 << 63 for n in lengths):
                return Windows(name, text_sha256, tokenizer_sha256, ids, np.array(lengths, np.int64))
    raise CorpusError(f"{folder} does not hold windows as this version writes them. Remove it and run dvc repro.")
