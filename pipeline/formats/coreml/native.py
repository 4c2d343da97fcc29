"""A package in Core ML itself, on a Mac, by coremltools' MLModel: logits, prefill and decode times, placement."""

from __future__ import annotations

import platform
import sys
import time
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.errors import ArtifactError, MeasurementError
from pipeline.formats.coreml import engine
from pipeline.formats.coreml.calls import Conversation, Inputs
from pipeline.formats.coreml.graph import DECODE, LOGITS, PREFILL
from pipeline.formats.coreml.plan import Sizes
from pipeline.runtimes import Placement
from pipeline.types import Engine

MACOS = 15  # the first that has states

UNITS = {"auto": "ALL", "cpu": "CPU_ONLY", "gpu": "CPU_AND_GPU", "ne": "CPU_AND_NE", "all": "ALL"}
"""coremltools.ComputeUnit by the names of devices."""

ALLOWED = {"auto": "all", "cpu": "cpu", "gpu": "cpu+gpu", "ne": "cpu+ne", "all": "all"}
"""What an Engine calls them: the units that Core ML may use."""

KINDS = {
    "cpu": "MLCPUComputeDevice",
    "gpu": "MLGPUComputeDevice",
    "neural_engine": "MLNeuralEngineComputeDevice",
}
"""Classes of coremltools.models.compute_device by the names of units."""

NEXT_STEP = (
    "Convert it again, or take another --device or scheme: pal4 packages with a state, as coremltools 9.0 writes them, "
    "are known to fail (error -14, or a crash after 100 to 200 tokens)."
)


def missing() -> str | None:
    """What this machine lacks to run a package; None where it lacks nothing."""
    if sys.platform != "darwin":
        return "needs macOS"
    found = int(platform.mac_ver()[0].partition(".")[0])
    return None if found >= MACOS else f"needs macOS {MACOS}"


class CoremlModel:
    """A calls.Model that is timed. Each function is a model of its own to Core ML, compiled and loaded when it is first
    used, but `prefill` and `decode` at once: a cold start times the opening.

    Raises:
        ArtifactError: Core ML does not load it.
    """

    def __init__(self, path: Path, sizes: Sizes, vocab_size: int, device: str) -> None:
        self._path = path
        self._sizes = sizes
        self._units: Any = engine.tools().ComputeUnit[UNITS[device]]
        self._models = {function: self._loaded(function) for function in (PREFILL, DECODE)}
        self._conversation: Conversation | None = None
        self.vocab_size = vocab_size
        self.engine = Engine(
            name="Core ML",
            version=f"{engine.version()}, macOS {platform.mac_ver()[0]}",
            instruction_set=platform.machine(),
            device=ALLOWED[device],
            kv_type="f16",
            flash_attention="auto",
            threads=None,
            batch=sizes.chunk,
        )

    def prefill(self, ids: NDArray[np.int32]) -> float:
        """See Runtime."""
        begin = time.perf_counter()
        self._conversation = Conversation(self, self._sizes)
        self._conversation.take_in(ids)
        return time.perf_counter() - begin

    def decode(self, n: int) -> float:
        """See Runtime. The tokens are arbitrary: their values do not change the work."""
        if self._conversation is None:
            self._conversation = Conversation(self, self._sizes)
        begin = time.perf_counter()
        for i in range(n):
            self._conversation.step(i % self.vocab_size)
        return time.perf_counter() - begin

    def placement(self) -> Placement:
        """See Runtime: of the operations that Core ML says a unit of; constants have none. All are 0 of a function of
        which it says nothing.

        Raises:
            MeasurementError: Core ML makes no plan.
        """
        try:
            from coremltools.models.compute_plan import MLComputePlan

            compiled = self._models[PREFILL].get_compiled_model_path()
            plan = MLComputePlan.load_from_path(compiled, self._units)
            functions = plan.model_structure.program.functions
            usages = {
                function: [
                    plan.get_compute_device_usage_for_mlprogram_operation(operation)
                    for operation in functions[function].block.operations
                ]
                for function in (PREFILL, DECODE)
            }
            return {function: _shares([usage for usage in found if usage]) for function, found in usages.items()}
        except Exception as error:  # the framework's errors have no class of their own
            raise MeasurementError(f"Core ML makes no plan of {self._path}: {_said(error)}\n{NEXT_STEP}") from error

    def new_state(self) -> Any:
        """See calls.Model.

        Raises:
            MeasurementError: Core ML makes none.
        """
        try:
            return self._models[PREFILL].make_state()
        except Exception as error:  # as above
            raise MeasurementError(f"Core ML makes no state for {self._path}: {_said(error)}\n{NEXT_STEP}") from error

    def logits(self, function: str, inputs: Inputs, state: Any = None) -> NDArray[Any]:
        """See calls.Model.

        Raises:
            ArtifactError: Core ML does not load the function.
            MeasurementError: it fails at it.
        """
        if function not in self._models:
            self._models[function] = self._loaded(function)
        try:
            return np.asarray(self._models[function].predict({**inputs}, state=state)[LOGITS])
        except Exception as error:  # as above
            raise MeasurementError(
                f"Core ML fails at {function} of {self._path}: {_said(error)}\n{NEXT_STEP}"
            ) from error

    def _loaded(self, function: str) -> Any:
        models = engine.tools().models
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("error", RuntimeWarning)  # coremltools only warns of what does not load
                model = models.MLModel(str(self._path), compute_units=self._units, function_name=function)
            model.get_compiled_model_path()  # nor does it tell of a package that is too new for this macOS
            return model
        except Exception as error:  # as above
            raise ArtifactError(
                f"Core ML cannot load {function} of {self._path}: {_said(error)}\n{NEXT_STEP}"
            ) from error


def _shares(usages: Sequence[Any]) -> dict[str, float]:
    """The share of each unit, in the order of KINDS."""
    from coremltools.models import compute_device

    kinds = {unit: getattr(compute_device, kind) for unit, kind in KINDS.items()}
    found = Counter(
        next(unit for unit, kind in kinds.items() if isinstance(usage.preferred_compute_device, kind))
        for usage in usages
    )
    return {unit: found[unit] / max(1, len(usages)) for unit in kinds}


def _said(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
