"""What Core ML tests make up: a model without weights, and coremltools' MLModel and MLComputePlan."""

from __future__ import annotations

import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.formats.coreml import calls, engine, native
from pipeline.formats.coreml.plan import Sizes

VOCAB = 40
SIZES = Sizes(chunk=8, max_context=50, score_window=24)


def row(seen: NDArray[np.int32]) -> NDArray[np.float16]:
    """Logits [vocab] behind tokens."""
    return np.random.default_rng([len(seen), *seen.tolist()]).standard_normal(VOCAB).astype(np.float16)


@dataclass
class Toy:
    """Called as a package's functions are: its logits depend on every token before, and on nothing else. It refuses
    what Core ML would: other types, shapes or positions than the functions have.

    `calls` are the functions and inputs that it got, `states` the states that it made."""

    calls: list[tuple[str, dict[str, NDArray[np.int32]], Any]] = field(default_factory=list)
    states: list[NDArray[np.int32]] = field(default_factory=list)

    def new_state(self) -> NDArray[np.int32]:
        self.states.append(np.full(SIZES.cache, -1, np.int32))
        return self.states[-1]

    def logits(self, function: str, inputs: Mapping[str, NDArray[np.int32]], state: Any = None) -> NDArray[np.float16]:
        self.calls.append((function, {**inputs}, state))
        assert {value.dtype for value in inputs.values()} == {np.dtype(np.int32)}
        shapes = {name: value.shape for name, value in inputs.items()}
        if function == "score":
            assert shapes == {"input_ids": (1, SIZES.score_window)}
            assert state is None
            return np.stack([row(inputs["input_ids"][0, : i + 1]) for i in range(SIZES.score_window)])[None]
        assert any(state is made for made in self.states)
        ids, (at,) = inputs["input_ids"][0], inputs["position"].tolist()
        if function == "decode":
            assert shapes == {"input_ids": (1, 1), "position": (1,)}
            length = 1
        else:
            assert function == "prefill"
            assert shapes == {"input_ids": (1, SIZES.chunk), "position": (1,), "length": (1,)}
            (length,) = inputs["length"].tolist()
            assert 1 <= length <= SIZES.chunk
        state[at : at + len(ids)] = ids
        seen = state[: at + length]
        assert (seen >= 0).all()
        return row(seen)[None, None]


def prompt(tokens: int, seed: int = 0) -> NDArray[np.int32]:
    return np.random.default_rng(seed).integers(1, VOCAB, tokens).astype(np.int32)


def expected_reply(ids: NDArray[np.int32], limit: int) -> list[int]:
    """The most likely tokens behind `ids`."""
    seen = [*ids.tolist()]
    while len(seen) < len(ids) + limit:
        seen.append(int(row(np.array(seen)).argmax()))
    return seen[len(ids) :]


class FakeMLModel:
    """coremltools.models.MLModel as far as it is called: `model` computes. `loaded` are its instances; `fails` says of
    a function what loading it warns of, or what its prediction raises.
    """

    loaded: list[FakeMLModel]
    model: calls.Model
    fails: dict[str, Exception | str]

    def __init__(self, model: str, compute_units: Any, function_name: str) -> None:
        if isinstance(message := self.fails.get(function_name), str):
            warnings.warn(message, RuntimeWarning, stacklevel=1)  # as coremltools does
        self.path, self.units, self.function = model, compute_units.name, function_name
        self.loaded.append(self)

    def get_compiled_model_path(self) -> str:
        if "too new" in self.fails:
            raise Exception("This model was not loaded or compiled with the Core ML Framework.")
        return f"/compiled/{self.function}.mlmodelc"

    def make_state(self) -> Any:
        return self.model.new_state()

    def predict(self, data: dict[str, Any], state: Any = None) -> dict[str, Any]:
        if isinstance(error := self.fails.get(self.function), Exception):
            raise error
        return {"logits": self.model.logits(self.function, data, state)}


CPU, GPU, NE = "MLCPUComputeDevice", "MLGPUComputeDevice", "MLNeuralEngineComputeDevice"


class FakePlan:
    """MLComputePlan, of the class of device that each operation of a function prefers: None of a constant."""

    def __init__(self, devices: dict[str, list[str | None]]) -> None:
        functions = {
            name: SimpleNamespace(block=SimpleNamespace(operations=preferred)) for name, preferred in devices.items()
        }
        self.model_structure = SimpleNamespace(program=SimpleNamespace(functions=functions))

    def get_compute_device_usage_for_mlprogram_operation(self, operation: str | None) -> Any:
        from coremltools.models import compute_device

        if operation is None:
            return None
        device = object.__new__(getattr(compute_device, operation))
        return SimpleNamespace(preferred_compute_device=device, supported_compute_devices=[device])


def pretend_mac(
    monkeypatch: pytest.MonkeyPatch, model: calls.Model, devices: dict[str, list[str | None]]
) -> list[tuple[str, str]]:
    """Have `model` compute as MLModel, and plans place operations on `devices`; the paths and units that plans are
    asked for.
    """
    engine.tools()
    from coremltools.models.compute_plan import MLComputePlan

    asked: list[tuple[str, str]] = []

    def load(path: str, units: Any) -> FakePlan:
        asked.append((path, units.name))
        return FakePlan(devices)

    FakeMLModel.loaded, FakeMLModel.model, FakeMLModel.fails = [], model, {}
    monkeypatch.setattr(engine.tools().models, "MLModel", FakeMLModel)
    monkeypatch.setattr(MLComputePlan, "load_from_path", load)
    monkeypatch.setattr(native, "missing", lambda: None)
    monkeypatch.setattr(platform, "mac_ver", lambda: ("15.5", ("", "", ""), "arm64"))
    return asked
