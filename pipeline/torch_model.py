"""transformers' own modules in float32 on the CPU, with weights that our readers give.

They are built on torch's meta device, where nothing takes memory, and get each parameter by its name: so FP8, experts
stored alone or fused, and the text part of a larger model are all read by one reader, and no weight is held twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pipeline.errors import PipelineError
from pipeline.models import text_config
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import TensorSpec

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

BLOCK_WEIGHTS = 1 << 22
"""As many are read at once: 16 MB of float32."""

AGAIN = "Correct its config.json, or fetch it again."

QUANTIZED = ("quantization_config", "quantization")


def library(threads: int = 0) -> tuple[Any, Any]:
    """torch and transformers, quiet; threads 0 leaves their number as it is.

    Raises:
        PipelineError: torch or transformers is not installed.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise PipelineError(f"the reference needs torch and transformers ({error}). Run: make setup") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    return torch, transformers


@contextmanager
def building(kind: type[PipelineError], place: Path, advice: str) -> Iterator[None]:
    """What transformers and torch raise is of many kinds, mostly of values in config.json.

    Raises:
        kind: whatever they raise but errors of ours and of the system, with `place` and `advice`.
    """
    _, transformers = library()
    try:
        yield
    except (PipelineError, OSError):
        raise
    except Exception as error:
        raise kind(
            f"{place}: transformers {transformers.__version__} cannot build what its config.json says: "
            f"{' '.join(str(error).split())}. {advice}"
        ) from error


def settings(config: Mapping[str, Any], **changed: Any) -> Any:
    """transformers' settings of the text model of a config.json, without what it says of quantization.

    Raises:
        PipelineError: as library.
        CheckpointError: as text_config.
    """
    _, transformers = library()
    read = {key: value for key, value in text_config({**config}).items() if key not in QUANTIZED}
    return transformers.CONFIG_MAPPING[read["model_type"]].from_dict({**read, **changed})


def empty(read: Any) -> Any:
    """The causal language model of transformers' settings, its parameters and buffers on the meta device.

    Raises:
        PipelineError: as library.
    """
    torch, transformers = library()
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(read, dtype=torch.float32, attn_implementation="sdpa")


def fill(module: Any, parameters: Mapping[str, Any]) -> None:
    """Give a module of `empty` its `parameters`, torch tensors by its own names, without copying them.

    Raises:
        RuntimeError: one is missing, has another shape, or is none of the module's; torch lists them.
    """
    module.load_state_dict(dict(parameters), strict=True, assign=True)
    for part in list(module.modules()):
        buffers = dict(part.named_buffers(recurse=False))
        if buffers:  # rotary embeddings, whose frequencies are computed from the settings and stored nowhere
            anew = dict(type(part)(part.config).named_buffers(recurse=False))
            for name in buffers:
                setattr(part, name, anew[name])
    if left := [name for name, tensor in [*module.named_parameters(), *module.named_buffers()] if tensor.is_meta]:
        raise RuntimeError(f"without values: {', '.join(left)}")
    module.requires_grad_(False)
    module.eval()


def model(read: Any, parameters: Mapping[str, Any]) -> Any:
    """The model of transformers' settings with `parameters`, of which a tied head is none.

    Raises:
        RuntimeError: as `fill`.
    """
    made = empty(read)
    tied = {HEAD: parameters[EMBEDDING]} if read.tie_word_embeddings and EMBEDDING in parameters else {}
    fill(made, {**parameters, **tied})
    if tied:
        made.lm_head.weight = made.model.embed_tokens.weight  # one parameter, as transformers has it
    return made


def read_into(checkpoint: Checkpoint, tensor: TensorSpec, out: Any) -> None:
    """A tensor of a checkpoint into a torch tensor of its shape, float32, block by block."""
    rows = out.numpy().reshape(tensor.rows, tensor.shape[-1])
    step = max(1, BLOCK_WEIGHTS // tensor.shape[-1])
    for start in range(0, tensor.rows, step):
        count = min(step, tensor.rows - start)
        rows[start : start + count] = checkpoint.rows(tensor, start, count)


def read_all(checkpoint: Checkpoint, tensors: Iterable[TensorSpec]) -> dict[str, Any]:
    """Tensors of a checkpoint as torch's, float32, by their names."""
    torch, _ = library()
    found = {}
    for tensor in tensors:
        found[tensor.name] = torch.empty(tensor.shape, dtype=torch.float32)
        read_into(checkpoint, tensor, found[tensor.name])
    return found
