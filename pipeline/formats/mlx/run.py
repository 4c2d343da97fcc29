"""An MLX folder as a runtime: in MLX on Apple Silicon, elsewhere scored by float32 torch on its dequantized weights.

MLX's kernels for other CPUs are slow, and in 16 bits off by up to 0.16 nats: there they check in float32 what torch
computes, and their speed is no one's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError, ParamsError, suggestion
from pipeline.formats import memory_problem, refuse_settings
from pipeline.formats.mlx import engine, reader
from pipeline.formats.mlx.arguments import as_read
from pipeline.formats.mlx.arrange import restored
from pipeline.formats.mlx.native import KV_TYPES, MlxModel
from pipeline.formats.mlx.reader import MlxFolder
from pipeline.models import text_config
from pipeline.models.numbers import kv_bytes, state_bytes
from pipeline.runtimes import Messages, Prompt, Reply, Scorer
from pipeline.torch_runtime import TorchRuntime, of_tensors
from pipeline.types import Artifact, Engine

DEVICES = ("auto", "cpu")
KV_STEP = 256  # mlx-lm's caches grow by so many positions
SCORED_BY = "transformers on dequantized MLX weights"


def open_runtime(folder: Path, artifact: Artifact, **settings: Any) -> MlxRuntime:
    """The artifact whose files are in `folder`; `settings` are MlxRuntime's.

    Raises:
        ParamsError, ArtifactError, PipelineError: as MlxRuntime.
    """
    return MlxRuntime(folder, **settings)


def check_settings(kv_type: str, flash_attention: bool | None, device: str = "auto") -> None:
    """Refuse what mlx-lm has no choice of.

    Raises:
        ParamsError: a KV type or flash attention other than the defaults, or an unknown device.
    """
    refuse_settings(kv_type, flash_attention, "MLX variants have a cache of their own float type and MLX's attention")
    if device not in DEVICES:
        raise ParamsError(f"device {device!r} does not exist; {suggestion(device, DEVICES)}")


def unrepresentative(device: str) -> str | None:
    """Why a speed measured here says nothing to users; None where it does."""
    return None if _on_gpu(device) else "MLX on a CPU is not what its users run"


def context_length(folder: Path, artifact: Artifact) -> int:
    """Tokens of the longest context that the artifact's model was trained for.

    Raises:
        ArtifactError: as reader.read.
        PipelineError: MLX or mlx-lm is not installed.
    """
    engine.lm()  # whoever times the opening of a runtime asks for this first
    return reader.read(folder).spec.context_length


def unmeasurable() -> str | None:
    """Why nothing can be timed on this machine; None where it can."""
    return None


def check_window(scheme: object, window: int) -> None:
    """Refuse windows longer than the artifacts of a scheme will take: they take any."""


def check_lengths(folder: Path, artifact: Artifact, window: int, conversation: int = 0) -> None:
    """Refuse windows and conversations longer than the artifact takes: it takes any."""


def unscorable(weights: int) -> str | None:
    """Why an artifact of so many weights cannot be scored on this machine: torch holds them all. None where it can."""
    return None if _on_gpu("auto") else memory_problem(weights)


def _on_gpu(device: str) -> bool:
    return device == "auto" and engine.has_gpu()


class MlxRuntime:
    """Runtime of one folder. `threads` are those of torch, 0 leaves them to it. MLX's cache grows as it is needed:
    `context` only says for how many tokens `kv_bytes` is.

    On Apple Silicon the model is loaded at once. Elsewhere two engines take turns: weights are read when the first
    logits or times are asked for.

    Raises:
        ParamsError: settings that MLX has no choice of.
        ArtifactError: not an MLX folder, or mlx-lm does not load it.
        PipelineError: MLX is not installed.
    """

    def __init__(
        self,
        folder: Path,
        *,
        context: int,
        threads: int = 0,
        flash_attention: bool | None = False,
        kv_type: str = "f16",
        device: str = "auto",
    ) -> None:
        check_settings(kv_type, flash_attention, device)
        self._source: MlxFolder = reader.read(folder)
        self._threads = threads
        self._context = context
        self._device = "gpu" if _on_gpu(device) else "cpu"
        self.vocab_size = self._source.spec.vocab_size
        if self._device == "gpu":
            _ = self._mlx

    @property
    def engine(self) -> Engine:
        """What scores."""
        return self._scorer.engine

    @property
    def native(self) -> Scorer | None:
        """MLX in float32 where torch scores, which it takes the place of in memory; `prefill` and `decode` are its."""
        if self._device == "gpu":
            return None
        self.__dict__.pop("_torch", None)
        return self._mlx

    @property
    def kv_bytes(self) -> int:
        """See Runtime."""
        spec, value = self._source.spec, KV_TYPES[self._mlx.engine.kv_type]
        tokens = -(-self._context // KV_STEP) * KV_STEP
        return kv_bytes(spec, tokens, value) + state_bytes(spec, value.block_bytes)

    @cached_property
    def _mlx(self) -> MlxModel:
        return MlxModel(self._source.path, self._device)

    @cached_property
    def _torch(self) -> TorchRuntime:
        read = text_config(as_read(self._source.config))  # transformers' own defaults are others
        kept = {key: value for key, value in read.items() if not key.startswith("quantization")}
        weights = dict(restored(self._source.spec, lambda name: reader.whole(self._source.tensors[name])))
        return of_tensors(self._source.path, kept, weights, SCORED_BY, self._threads)

    @property
    def _scorer(self) -> MlxModel | TorchRuntime:
        return self._mlx if self._device == "gpu" else self._torch

    @cached_property
    def _tokenizer(self) -> Any:
        return engine.load_tokenizer(self._source.path)

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """See Runtime."""
        return self._scorer.score(ids, start)

    def prefill(self, ids: NDArray[np.int32]) -> float:
        """See Runtime."""
        return self._mlx.prefill(ids)

    def decode(self, n: int) -> float:
        """See Runtime."""
        return self._mlx.decode(n)

    def peak_memory(self) -> tuple[int, str] | None:
        """See Runtime."""
        if self._device == "cpu":
            return None
        return int(engine.core().get_peak_memory()), "mlx.core.get_peak_memory"

    def placement(self) -> None:
        """See Runtime: MLX computes where it is told."""

    def prompt(self, messages: Messages) -> Prompt | None:
        """See Runtime. Rendered as mlx_lm.generate renders it.

        Raises:
            ArtifactError: the template fails.
        """
        from jinja2 import TemplateError

        tokenizer = self._tokenizer
        if not tokenizer.has_chat_template:
            return None
        try:
            text = tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True)
        except (TemplateError, ValueError) as error:
            raise ArtifactError(
                f"{self._source.path}: its chat template fails on a plain question ({error}). Convert it again."
            ) from error
        return Prompt(str(text), tuple(tokenizer.encode(text, add_special_tokens=False)))

    def reply(self, ids: Sequence[int], limit: int) -> Reply:
        """See Runtime. It ends where mlx_lm.generate would."""
        stop_ids = {*self._tokenizer.eos_token_ids}
        found = self._scorer.greedy(ids, limit, stop_ids)
        stopped = found[-1] in stop_ids
        said = self._decoded(found[:-1] if stopped else found)
        return Reply(tuple(found), said, self._decoded(found[-1:]) if stopped else None)

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out."""
        return str(self._tokenizer.decode([*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False))

    def close(self) -> None:
        for loaded in ("_torch", "_mlx"):
            self.__dict__.pop(loaded, None)
        engine.core().clear_cache()
