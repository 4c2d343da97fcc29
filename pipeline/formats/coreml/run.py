"""A Core ML folder as a runtime: in Core ML on a Mac, elsewhere scored by the reference executor.

The executor computes what the saved program says, in the types that it declares. How fast it does says nothing of Core
ML, so off a Mac nothing is timed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError, MeasurementError, ParamsError, PipelineError, suggestion
from pipeline.files import read_object
from pipeline.formats import memory_problem, refuse_settings
from pipeline.formats.coreml import calls, engine, manifest, native
from pipeline.formats.coreml.calls import Inputs
from pipeline.formats.coreml.executor import Executor
from pipeline.formats.coreml.graph import DECODE, INPUT_IDS, LOGITS, PREFILL, SCORE
from pipeline.formats.coreml.native import CoremlModel
from pipeline.formats.coreml.package import PACKAGE, Package
from pipeline.formats.coreml.plan import SCORE_WINDOW, Sizes
from pipeline.formats.coreml.program import Rounding
from pipeline.formats.coreml.schemes import Scheme
from pipeline.runtimes import REFERENCE_EXECUTOR, Messages, Placement, Prompt, Reply
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import rendered
from pipeline.torch_runtime import instruction_set
from pipeline.types import Artifact, Engine

DEVICES = (*native.UNITS,)
KV_BYTES = 2  # float16
CONFIG = "config.json"


def open_runtime(folder: Path, artifact: Artifact, **settings: Any) -> CoremlRuntime:
    """The artifact whose files are in `folder`; `settings` are CoremlRuntime's.

    Raises:
        ParamsError, ArtifactError, PipelineError: as CoremlRuntime.
    """
    return CoremlRuntime(folder, **settings)


def check_settings(kv_type: str, flash_attention: bool | None, device: str = "auto") -> None:
    """Refuse what Core ML has no choice of.

    Raises:
        ParamsError: a KV type or flash attention other than the defaults, or an unknown device.
    """
    refuse_settings(kv_type, flash_attention, "Core ML variants have a float16 state and Core ML's attention")
    if device not in DEVICES:
        raise ParamsError(f"device {device!r} does not exist; {suggestion(device, DEVICES)}")


def check_window(scheme: Scheme, window: int) -> None:
    """Refuse windows longer than the packages of a scheme will take, in tokens.

    Raises:
        ParamsError: as it says.
    """
    if problem := calls.window_problem(scheme.asked.score_window or SCORE_WINDOW, window):
        raise ParamsError(f"coreml {scheme.name}: {problem}")


def check_lengths(folder: Path, artifact: Artifact, window: int, conversation: int = 0) -> None:
    """Refuse windows and conversations longer than the package takes, in tokens.

    Raises:
        ParamsError: as it says.
        ArtifactError: no package of ours.
    """
    sizes = described(Package(folder / PACKAGE)).sizes
    problems = (calls.window_problem(sizes.score_window, window), calls.conversation_problem(sizes, conversation))
    for problem in filter(None, problems):
        raise ParamsError(f"{folder}: {problem}")


def unscorable(weights: int) -> str | None:
    """Why an artifact of so many weights cannot be scored on this machine: off a Mac the executor holds them all. None
    where it can.
    """
    return memory_problem(weights) if native.missing() else None


def unrepresentative(device: str) -> str | None:
    """Why a speed measured here says nothing to users; where Core ML runs, its users run it."""
    return None


def unmeasurable() -> str | None:
    """Why nothing can be timed on this machine; None where it can."""
    return native.missing()


def context_length(folder: Path, artifact: Artifact) -> int:
    """Tokens of the longest conversation that the package holds.

    Raises:
        ArtifactError: no package of ours.
    """
    return described(Package(folder / PACKAGE)).sizes.max_context


@dataclass(frozen=True)
class Described:
    """What a package says of itself; `kv_bytes` are those of its state."""

    sizes: Sizes
    vocab_size: int
    kv_bytes: int


def described(package: Package) -> Described:
    """By its functions and its metadata.

    Raises:
        ArtifactError: a function or the length of a conversation is missing.
    """
    widths = {}
    for name in (PREFILL, SCORE):
        shapes = {tensor.name: tensor.shape for tensor in package.function(name).inputs}
        widths[name] = shapes.get(INPUT_IDS, ())[-1:]
    decode = package.function(DECODE)
    said = package.model.description.metadata.userDefined.get(manifest.MAX_CONTEXT, "")
    if not (all(widths.values()) and said.isdecimal()):
        raise ArtifactError(
            f"{package.path}: expected token ids as `{INPUT_IDS}` and the length of a conversation as the metadata "
            f"{manifest.MAX_CONTEXT}, found {said!r}. Convert again."
        )
    return Described(
        sizes=Sizes(widths[PREFILL][0], int(said), widths[SCORE][0]),
        vocab_size=decode.outputs[0].shape[-1],
        kv_bytes=sum(prod(state.shape) for state in decode.states) * KV_BYTES,
    )


class Executed:
    """A calls.Model by the reference executor in a rounding, each function read when it is first used.

    Raises:
        PipelineError: torch is not installed.
    """

    def __init__(self, package: Package, threads: int = 0, rounding: Rounding = "declared") -> None:
        try:
            import torch
        except ImportError as error:
            raise PipelineError(f"the {REFERENCE_EXECUTOR} needs torch ({error}). {engine.INSTALL}") from error
        if threads:
            torch.set_num_threads(threads)
        self._package = package
        self._rounding: Rounding = rounding
        self._functions: dict[str, Executor] = {}
        self.engine = Engine(
            name=REFERENCE_EXECUTOR,
            version=f"torch {torch.__version__}",
            instruction_set=instruction_set(),
            device="cpu",
            kv_type="f16" if rounding == "declared" else "f32",
            flash_attention="off",
            threads=torch.get_num_threads(),
        )

    def new_state(self) -> Any:
        """See calls.Model."""
        return self._function(PREFILL).new_state()

    def logits(self, function: str, inputs: Inputs, state: Any = None) -> NDArray[Any]:
        """See calls.Model."""
        return self._function(function)(inputs, state)[LOGITS]

    def _function(self, name: str) -> Executor:
        if name not in self._functions:
            self._functions[name] = Executor(self._package, name, self._rounding)
        return self._functions[name]


class CoremlRuntime:
    """Runtime of one folder. A package's sizes are fixed, so `context` changes nothing. `threads` are the executor's, 0
    leaves them to it. device is auto, cpu, gpu (and cpu), ne (the Neural Engine, and cpu) or all.

    Raises:
        ParamsError: settings that Core ML has no choice of.
        ArtifactError: no package of ours, or Core ML does not load it.
        PipelineError: coremltools is not installed.
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
        self._folder = folder
        package = Package(folder / PACKAGE)
        found = described(package)
        self._sizes = found.sizes
        self.vocab_size, self.kv_bytes = found.vocab_size, found.kv_bytes
        self.native = None  # it is, or there is none here
        self._model: CoremlModel | Executed
        if native.missing() is None:
            self._model = CoremlModel(package.path, found.sizes, found.vocab_size, device)
        else:
            self._model = Executed(package, threads)
        self.engine = self._model.engine

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self._folder)

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """See Runtime."""
        return calls.score(self._model, self._sizes, ids, start)

    def prefill(self, ids: NDArray[np.int32]) -> float:
        """See Runtime."""
        return self._timed.prefill(ids)

    def decode(self, n: int) -> float:
        """See Runtime."""
        return self._timed.decode(n)

    def peak_memory(self) -> None:
        """See Runtime: Core ML does not say."""

    def placement(self) -> Placement | None:
        """See Runtime."""
        return self._model.placement() if isinstance(self._model, CoremlModel) else None

    @property
    def _timed(self) -> CoremlModel:
        if not isinstance(self._model, CoremlModel):
            raise MeasurementError(
                f"{self._folder} cannot be timed here: Core ML {native.missing()}, and the reference executor's speed "
                "is not Core ML's. Time it on a Mac: `quantgate benchmark` needs nothing but this folder."
            )
        return self._model

    def prompt(self, messages: Messages) -> Prompt | None:
        """See Runtime. Rendered as transformers renders it by the folder's own files, as swift-transformers does.

        Raises:
            TokenizerError: the template fails.
        """
        if self._tokenizer.chat_template is None:
            return None
        text = rendered(self._folder, messages)
        return Prompt(text, tuple(self._tokenizer.encode(text, add_special=False).tolist()))

    def reply(self, ids: Sequence[int], limit: int) -> Reply:
        """See Runtime. By `prefill`, `decode` and their state.

        Raises:
            MeasurementError: the context has no room for both.
        """
        stop_ids = self._tokenizer.stop_ids(read_object(self._folder / CONFIG, ArtifactError))
        found = calls.greedy(self._model, self._sizes, ids, limit, stop_ids)
        stopped = found[-1] in stop_ids
        said = self._tokenizer.decode(found[:-1] if stopped else found)
        return Reply(tuple(found), said, self._tokenizer.decode(found[-1:]) if stopped else None)

    def close(self) -> None:
        del self._model
