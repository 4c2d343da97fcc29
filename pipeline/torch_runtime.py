"""A model in float32 torch: of a checkpoint, or of tensors that somebody else read."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import torch_model
from pipeline.cores import cpu_name
from pipeline.errors import ArtifactError, CheckpointError
from pipeline.logits import Head
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_model import AGAIN, EMBEDDING, HEAD, building, library
from pipeline.types import Engine, ModelSpec

REFERENCE = "transformers"
"""What the reference's engine is called, whichever way it computes: the bits are the same."""


class TorchRuntime:
    """A model in float32 on the CPU, with sdpa attention. It scores; it is not timed. `of_checkpoint` and `of_tensors`
    make one.
    """

    def __init__(self, model: Any, head: Head, name: str) -> None:
        self._torch, _ = library()
        self._model = model.eval()
        self._decoder = self._model.model
        self.head = head
        self.vocab_size = len(self.head.weight)
        self.engine = engine_of(name)

    @property
    def model(self) -> Any:
        """The torch module whose parameters bear the names of TensorSpec, for those who look on while it computes."""
        return self._model

    def hidden(self, ids: NDArray[np.int32], start: int) -> NDArray[np.float32]:
        """Final hidden states float32 [context - start, d_model], behind the last norm."""
        with self._torch.inference_mode():
            states = self._decoder(self._torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state  # (1, T, C)
        return states[0, start:].numpy()  # type: ignore[no-any-return]

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """See Scorer."""
        yield self.head.logits(self.hidden(ids, start))

    def greedy(self, ids: Sequence[int], limit: int, stop_ids: Collection[int]) -> list[int]:
        """The most likely tokens behind `ids`: at most `limit`, one of `stop_ids` being the last.

        Not transformers' `generate`: it would apply the repetition penalty of generation_config.json, which is no
        property of the weights.
        """
        found: list[int] = []
        given, cache = self._torch.tensor([[*ids]]), None  # (1, T)
        with self._torch.inference_mode():
            while len(found) < limit and not (found and found[-1] in stop_ids):
                out = self._model(given, cache=cache, use_cache=True, logits_to_keep=1)
                found.append(int(out.logits[0, -1].argmax()))
                given, cache = self._torch.tensor([found[-1:]]), out.cache
        return found


def instruction_set() -> str:
    """'AVX2, AMD EPYC 7B13': the kernels that torch was dispatched to, and the CPU, by which MKL chooses its own."""
    import torch

    return f"{torch.backends.cpu.get_cpu_capability()}, {cpu_name()}"


def engine_of(name: str) -> Engine:
    """torch as it is set up here, as an engine of this name."""
    torch, transformers = library()
    return Engine(
        name=name,
        version=f"transformers {transformers.__version__}, torch {torch.__version__}",
        instruction_set=instruction_set(),
        device="cpu",
        kv_type="f32",
        flash_attention="off",
        threads=torch.get_num_threads(),
    )


def of_checkpoint(checkpoint: Checkpoint, threads: int = 0) -> TorchRuntime:
    """transformers' model of a checkpoint, with the weights as our reader gives them.

    Raises:
        CheckpointError: the checkpoint is not whole, or transformers does not build it.
    """
    library(threads)
    spec = checked(checkpoint)
    with building(CheckpointError, checkpoint.path, AGAIN):
        torch_model.empty(torch_model.settings(checkpoint.config))  # before its weights, which take long to read
    weights = torch_model.read_all(checkpoint, spec.tensors)
    with building(CheckpointError, checkpoint.path, AGAIN):
        model = torch_model.model(torch_model.settings(checkpoint.config), weights)
    return TorchRuntime(model, Head(weights[EMBEDDING if spec.tied else HEAD].numpy()), REFERENCE)


def of_tensors(
    place: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]], name: str, threads: int = 0
) -> TorchRuntime:
    """The architecture of a config.json with `tensors` by the names of transformers' parameters: every one that it has,
    in its shape, but a tied head. They are not copied. `name` is what the engine is called, `place` is for errors.

    Raises:
        ArtifactError: transformers does not build it.
    """
    torch, _ = library(threads)
    weights = {key: torch.from_numpy(np.require(tensor, np.float32, ["C", "W"])) for key, tensor in tensors.items()}
    with building(ArtifactError, place, "Convert it again, or correct its config.json."):
        read = torch_model.settings(config)
        model = torch_model.model(read, weights)
    return TorchRuntime(model, Head(weights[EMBEDDING if read.tie_word_embeddings else HEAD].numpy()), name)


def checked(checkpoint: Checkpoint) -> ModelSpec:
    """The architecture of a checkpoint.

    Raises:
        CheckpointError: it is not whole.
    """
    spec = spec_of(checkpoint.config, checkpoint.shapes)
    checkpoint.check(spec)
    return spec


def head_of(checkpoint: Checkpoint) -> Head:
    """The head of a checkpoint: its embedding where it is tied.

    Raises:
        CheckpointError: as spec_of.
    """
    spec = spec_of(checkpoint.config, checkpoint.shapes)
    role = "embed" if spec.tied else "head"
    return Head(checkpoint.tensor(next(tensor for tensor in spec.tensors if tensor.role == role)))
