"""params.yaml: every key known, of its type, and named when it is not."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from conftest import ROOT

from pipeline.errors import ParamsError
from pipeline.formats import room
from pipeline.params import Benchmark, Calibration, Corpus, Evaluate, Gate, Params, Variant, load
from pipeline.types import Limits

Change = Callable[[dict[str, Any]], object]


def base() -> dict[str, Any]:
    return {
        "checkpoint": "a/model",
        "revision": None,
        "corpus": {"name": "sample", "windows": 3, "context": 64},
        "variants": {"gguf-q4_0": {"format": "gguf", "scheme": "q4_0"}},
        "evaluate": {"threads": 2},
        "benchmark": {"rounds": 9},
        "gate": {"limits": {"default": {"max_kld_mean": 0.1}}},
    }


def load_changed(folder: Path, change: Change) -> Params:
    """The parameters of `base` after `change`."""
    raw = base()
    change(raw)
    path = folder / "params.yaml"
    path.write_text(yaml.safe_dump(raw))
    return load(path)


def test_the_committed_file() -> None:
    params = load(ROOT / "params.yaml")
    assert params.checkpoint == "assets/qwen3-tiny"
    assert params.revision is None
    assert params.corpus == Corpus(name="sample", path=None, windows=40, context=512)
    assert params.evaluate == Evaluate(threads=0, flash_attention=False, kv_type="f16")
    assert params.benchmark == Benchmark((128, 512, 2048), 64, 7, "auto", 0, "auto")
    assert params.variants["gguf-q4_k_m"] == Variant(format="gguf", scheme="q4_k_m")
    assert params.gate.inconclusive == "fail"
    assert params.gate.limits_of("gguf-bf16") == Limits(0.04, 0.06, 0.83, 0.002)
    assert params.gate.limits_of("gguf-q4_0") == Limits(0.20, 0.25, 0.70, 0.002)
    assert set(params.gate.limits) - {"default"} <= set(params.variants)


def test_what_is_left_out_has_its_default(tmp_path: Path) -> None:
    params = load_changed(tmp_path, lambda raw: None)
    assert params.corpus == Corpus("sample", None, 3, 64)
    assert params.evaluate == Evaluate(2, False, "f16")
    assert params.benchmark == Benchmark((128, 512, 2048), 64, 9, "auto", 0, "auto")
    assert params.gate == Gate("fail", {"default": Limits(None, 0.1, None)})


def test_values_are_taken_as_they_are(tmp_path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["corpus"] = {"name": "file", "path": "a b/ü.txt", "windows": None}
        raw["benchmark"] = {"prompt_lengths": [16], "flash_attention": True}
        raw["gate"] = {"inconclusive": "warn", "limits": {"gguf-q4_0": {"min_same_top": 1}}}

    params = load_changed(tmp_path, change)
    assert params.corpus == Corpus("file", "a b/ü.txt", None, 512)
    assert params.benchmark.prompt_lengths == (16,)
    assert params.benchmark.flash_attention is True
    assert params.gate.inconclusive == "warn"
    limit = params.gate.limits["gguf-q4_0"].min_same_top
    assert (limit, type(limit)) == (1.0, float)


# Unknown and missing keys


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda raw: raw.update(checkpiont="x"), "unknown key 'checkpiont'; did you mean 'checkpoint'?"),
        (lambda raw: raw["corpus"].update(window=4), "unknown key 'corpus.window'; did you mean 'windows'?"),
        (
            lambda raw: raw["variants"]["gguf-q4_0"].update(schema="q4_0"),
            "unknown key 'variants.gguf-q4_0.schema'; did you mean 'scheme'?",
        ),
        (lambda raw: raw["evaluate"].update(thread=4), "unknown key 'evaluate.thread'; did you mean 'threads'?"),
        (
            lambda raw: raw["benchmark"].update({"prompt-lengths": [4]}),
            "unknown key 'benchmark.prompt-lengths'; did you mean 'prompt_lengths'?",
        ),
        (lambda raw: raw["gate"].update(limit={}), "unknown key 'gate.limit'; did you mean 'limits'?"),
        (
            lambda raw: raw["gate"]["limits"]["default"].update(max_kl_mean=1),
            "unknown key 'gate.limits.default.max_kl_mean'; did you mean 'max_kld_mean'?",
        ),
        (lambda raw: raw["corpus"].update(zzz=1), "unknown key 'corpus.zzz'; known: name, path, windows, context"),
        (lambda raw: raw.update({7: 1}), "unknown key '7'; known: checkpoint"),
    ],
)
def test_an_unknown_key_is_refused_by_its_full_name(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=re.escape(message)):
        load_changed(tmp_path, change)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        (lambda raw: raw["variants"]["gguf-q4_0"].pop("format"), "variants.gguf-q4_0.format"),
        (lambda raw: raw.pop("checkpoint"), "checkpoint"),
        (lambda raw: raw.pop("revision"), "revision"),
        (lambda raw: raw.pop("corpus"), "corpus"),
        (lambda raw: raw.pop("variants"), "variants"),
        (lambda raw: raw.pop("evaluate"), "evaluate"),
        (lambda raw: raw.pop("benchmark"), "benchmark"),
        (lambda raw: raw.pop("gate"), "gate"),
    ],
)
def test_a_missing_key_is_named(change: Change, key: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=rf"params\.yaml: {re.escape(key)} is missing"):
        load_changed(tmp_path, change)


# Types and values


def put(where: str, value: object) -> Change:
    """Sets the value at a dotted key."""

    def change(raw: dict[str, Any]) -> None:
        *parents, last = where.split(".")
        for parent in parents:
            raw = raw[parent]
        raw[last] = value

    return change


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("checkpoint", 7, "checkpoint must be text, found 7"),
        ("checkpoint", None, "checkpoint must be text, found None"),
        ("revision", 123, "revision must be text or null, found 123"),
        ("corpus", "sample", "corpus must be a mapping, found 'sample'"),
        ("corpus.windows", "40", "corpus.windows must be a whole number or null, found '40'"),
        ("corpus.windows", 1.5, "corpus.windows must be a whole number or null, found 1.5"),
        ("corpus.windows", True, "corpus.windows must be a whole number or null, found True"),
        ("corpus.context", None, "corpus.context must be a whole number, found None"),
        ("corpus.context", 512.0, "corpus.context must be a whole number, found 512.0"),
        ("variants", ["gguf-q4_0"], "variants must be a mapping, found ['gguf-q4_0']"),
        ("variants.gguf-q4_0", "q4_0", "variants.gguf-q4_0 must be a mapping, found 'q4_0'"),
        ("variants.gguf-q4_0.scheme", 4, "variants.gguf-q4_0.scheme must be text or null, found 4"),
        ("evaluate.threads", False, "evaluate.threads must be a whole number, found False"),
        ("evaluate.flash_attention", "auto", "evaluate.flash_attention must be true or false, found 'auto'"),
        ("evaluate.flash_attention", 1, "evaluate.flash_attention must be true or false, found 1"),
        ("benchmark.prompt_lengths", 128, "benchmark.prompt_lengths must be a list, found 128"),
        ("benchmark.prompt_lengths", [128, "x"], "benchmark.prompt_lengths[1] must be a whole number, found 'x'"),
        ("benchmark.flash_attention", 1, "benchmark.flash_attention must be true or false or text, found 1"),
        ("gate.limits", [], "gate.limits must be a mapping, found []"),
        ("gate.limits.default", 0.1, "gate.limits.default must be a mapping, found 0.1"),
        (
            "gate.limits.default.max_kld_mean",
            "0.1",
            "gate.limits.default.max_kld_mean must be a number or null, found '0.1'",
        ),
        (
            "gate.limits.default.max_kld_mean",
            True,
            "gate.limits.default.max_kld_mean must be a number or null, found True",
        ),
        (
            "gate.limits.default.max_slowdown",
            "10%",
            "gate.limits.default.max_slowdown must be a number or null, found '10%'",
        ),
        (
            "gate.limits.default.max_regression",
            float("nan"),
            "gate.limits.default.max_regression must be a number or null, found nan",
        ),
    ],
)
def test_a_value_of_another_type_is_refused(where: str, value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=re.escape(f"params.yaml: {message}")):
        load_changed(tmp_path, put(where, value))


@pytest.mark.parametrize(
    ("where", "value", "message"),
    [
        ("gate.inconclusive", "pass", "gate.inconclusive must be fail or warn, found 'pass'"),
        ("gate.inconclusive", "Fail", "gate.inconclusive must be fail or warn, found 'Fail'"),
        ("benchmark.flash_attention", "yes", "benchmark.flash_attention must be true, false or auto, found 'yes'"),
        ("variants", {}, "variants is empty"),
        ("corpus.windows", 0, "corpus.windows must be positive"),
        ("corpus.context", -512, "corpus.context must be positive"),
        ("benchmark.prompt_lengths", [], "benchmark.prompt_lengths must be positive"),
        ("benchmark.prompt_lengths", [128, 0], "benchmark.prompt_lengths must be positive"),
        ("benchmark.decode", 0, "benchmark.decode must be positive"),
        ("benchmark.rounds", 0, "benchmark.rounds must be positive"),
        ("evaluate.threads", -1, "threads must be 0 (one per physical core) or more, found -"),
        ("benchmark.threads", -8, "threads must be 0 (one per physical core) or more, found -"),
        ("gate.limits.default.min_same_top", 1.01, "min_same_top is a share from 0 to 1, found 1.01."),
        ("gate.limits.default.min_same_top", 95, "min_same_top is a share from 0 to 1, found 95."),
        ("gate.limits.default.min_same_top", -0.1, "min_same_top is a share from 0 to 1, found -0.1."),
        ("gate.limits.default.max_regression", -0.001, "max_regression is how much loss may grow, 0 or more nats per"),
        (
            "gate.limits.gguf-q4_0",
            {"max_slowdown": 0},
            "max_slowdown is a share above 0 (0.1: a tenth more time), foun",
        ),
        ("gate.limits.default.max_slowdown", -0.1, "max_slowdown is a share above 0 (0.1: a tenth more time), found -"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(where: str, value: object, message: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=re.escape(f"params.yaml: {message}")):
        load_changed(tmp_path, put(where, value))


@pytest.mark.parametrize("share", [0, 1, 0.5, None])
def test_a_share_from_0_to_1_is_a_limit(share: float | None, tmp_path: Path) -> None:
    params = load_changed(tmp_path, put("gate.limits.default.min_same_top", share))
    assert params.gate.limits["default"].min_same_top == share


def test_limits_against_the_baseline_are_off_unless_set(tmp_path: Path) -> None:
    limits = load_changed(tmp_path, lambda raw: None).gate.limits_of("gguf-q4_0")
    assert (limits.max_regression, limits.max_slowdown) == (None, None)

    def change(raw: dict[str, Any]) -> None:
        raw["gate"]["limits"]["default"] |= {"max_regression": 0, "max_slowdown": 0.1}
        raw["gate"]["limits"]["gguf-q4_0"] = {"max_slowdown": 1}

    gate = load_changed(tmp_path, change).gate
    assert gate.limits_of("other") == Limits(None, 0.1, None, 0.0, 0.1)
    assert gate.limits_of("gguf-q4_0") == Limits(None, 0.1, None, 0.0, 1.0)


def test_each_variant_asks_for_a_scheme_or_a_file(tmp_path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["variants"]["b"] = {"format": "gguf", "scheme": "q8_0", "types": {"ATTN_V": "Q4_K", "output": "f16"}}
        raw["variants"]["c"] = {"format": "mlx", "path": "some/folder"}

    params = load_changed(tmp_path, change)
    assert params.asked == {
        "gguf-q4_0": {"format": "gguf", "scheme": "q4_0"},
        "b": {"format": "gguf", "scheme": "q8_0+attn_v=q4_k,output=f16"},
        "c": {"format": "mlx", "path": "some/folder"},
    }


def test_a_core_ml_variant_may_have_sizes_of_its_own(tmp_path: Path) -> None:
    own = {"score_window": 64, "chunk": 256, "max_context": 4096}

    def change(raw: dict[str, Any]) -> None:
        raw["variants"]["b"] = {"format": "coreml", "scheme": "int8", **own}
        raw["variants"]["c"] = {"format": "coreml", "scheme": "int8", "chunk": 128}
        raw["variants"]["d"] = {"format": "coreml", "scheme": "int8", "chunk": None}

    params = load_changed(tmp_path, change)
    assert [params.variant(name).sizes for name in "bcd"] == [own, {"chunk": 128}, {}]
    assert {name: params.asked[name] for name in "bcd"} == {
        "b": {"format": "coreml", "scheme": "int8+chunk=256,max_context=4096,score_window=64"},
        "c": {"format": "coreml", "scheme": "int8+chunk=128"},
        "d": {"format": "coreml", "scheme": "int8"},
    }
    for name in "bcd":  # what an artifact says of itself, and the gate compares
        variant = params.variant(name)
        scheme = room("coreml", "schemes").scheme(variant.scheme, variant.options)
        assert scheme.label == variant.asked["scheme"]


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ({"format": "gguf"}, "variants.b needs either a scheme to build or the path of a file"),
        ({"format": "gguf", "scheme": "q4_0", "path": "a.gguf"}, "variants.b needs either a scheme to build or"),
        ({"format": "gguf", "path": "a.gguf", "types": {"attn_v": "q8_0"}}, "variants.b has types, but no scheme"),
        (
            {"format": "coreml", "path": "a", "chunk": 64, "score_window": 9},
            "variants.b has chunk, score_window, but no",
        ),
        (
            {"format": "coreml", "scheme": "int8", "chunk": "64"},
            "variants.b.chunk must be a whole number or null, found",
        ),
        (
            {"format": "coreml", "scheme": "int8", "chunks": 64},
            "unknown key 'variants.b.chunks'; did you mean 'chunk'?",
        ),
        ({"format": "gguf", "scheme": "q4_0", "types": {"attn_v": 8}}, "variants.b.types.attn_v must be text, found 8"),
        (
            {"format": "gguf", "scheme": "q4_0", "evaluate": {"kv": "q8_0"}},
            "unknown key 'variants.b.evaluate.kv'; known: threads",
        ),
        ({"format": "gguf", "scheme": "q4_0", "evaluate": {"threads": -1}}, "variants.b.evaluate.threads must be 0 or"),
    ],
)
def test_a_variant_that_says_too_little_or_too_much(variant: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=re.escape(message)):
        load_changed(tmp_path, put("variants.b", variant))


def calibrated(path: str | None, /, **variant: Any) -> Change:
    """A calibration text, and a variant that may ask for an importance matrix."""

    def change(raw: dict[str, Any]) -> None:
        raw["calibration"] = {"path": path, "windows": 5}
        raw["variants"]["imat"] = {"format": "gguf", "scheme": "q4_k_m"} | variant

    return change


def test_a_variant_may_be_made_by_an_importance_matrix(tmp_path: Path) -> None:
    params = load_changed(tmp_path, calibrated("text.txt", imatrix=True))
    assert params.calibration == Calibration("text.txt", 5, 512)
    assert params.calibrated
    assert params.variant("imat").imatrix is True
    assert params.asked["imat"] == {"format": "gguf", "scheme": "q4_k_m+imatrix"}
    params = load_changed(tmp_path, calibrated(None, imatrix="theirs.gguf", types={"attn_v": "q8_0"}))
    assert not params.calibrated
    assert params.asked["imat"]["scheme"] == "q4_k_m+attn_v=q8_0+imatrix"
    params = load_changed(tmp_path, calibrated(None, imatrix=False))
    assert params.asked["imat"]["scheme"] == "q4_k_m"
    assert not params.calibrated
    assert load_changed(tmp_path, lambda raw: None).calibration == Calibration(None, 32, 512)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            calibrated(None, imatrix=True),
            "variants.imat has imatrix: true, but calibration.path is null: name the UTF-8",
        ),
        (calibrated("a.txt", imatrix=True, scheme=None, path="a.gguf"), "variants.imat has an imatrix, but no scheme"),
        (calibrated("a.txt", imatrix=""), "variants.imat.imatrix must be true, false or the path of a file"),
        (calibrated("a.txt", imatrix=3), "variants.imat.imatrix must be true or false or text, found 3"),
        (calibrated("a.txt", imatrx=True), "unknown key 'variants.imat.imatrx'; did you mean 'imatrix'"),
        (lambda raw: raw.update(calibration={"window": 3}), "unknown key 'calibration.window'; did you mean 'windows'"),
        (lambda raw: raw.update(calibration={"windows": 0}), "calibration.windows must be positive, found 0"),
        (lambda raw: raw.update(calibration={"context": 0}), "calibration.context must be positive, found 0"),
    ],
)
def test_importance_matrices_that_cannot_be(change: Change, message: str, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=re.escape(f"params.yaml: {message}")):
        load_changed(tmp_path, change)


def test_a_variants_own_evaluate_settings_go_over_those_of_all(tmp_path: Path) -> None:
    def change(raw: dict[str, Any]) -> None:
        raw["evaluate"] = {"threads": 3, "flash_attention": False, "kv_type": "f16"}
        own = {"kv_type": "q8_0", "flash_attention": True}
        raw["variants"]["b"] = {"format": "gguf", "scheme": "q8_0", "evaluate": own}

    params = load_changed(tmp_path, change)
    assert params.evaluate_of("b") == Evaluate(threads=3, flash_attention=True, kv_type="q8_0")
    assert params.evaluate_of("gguf-q4_0") == Evaluate(threads=3, flash_attention=False, kv_type="f16")
    assert params.timed_as("b") == {"kv_type": "q8_0", "flash_attention": True}
    assert params.timed_as("gguf-q4_0") == {}


def test_a_variant_by_name(tmp_path: Path) -> None:
    params = load_changed(tmp_path, lambda raw: None)
    assert params.variant("gguf-q4_0") == Variant("gguf", "q4_0")
    with pytest.raises(ParamsError, match=r"no variant 'gguf-q4_k'; did you mean 'gguf-q4_0'\?"):
        params.variant("gguf-q4_k")


# Limits


def test_a_variant_s_own_limits_go_over_the_default() -> None:
    gate = Gate(limits={"default": Limits(0.1, 0.2, 0.9), "own": Limits(max_kld_mean=0.5, min_same_top=0.0)})
    assert gate.limits_of("own") == Limits(0.1, 0.5, 0.0)
    assert gate.limits_of("other") == Limits(0.1, 0.2, 0.9)
    assert gate.limits_of("default") == Limits(0.1, 0.2, 0.9)


def test_without_a_default_only_a_variant_s_own_limits_hold() -> None:
    assert Gate(limits={"own": Limits(max_kld_mean=0.5)}).limits_of("own") == Limits(None, 0.5, None)
    assert Gate().limits_of("own") == Limits(None, None, None)


# The file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"checkpoint: [", "is not valid YAML"),
        (b"a: b: c", "is not valid YAML"),
        (b"\tcheckpoint: x", "is not valid YAML"),
        (b"checkpoint: caf\xe9", "params.yaml"),
        (b"", "the file must be a mapping, found None"),
        (b"- checkpoint", "the file must be a mapping, found ['checkpoint']"),
    ],
)
def test_a_file_that_is_no_mapping_is_refused(content: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "params.yaml"
    path.write_bytes(content)
    with pytest.raises(ParamsError, match=re.escape(message)):
        load(path)


def test_an_absent_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"params\.yaml cannot be read: No such file .* Run this in the project's"):
        load(tmp_path / "params.yaml")
