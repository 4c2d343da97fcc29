"""MLX and mlx-lm as libraries: imported when they are used, asked for their versions and devices."""

from __future__ import annotations

from functools import cache
from importlib.metadata import version as version_of
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pipeline.errors import ArtifactError, PipelineError

INSTALL = "Run: make setup, or pip install -e '.[mlx]'"


@cache
def core() -> Any:
    """mlx.core.

    Raises:
        PipelineError: MLX or mlx-lm is not installed.
    """
    try:
        import mlx.core
    except ImportError as error:
        raise PipelineError(f"MLX does not load ({error}). {INSTALL}") from error
    if find_spec("mlx_lm") is None:  # said before the long work, without the seconds that its import takes
        raise PipelineError(f"mlx-lm is not installed. {INSTALL}")
    return mlx.core


@cache
def lm() -> Any:
    """mlx_lm.utils. Its import takes seconds, since it imports transformers.

    Raises:
        PipelineError: MLX or mlx-lm is not installed.
    """
    core()
    try:
        import mlx_lm.utils
    except ImportError as error:
        raise PipelineError(f"mlx-lm does not load ({error}). {INSTALL}") from error
    return mlx_lm.utils


def version() -> str:
    """'mlx-lm 0.32.2, mlx 0.32.4'.

    Raises:
        PipelineError: as core.
    """
    return f"mlx-lm {version_of('mlx-lm')}, mlx {core().__version__}"


def has_gpu() -> bool:
    """Whether this is Apple Silicon, which MLX is for.

    Raises:
        PipelineError: as core.
    """
    return bool(core().metal.is_available())


def device(name: str) -> Any:
    """MLX's own device 'cpu' or 'gpu'.

    Raises:
        PipelineError: as core.
    """
    mx = core()
    return {"cpu": mx.cpu, "gpu": mx.gpu}[name]


def load_model(folder: Path) -> Any:
    """mlx-lm's model of a folder, its weights not yet read; no code of the folder is run.

    Raises:
        ArtifactError: mlx-lm does not load it.
    """
    utils = lm()
    try:
        return utils.load_model(folder, lazy=True)[0]
    except Exception as error:  # it raises many kinds, by what it stumbles over
        raise _not_loaded(folder, "the model", error) from error


def load_tokenizer(folder: Path) -> Any:
    """mlx-lm's tokenizer of a folder, with the chat template and the ids that end a reply; no code of the folder is
    run.

    Raises:
        ArtifactError: mlx-lm does not load it.
    """
    utils = lm()
    try:
        ends = utils.load_config(folder).get("eos_token_id")  # generation_config.json comes first
        return utils.load_tokenizer(folder, {"trust_remote_code": False}, eos_token_ids=ends)
    except Exception as error:  # as above
        raise _not_loaded(folder, "the tokenizer", error) from error


def _not_loaded(folder: Path, what: str, error: Exception) -> ArtifactError:
    said = " ".join(f"{type(error).__name__}: {error}".split())
    return ArtifactError(
        f"mlx-lm {version_of('mlx-lm')} cannot load {what} of {folder}: {said[:500]}\nConvert it again."
    )
