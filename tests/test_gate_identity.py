"""The gate: figures of other windows, checkpoints or variants are compared with nothing."""

from __future__ import annotations

import re
from typing import Any

import pytest
from figures import IDENTITY, coreml_variant
from judged import SHOWN, good, judged, only, project, report

from pipeline.checks import identity as gate
from pipeline.checks.limits import CHECKS
from pipeline.checks.verdicts import FAIL, INCONCLUSIVE, PASS
from pipeline.gate import judge


@pytest.mark.parametrize(
    ("key", "other"),
    [
        ("text_sha256", "99" * 32),
        ("tokenizer_sha256", "99" * 32),
        ("ids_sha256", "99" * 32),
        ("context", 256),
        ("windows", 39),
        ("corpus", "file"),
        ("source", IDENTITY["source"] | {"name": "other"}),  # type: ignore[operator]
        ("source", IDENTITY["source"] | {"files": {"model.safetensors": "cd" * 32}}),  # type: ignore[operator]
    ],
)
def test_another_identity_fails_and_is_named(key: str, other: Any) -> None:
    variant = good()
    variant["identity"][key] = other
    result = judged(variant, inconclusive="warn")
    assert not result.passes
    (check,) = [check for check in result.checks if check.name not in CHECKS]
    assert (check.name, check.verdict) == (f"same_{key}", FAIL)
    assert (check.limit, check.value, check.low, check.high, check.windows_needed) == (None,) * 5
    assert check.reason.startswith(f"its {key} is not the reference's: expected ")
    if key in SHOWN:
        expected, found = SHOWN[key]
        assert check.reason == f"its {key} is not the reference's: expected {expected}, found {found}; run dvc repro"


@pytest.mark.parametrize("key", IDENTITY)
def test_an_identity_that_lacks_a_key_fails(key: str) -> None:
    variant = good()
    del variant["identity"][key]
    result = judged(variant, inconclusive="warn")
    assert not result.passes
    check = only(result, f"same_{key}")
    assert check.verdict == FAIL
    assert f"its {key} is not the reference's: expected" in check.reason
    assert check.reason.endswith("found None; run dvc repro")


@pytest.mark.parametrize("key", IDENTITY)
def test_a_reference_that_lacks_a_key_fails(key: str) -> None:
    """Also where the variant lacks it too: two absences are no agreement."""
    expected = {name: value for name, value in IDENTITY.items() if name != key}
    variant = good()
    for found in (dict(IDENTITY), dict(expected)):
        variant["identity"] = found
        result = judge(report({"v": variant}, identity=expected), project("warn"))
        assert (result.verdict, result.passes) == (FAIL, False)
        check = only(result, f"same_{key}")
        assert (check.verdict, check.reason) == (FAIL, f"the reference's {key} is missing: run dvc repro")


def test_every_key_of_the_identity_is_compared() -> None:
    assert set(gate.IDENTITY) == set(IDENTITY)


@pytest.mark.parametrize("measured", ["q8_0", None])
def test_a_variant_measured_as_another_scheme_fails(measured: str | None) -> None:
    variant = good() | {"scheme": measured}
    measurements = report({"v": variant})
    result = judge(measurements, project("warn", asked={"v": {"scheme": "q4_0"}}))
    assert (result.verdict, result.passes) == (FAIL, False)
    check = only(result, "same_scheme")
    assert check.verdict == FAIL
    assert check.reason == f"it was measured as {measured}, params.yaml says q4_0: run dvc repro"
    assert {c.verdict for c in result.checks if c.name != "same_scheme"} == {PASS}


def test_a_variant_measured_as_its_scheme_passes() -> None:
    measurements = report({"v": good() | {"scheme": "q4_0"}})
    asked = {"v": {"scheme": "q4_0"}, "other": {"scheme": "q8_0"}}
    result = judge(measurements, project("fail", asked=asked))
    assert result.verdict == PASS
    assert [check.name for check in result.checks] == [*CHECKS]


@pytest.mark.parametrize(("kld", "verdict"), [(0.02, PASS), (0.08, FAIL), (0.06, INCONCLUSIVE)])
def test_what_was_not_timed_is_judged_by_its_quality(kld: float, verdict: str) -> None:
    measurements = report({"v": coreml_variant(5, kld, 0.01)})
    asked = {"v": {"format": "coreml", "scheme": "int8"}}
    result = judge(measurements, project("fail", asked=asked))
    assert [check.name for check in result.checks] == [*CHECKS]
    assert result.verdict == verdict


INT4 = {"format": "mlx", "scheme": "int4"}
LONG = {"format": "coreml", "scheme": "int8+chunk=256"}
GIVEN = {"format": "mlx", "path": "some/folder"}


@pytest.mark.parametrize(
    ("asked", "measured", "failed"),
    [
        (INT4, INT4 | {"path": None}, []),
        (INT4, INT4 | {"format": "gguf"}, ["same_format"]),  # some schemes of two formats bear the same name
        (INT4, INT4 | {"scheme": "int8"}, ["same_scheme"]),
        (INT4, {"format": "gguf", "scheme": "q4_0"}, ["same_format", "same_scheme"]),
        (LONG, LONG, []),
        (LONG, LONG | {"scheme": "int8"}, ["same_scheme"]),
        (LONG, LONG | {"scheme": "int8+chunk=128"}, ["same_scheme"]),
        (LONG | {"scheme": "int8"}, LONG, ["same_scheme"]),
        (INT4, INT4 | {"format": "coreml"}, ["same_format"]),  # a name that both formats have
        (GIVEN, GIVEN | {"scheme": "int4"}, []),
        (GIVEN, GIVEN | {"scheme": "int4", "path": "another/folder"}, ["same_path"]),
    ],
)
def test_a_variant_is_the_one_that_was_asked_for(
    asked: dict[str, str], measured: dict[str, Any], failed: list[str]
) -> None:
    measurements = report({"v": good() | measured})
    result = judge(measurements, project("warn", asked={"v": asked}))
    assert [check.name for check in result.checks if check.verdict == FAIL] == failed
    assert result.passes == (not failed)


def test_a_variant_without_identity_fails() -> None:
    variant = good()
    del variant["identity"]
    result = judged(variant, inconclusive="warn")
    assert result.verdict == FAIL
    assert {check.name for check in result.checks} == {*CHECKS, *(f"same_{key}" for key in IDENTITY)}


@pytest.mark.parametrize("found", [{"identity": {}}, {}, {"identity": None}])
def test_a_reference_without_identity_compares_nothing_and_fails(found: dict[str, Any]) -> None:
    result = judge({"reference": {"ppl": 80.0}, **found, "variants": {"v": good()}}, project("warn"))
    assert result.verdict == FAIL
    assert {c.name for c in result.checks if c.verdict == FAIL} == {f"same_{key}" for key in IDENTITY}


def test_other_files_of_a_checkpoint_of_the_same_name_are_told_apart() -> None:
    """Names are equal, so the reason must show what is not."""
    variant = good()
    variant["identity"]["source"]["files"] = {"model.safetensors": "cd" * 32}
    reason = only(judged(variant), "same_source").reason
    expected, found = reason.split("expected ")[1].split(";")[0].split(", found ")
    assert expected != found
    assert all(re.fullmatch(r"tiny \([0-9a-f]{12}…\)", shown) for shown in (expected, found))
