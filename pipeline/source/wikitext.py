"""WikiText-2's raw test split, from `datasets`, as the one text that published perplexities are of."""

from __future__ import annotations

import hashlib
from pathlib import Path

from pipeline.errors import CorpusError, PipelineError
from pipeline.files import cache_folder, new_file, sha256

DATASET = "Salesforce/wikitext"
CONFIG = "wikitext-2-raw-v1"
SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"


def wikitext_2(dataset: str = DATASET) -> Path:
    """The text in the user's cache folder, loaded once from a Hub id or a local folder of a dataset.

    Raises:
        CorpusError: the dataset cannot be loaded, or is another text.
    """
    path = cache_folder() / "corpora" / "wikitext-2.txt"
    if path.is_file():
        if (found := sha256(path)) != SHA256:
            raise CorpusError(
                f"{path} is not WikiText-2's raw test split: expected sha256 {SHA256}, found {found}. "
                "Delete it: it is loaded again."
            )
        return path
    data = _load(dataset).encode()
    if (found := hashlib.sha256(data).hexdigest()) != SHA256:
        raise CorpusError(
            f"{dataset} ({CONFIG}, test) is not the text it was: expected sha256 {SHA256}, found {found}. Give a copy "
            "of wiki.test.raw as corpus {name: file, path: …} (--corpus PATH)."
        )
    with new_file(path) as partial:
        partial.write_bytes(data)
    return path


def _load(dataset: str) -> str:
    """The rows joined; an empty one was a line with a space alone."""
    try:
        import datasets
    except ImportError as error:
        raise PipelineError(f"wikitext-2 needs datasets ({error}). Run: pip install -e '.[hub]'") from error
    datasets.disable_progress_bars()
    datasets.utils.logging.set_verbosity_error()
    try:
        rows = datasets.load_dataset(dataset, CONFIG, split="test")["text"]
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:  # no network is an OSError
        raise CorpusError(
            f"wikitext-2 cannot be loaded from {dataset}: {type(error).__name__}: {error}\nRun this again with a "
            "network, or give a copy of wiki.test.raw as corpus {name: file, path: …} (--corpus PATH)."
        ) from error
    return "".join(row or " \n" for row in rows)
