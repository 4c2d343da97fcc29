"""The reference of a checkpoint larger than memory: layer by layer, each read once and run over all windows.

Between two layers the hidden states of all windows lie in a scratch file. Memory holds one layer in float32, and one
window's activations. A layer is run by transformers' own code, as a model of one layer that is given hidden states for
embeddings, so masks and rotary embeddings are those of the whole model, and so is every bit of the result.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BufferedRandom
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import torch_model
from pipeline.errors import CheckpointError, OutputError
from pipeline.progress import Advance
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_model import AGAIN, building
from pipeline.types import ModelSpec, TensorSpec, Windows

SHARE = 0.5
"""Of the machine's memory: a model whose float32 weights take more is run layer by layer."""

Run = Callable[[NDArray[np.float32]], NDArray[np.float32]]
"""Hidden states [T, d_model] -> hidden states."""

ALIGNED = 16  # floats: 64 bytes, where torch itself begins a tensor


def is_larger(spec: ModelSpec) -> bool:
    """Whether the model in float32 takes more than its share of what memory the machine has, in use or not."""
    import psutil

    return 4 * spec.weights > SHARE * int(psutil.virtual_memory().total)


Look = Callable[[Any, str], AbstractContextManager[None]]
"""What looks on while a torch module runs, by the name it has in the model: 'model.layers.3'."""


@contextmanager
def final_states(
    checkpoint: Checkpoint,
    spec: ModelSpec,
    windows: Windows,
    folder: Path,
    advance: Advance,
    look: Look = lambda module, name: nullcontext(),
) -> Iterator[Callable[[int], NDArray[np.float32]]]:
    """A function that gives the final hidden states of a window, float32 [context, d_model], behind the last norm.

    `advance` is told of all windows, a layer's share at a time. The scratch file, 4 bytes x windows x context x
    d_model, lies in `folder` and has no name: it is gone when the block or the process ends, however it does. `look`
    is asked to each layer in turn.

    Raises:
        CheckpointError: transformers does not build what config.json says.
        OutputError: not enough disk for the scratch file.
    """
    _check_disk(folder, 4 * windows.ids.size * spec.d_model)
    with tempfile.TemporaryFile(dir=folder) as file:
        scratch = _Scratch(file, (windows.context, spec.d_model))
        share = 1 / (spec.n_layers + 2)  # with the embeddings and the last norm
        norm = _run(_Layers(checkpoint, spec), scratch, windows, lambda: advance(share), look)

        def states(window: int) -> NDArray[np.float32]:
            advance(share)
            return norm(scratch.read(window))

        yield states


def _run(layers: _Layers, scratch: _Scratch, windows: Windows, done: Callable[[], None], look: Look) -> Run:
    """All layers over all windows, in the scratch file: what is left to run is the last norm. The layers' memory is
    free behind it, for the head that comes next.
    """
    for window, ids in enumerate(windows.ids):
        scratch.write(window, layers.embedded(ids))
        done()
    for number in range(layers.count):
        run = layers.load(number)
        with look(layers.module(number), f"model.layers.{number}"):
            for window in range(len(windows.ids)):
                scratch.write(window, run(scratch.read(window)))
                done()
    return layers.norm()


class _Scratch:
    """Hidden states by window in a file: not mapped, since a full disk would kill the process."""

    def __init__(self, file: BufferedRandom, shape: tuple[int, int]) -> None:
        self._file, self._shape, self._size = file, shape, 4 * prod(shape)

    def write(self, window: int, states: NDArray[np.float32]) -> None:
        self._file.seek(window * self._size)
        self._file.write(np.ascontiguousarray(states).data)

    def read(self, window: int) -> NDArray[np.float32]:
        states = np.empty(self._shape, np.float32)
        self._file.seek(window * self._size)
        if self._file.readinto(states.data) != self._size:
            raise OSError(f"the scratch file of hidden states ended before window {window}")
        return states


