"""What the matrices of a model are multiplied with: sums of squares of each input, gathered while torch computes.

llama-imatrix sums the same (tools/imatrix/imatrix.cpp of llama.cpp, collect_imatrix): over every position of a window,
and of experts over the tokens that are routed to each.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.errors import MeasurementError, listed, some
from pipeline.progress import Advance, silent
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_layers import final_states, is_larger
from pipeline.torch_runtime import checked, of_checkpoint
from pipeline.types import Sums, TensorSpec, Windows

WITHOUT = {"embed", "head", "delta_conv"}
"""Matrices by role that llama.cpp multiplies with nothing, or of which llama-imatrix takes no sums."""


def is_summed(tensor: TensorSpec) -> bool:
    """Whether sums are taken of what a tensor is multiplied with."""
    return len(tensor.shape) > 1 and tensor.role not in WITHOUT


GATE_UP, DOWN = "expert_gate_up", "expert_down"


@dataclass
class _Running:
    """Sums float64 [matrices, columns] and tokens int64 [matrices], torch's, of one tensor."""

    sums: Any
    tokens: Any


class Watch:
    """Sums of squares over whatever runs while it looks on, in float64, by the name of the tensor.

    `tensors` are a model's, of which it takes the matrices.
    """

    def __init__(self, tensors: Iterable[TensorSpec]) -> None:
        import torch

        self._torch = torch
        self._tensors = [tensor for tensor in tensors if is_summed(tensor)]
        self._running: dict[str, _Running] = {}

    @contextmanager
    def on(self, module: Any, at: str = "") -> Iterator[None]:
        """Looks on while `module` runs: the whole model, or the part of it that bears the name `at`, as
        'model.layers.3'.
        """
        prefix = f"{at}." if at else ""
        with ExitStack() as hooks:
            for tensor in self._tensors:
                if tensor.name.startswith(prefix):
                    part = module.get_submodule(tensor.name.removeprefix(prefix).rpartition(".")[0])
                    hook = self._hook(tensor)
                    hooks.callback(part.register_forward_pre_hook(hook, with_kwargs=True).remove)
            yield

    def found(self) -> dict[str, Sums]:
        """What was summed until now.

        Raises:
            MeasurementError: sums that are not finite.
        """
        found = {name: Sums(run.sums.numpy(), run.tokens.numpy()) for name, run in self._running.items()}
        wrong = [name for name, sums in found.items() if not np.isfinite(sums.sums.astype(np.float32)).all()]
        if wrong:
            raise MeasurementError(
                "the squares of inputs are not finite, or too large for float32:\n"
                f"{listed(some(wrong, 'matrices'))}\nIs the checkpoint whole?"
            )
        return found

    def _hook(self, tensor: TensorSpec) -> Any:
        if tensor.role not in {GATE_UP, DOWN}:
            return lambda module, args, kwargs: self._all(tensor, [*args, *kwargs.values()][0])

        def experts(module: Any, args: Any, kwargs: Any) -> None:
            names = ("hidden_states", "top_k_index")
            given = dict(zip(names, args, strict=False)) | kwargs
            self._routed(tensor, module, *(given[name] for name in names))

        return experts

    def _all(self, tensor: TensorSpec, inputs: Any) -> None:
        """Adds all rows of inputs (…, C)."""
        run = self._of(tensor, 1)
        rows = inputs.reshape(-1, inputs.shape[-1])  # (T, C)
        run.sums[0] += self._squares(rows)
        run.tokens[0] += len(rows)

    def _routed(self, tensor: TensorSpec, module: Any, hidden: Any, chosen: Any) -> None:
        """Adds to each expert the rows of hidden (T, C) that `chosen` (T, used) routes to it; what the down projection
        is given is computed here as the module does, which keeps it to itself.
        """
        run = self._of(tensor, tensor.shape[0])
        flat = chosen.reshape(-1)
        order = flat.argsort(stable=True) // chosen.shape[-1]  # tokens, those of an expert together
        counts = self._torch.bincount(flat, minlength=tensor.shape[0])
        for expert, tokens in enumerate(order.split(counts.tolist())):
            if len(tokens):
                rows = hidden[tokens]
                if tensor.role == DOWN:
                    gate, up = self._torch.nn.functional.linear(rows, module.gate_up_proj[expert]).chunk(2, dim=-1)
                    rows = module.act_fn(gate) * up
                run.sums[expert] += self._squares(rows)
        run.tokens += counts

    def _of(self, tensor: TensorSpec, matrices: int) -> _Running:
        if tensor.name not in self._running:
            zeros = self._torch.zeros((matrices, tensor.shape[-1]), dtype=self._torch.float64)
            self._running[tensor.name] = _Running(zeros, self._torch.zeros(matrices, dtype=self._torch.int64))
        return self._running[tensor.name]

    def _squares(self, rows: Any) -> Any:
        return rows.double().square_().sum(0)  # (C,)


def gather(
    checkpoint: Checkpoint, windows: Windows, scratch: Path, advance: Advance = silent, layer_by_layer: bool = False
) -> dict[str, Sums]:
    """Sums over all positions of `windows`, of every matrix of a checkpoint in float32; `advance` is told of windows.

    It is computed layer by layer where it is asked for, or where the model is larger than memory: the same bits, with a
    file in the folder `scratch`.

    Raises:
        CheckpointError: the checkpoint is not whole.
        MeasurementError: sums that are not finite.
    """
    spec = checked(checkpoint)
    watch = Watch(spec.tensors)
    if layer_by_layer or is_larger(spec):
        with final_states(checkpoint, spec, windows, scratch, advance, watch.on):
            return watch.found()
    runtime = of_checkpoint(checkpoint)
    with watch.on(runtime.model):
        for ids in windows.ids:
            runtime.hidden(ids, 0)
            advance(1)
    return watch.found()
