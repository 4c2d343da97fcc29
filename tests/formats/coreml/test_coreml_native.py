"""Core ML on a Mac, in all but the framework's own calls: MLModel and MLComputePlan are made up."""

from __future__ import annotations

import platform
import sys
from pathlib import Path

import numpy as np
import pytest
from coreml_fakes import CPU, GPU, NE, SIZES, VOCAB, FakeMLModel, Toy, expected_reply, pretend_mac, prompt

from pipeline.errors import ArtifactError, MeasurementError
from pipeline.formats.coreml import calls, native
from pipeline.formats.coreml.native import CoremlModel


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Toy:
    """What the made-up MLModels compute."""
    toy = Toy()
    pretend_mac(monkeypatch, toy, {})
    return toy


PATH = Path("/some/folder")


def opened(device: str = "auto") -> CoremlModel:
    return CoremlModel(PATH, SIZES, VOCAB, device)


@pytest.mark.parametrize(
    ("device", "units", "said"),
    [
        ("auto", "ALL", "all"),
        ("all", "ALL", "all"),
        ("cpu", "CPU_ONLY", "cpu"),
        ("gpu", "CPU_AND_GPU", "cpu+gpu"),
        ("ne", "CPU_AND_NE", "cpu+ne"),
    ],
)
def test_each_function_is_a_model_on_the_units_asked_for(device: str, units: str, said: str, toy: Toy) -> None:
    model = opened(device)
    assert [(m.path, m.function, m.units) for m in FakeMLModel.loaded] == [
        (str(PATH), function, units) for function in ("prefill", "decode")
    ]
    [*calls.score(model, SIZES, prompt(20), 10)]
    [*calls.score(model, SIZES, prompt(20), 10)]
    assert [(m.function, m.units) for m in FakeMLModel.loaded[2:]] == [("score", units)]
    assert (model.engine.name, model.engine.device, model.engine.kv_type) == ("Core ML", said, "f16")
    assert model.engine.version == "coremltools 9.0, macOS 15.5"
    assert (model.engine.batch, model.engine.flash_attention) == (8, "auto")


def test_a_prefill_is_a_fresh_state_and_its_chunks(toy: Toy) -> None:
    model = opened()
    ids = prompt(19)
    assert 0 < model.prefill(ids) < 10
    assert 0 < model.decode(4) < 10
    assert 0 < model.prefill(ids[:3]) < 10
    seen = [
        (function, *(inputs[key].tolist() for key in ("position", "length") if key in inputs))
        for function, inputs, _ in toy.calls
    ]
    assert seen == [
        *[("prefill", [0], [8]), ("prefill", [8], [8]), ("prefill", [16], [3])],
        *[("decode", [at]) for at in (19, 20, 21, 22)],
        ("prefill", [0], [3]),
    ]
    assert len(toy.states) == 2
    assert [state is toy.states[0] for *_, state in toy.calls] == [True] * 7 + [False]
    assert toy.states[0][:23].tolist() == [*ids.tolist(), 0, 1, 2, 3]


def test_replies_are_the_most_likely(toy: Toy) -> None:
    ids = prompt(13)
    assert calls.greedy(opened(), SIZES, [*ids], 9, ()) == expected_reply(ids, 9)


# Placement


def test_placement_is_the_share_of_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = {"score": [CPU], "prefill": [None, NE, NE, GPU, None, CPU], "decode": [CPU, CPU, None, GPU, GPU]}
    asked = pretend_mac(monkeypatch, Toy(), devices)
    assert opened("ne").placement() == {
        "prefill": {"cpu": 0.25, "gpu": 0.25, "neural_engine": 0.5},
        "decode": {"cpu": 0.5, "gpu": 0.5, "neural_engine": 0.0},
    }
    assert asked == [("/compiled/prefill.mlmodelc", "CPU_AND_NE")]
    devices["decode"] = [None]
    pretend_mac(monkeypatch, Toy(), devices)
    assert opened().placement()["decode"] == {"cpu": 0.0, "gpu": 0.0, "neural_engine": 0.0}


@pytest.mark.usefixtures("toy")
def test_a_plan_that_fails_is_told() -> None:
    with pytest.raises(MeasurementError, match=rf"makes no plan of {PATH}: KeyError: 'prefill'"):
        opened().placement()


# Failures


@pytest.mark.parametrize("function", ["prefill", "decode"])
def test_what_core_ml_does_not_load_is_named_with_its_words(function: str, toy: Toy) -> None:
    FakeMLModel.fails[function] = "You will not be able to run predict(). Underlying exception message was: -14."
    with pytest.raises(ArtifactError, match=rf"cannot load {function} of {PATH}: .*-14\.\nConvert it again") as raised:
        opened()
    assert "pal4 packages with a state" in str(raised.value)


def test_a_package_that_is_too_new_for_the_machine_is_told(toy: Toy) -> None:
    FakeMLModel.fails["too new"] = ""
    with pytest.raises(ArtifactError, match=r"cannot load prefill .* not loaded or compiled with the Core ML"):
        opened()


@pytest.mark.parametrize("function", ["prefill", "decode", "score"])
def test_a_prediction_that_fails_is_told(function: str, toy: Toy) -> None:
    FakeMLModel.fails[function] = RuntimeError("Error Domain=com.apple.CoreML Code=0")
    model = opened()
    call = {
        "prefill": lambda: model.prefill(prompt(3)),
        "decode": lambda: model.decode(1),
        "score": lambda: [*calls.score(model, SIZES, prompt(20), 10)],
    }[function]
    with pytest.raises(MeasurementError, match=rf"fails at {function} of {PATH}: RuntimeError: Error Domain=com"):
        call()


def test_logits_that_are_missing_are_told(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeMLModel, "predict", lambda *_, **__: {"others": np.zeros(1)})
    with pytest.raises(MeasurementError, match=r"fails at prefill .*KeyError: 'logits'"):
        opened().prefill(prompt(3))


@pytest.mark.parametrize(
    ("system", "release", "expected"),
    [
        ("linux", "", "needs macOS"),
        ("darwin", "14.7.1", "needs macOS 15"),
        ("darwin", "15.0", None),
        ("darwin", "26.1", None),
    ],
)
def test_what_a_machine_lacks(system: str, release: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", system)
    monkeypatch.setattr(platform, "mac_ver", lambda: (release, ("", "", ""), ""))
    assert native.missing() == expected