class _Layers:
    """The layers of a checkpoint, one at a time in the same memory."""

    def __init__(self, checkpoint: Checkpoint, spec: ModelSpec) -> None:
        torch, _ = torch_model.library()
        self._checkpoint = checkpoint
        self._tensors: dict[int, dict[str, TensorSpec]] = {}
        for tensor in spec.tensors:
            if tensor.layer is not None:
                own = tensor.name.replace(f".layers.{tensor.layer}.", ".layers.0.").removeprefix("model.")
                self._tensors.setdefault(tensor.layer, {})[own] = tensor
        self._final = next(tensor for tensor in spec.tensors if tensor.role == "output_norm")
        self._embedding = next(tensor for tensor in spec.tensors if tensor.role == "embed")
        self._linear = {*spec.linear}
        self.count = spec.n_layers
        self._modules: dict[bool, Any] = {}  # by whether its attention is linear
        self._memory = torch.empty(max(map(_floats, self._tensors.values())), dtype=torch.float32)

    def embedded(self, ids: NDArray[np.int32]) -> NDArray[np.float32]:
        """float32 [ids, d_model]: only the rows of the ids that occur are read."""
        found, places = np.unique(ids, return_inverse=True)
        rows = [self._checkpoint.rows(self._embedding, int(row), 1) for row in found]
        return np.concatenate(rows)[places]

    def load(self, number: int) -> Run:
        """Read a layer in the place of the last one: the function that it computes, of hidden states [T, d_model]."""
        linear, tensors = number in self._linear, self._tensors[number]
        if linear not in self._modules:
            self._modules[linear] = self._module(number, tensors)
        module = self._modules[linear]
        parameters = dict(module.named_parameters())
        for name, tensor in tensors.items():
            torch_model.read_into(self._checkpoint, tensor, parameters[name])
        torch, _ = torch_model.library()

        def run(states: NDArray[np.float32]) -> NDArray[np.float32]:
            given = torch.from_numpy(states)[None]  # (1, T, C)
            with torch.inference_mode():
                out = module(inputs_embeds=given, use_cache=False).last_hidden_state
            return out[0].numpy()  # type: ignore[no-any-return]

        return run

    def module(self, number: int) -> Any:
        """The layer that was loaded last, as `number`."""
        return self._modules[number in self._linear].layers[0]

    def norm(self) -> Run:
        """The last norm, of hidden states [T, d_model]."""
        torch, _ = torch_model.library()
        with building(CheckpointError, self._checkpoint.path, AGAIN):
            norm = torch_model.empty(self._settings(0)).model.norm
        torch_model.fill(norm, {"weight": torch_model.read_all(self._checkpoint, [self._final])[self._final.name]})

        def run(states: NDArray[np.float32]) -> NDArray[np.float32]:
            with torch.inference_mode():
                return norm(torch.from_numpy(states)[None])[0].numpy()  # type: ignore[no-any-return]

        return run

    def _settings(self, number: int) -> Any:
        """Of a model of this layer alone."""
        kinds: list[str] | None = getattr(torch_model.settings(self._checkpoint.config), "layer_types", None)
        own = {"layer_types": [kinds[number]]} if kinds else {}
        return torch_model.settings(self._checkpoint.config, num_hidden_layers=1, **own)

    def _module(self, number: int, tensors: Mapping[str, TensorSpec]) -> Any:
        """A decoder of one layer without embeddings and last norm, whose parameters lie in the common memory."""
        torch, _ = torch_model.library()
        with building(CheckpointError, self._checkpoint.path, AGAIN):
            decoder = torch_model.empty(self._settings(number)).model
        decoder.embed_tokens, decoder.norm = torch.nn.Identity(), torch.nn.Identity()
        parameters, at = {}, 0
        for name, tensor in tensors.items():
            parameters[name] = self._memory[at : at + tensor.weights].view(tensor.shape)
            at += _aligned(tensor.weights)
        torch_model.fill(decoder, parameters)
        return decoder


def _check_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise OutputError(
            f"{folder}: hidden states between layers need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free. "
            "Make room, or score fewer windows."
        )


def _floats(tensors: Mapping[str, TensorSpec]) -> int:
    return sum(_aligned(tensor.weights) for tensor in tensors.values())


def _aligned(floats: int) -> int:
    return -(-floats // ALIGNED) * ALIGNED
