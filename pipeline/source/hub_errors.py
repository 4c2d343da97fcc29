"""What the Hub, the network or the disk refuses, as errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pipeline.errors import CheckpointError, OutputError, PipelineError


@contextmanager
def told(name: str, revision: str, last: str | None) -> Iterator[None]:
    """Tells of a Hub id at a revision, which was the commit `last` when the cache was last filled.

    Raises:
        CheckpointError, OutputError: in place of huggingface_hub's own, which come in a dozen kinds.
    """
    import httpx2
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        yield
    except (httpx2.TransportError, OSError) as error:  # an answer of the Hub is an OSError to huggingface_hub
        hidden = error.__cause__ if isinstance(error, LocalEntryNotFoundError) else None
        raise _told(hidden or error, name, revision, last) from error


def _told(error: BaseException, name: str, revision: str, last: str | None) -> PipelineError:
    from huggingface_hub import constants
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    hub = constants.ENDPOINT
    if isinstance(error, GatedRepoError):  # a RepositoryNotFoundError too
        return CheckpointError(
            f"{name} is gated: accept its terms at {hub}/{name}, then run `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, RepositoryNotFoundError):
        return CheckpointError(
            f"{name} is not a folder, and {hub} has no such repository, or a private one. Check the spelling; "
            "for a private one run `hf auth login` or set HF_TOKEN."
        )
    if isinstance(error, RevisionNotFoundError):
        return CheckpointError(
            f"{name} has no revision {revision!r}. Give a branch, tag or commit of {hub}/{name}/commits/main."
        )
    if isinstance(error, HfHubHTTPError):
        status = error.response.status_code
        login = " Run `hf auth login` or set HF_TOKEN." if status in {401, 403} else " Run this again later."
        said = f": {error.server_message}" if error.server_message else ""
        return CheckpointError(f"{name}: {hub} answers {status} {error.response.reason_phrase}{said}.{login}")
    if isinstance(error, OSError) and error.errno is not None:
        return OutputError(
            f"{constants.HF_HUB_CACHE} cannot be written: {error.strerror}. "
            "Make room, or set HF_HOME to a folder elsewhere."
        )
    if isinstance(error, OSError) and not isinstance(error, ConnectionError):  # as of a file that is too short
        return CheckpointError(f"{name} was not fetched: {error} Run this again.")
    cached = f", or set HF_HUB_OFFLINE=1 to take {revision} as the cache holds it, commit {last}" if last else ""
    return CheckpointError(  # the cached commit is named and not taken: a branch may have moved on
        f"{name} is not a folder, and {hub} cannot be reached ({type(error).__name__}: {error}). "
        f"Run this again with a network{cached}. What has arrived is kept."
    )
