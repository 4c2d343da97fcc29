"""What the gate says of a variant beside what was accepted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import scipy.stats
from records import LOSSES, TENSORS, a_record

from pipeline.checks.baseline import Baseline
from pipeline.checks.differences import WORDS
from pipeline.checks.record import Record
from pipeline.checks.regression import checks
from pipeline.checks.verdicts import CHANGED, FAIL, INCONCLUSIVE, NO_BASELINE, NOT_COMPARABLE, PASS, Check
from pipeline.types import Limits

LIMIT = Limits(max_regression=0.002)
ACCEPT = "run `quantgate baseline accept`"


def judged(now: Record | None, *accepted: Record, limits: Limits = LIMIT) -> list[Check]:
    return checks("v", limits, now, Baseline({"v": accepted}))


def verdicts(found: list[Check]) -> dict[str, str]:
    return {check.name: check.verdict for check in found}


def test_without_a_file_there_is_no_check_but_of_a_limit() -> None:
    assert checks("v", Limits(), a_record(), None) == []
    (check,) = checks("v", LIMIT, a_record(), None)
    assert (check.name, check.verdict, check.limit) == ("max_regression", NO_BASELINE, 0.002)
    assert check.reason == f"nothing was ever accepted: {ACCEPT}"


def test_the_same_passes_with_a_difference_of_exactly_0() -> None:
    same, grown = judged(a_record(), a_record())
    assert (same.verdict, same.details) == (PASS, ())
    assert same.reason == "the same 20 tensors, and the same loss in 40 windows, to the last bit"
    assert (grown.verdict, grown.value, grown.low, grown.high, grown.p_value) == (PASS, 0.0, 0.0, 0.0, 1.0)
    assert verdicts(judged(a_record(), a_record(), limits=Limits())) == {"baseline": PASS}


def test_another_header_alone_is_said_and_passes() -> None:
    check = judged(a_record(files={"model.gguf": "cd" * 32}), a_record())[0]
    assert check.verdict == PASS
    assert check.details == ("every tensor is the same: what differs in model.gguf is its header, or no weights",)


@pytest.mark.parametrize("sign", [1, -1])
def test_another_tensor_is_changed_even_where_the_loss_falls(sign: int) -> None:
    growth = sign * np.random.default_rng(2).normal(1e-3, 1e-4, 40)
    tensors = {**TENSORS, "blk.3.attn_q.weight": f"Q4_0 {'ab' * 8}"}
    now = a_record(
        tensors=tensors, files={"model.gguf": "cd" * 32}, window_nll=tuple(map(float, np.array(LOSSES) + growth))
    )
    same, grown = judged(now, a_record())
    assert same.verdict == CHANGED
    assert same.reason == (
        f"1 of 20 tensors is not the one that was accepted. Find out why; where it is meant, {ACCEPT}"
    )
    low, high = scipy.stats.t.interval(0.95, 39, growth.mean(), scipy.stats.sem(growth))
    assert same.details == (
        f"loss {np.mean(LOSSES):.5f} -> {np.mean(now.window_nll):.5f} nats/token: "
        f"{growth.mean():+.5f} [{low:+.5f}, {high:+.5f}], other in 40 of 40 windows",
        "files that differ: model.gguf",
        "blk.3.attn_q.weight: Q8_0 00000000 -> Q4_0 abababab",
    )
    assert (grown.value, grown.low, grown.high) == pytest.approx((growth.mean(), low, high), rel=1e-9)
    assert grown.verdict == PASS  # within 0.002


def test_other_tensors_with_the_same_scores_are_changed() -> None:
    check = judged(a_record(tensors={**TENSORS, "more": "F32 00"}), a_record())[0]
    assert check.verdict == CHANGED
    assert check.reason.startswith("1 of 21 tensors is not the one that was accepted, though every score is the same. ")
    assert check.details == (
        f"loss {np.mean(LOSSES):.5f} nats/token, the same in every window to the last digit",
        "more: none -> F32 00",
    )


def test_details_fit_a_terminal() -> None:
    tensors = {name: "Q4_0 00" for name in TENSORS}
    check = judged(a_record(tensors=tensors, files={"model.gguf": "cd" * 32}), a_record())[0]
    assert len(check.details) == 8
    assert check.details[-1] == "… and 15 more tensors"


def test_one_window_off_by_one_bit_is_changed() -> None:
    losses = (*LOSSES[:5], math.nextafter(LOSSES[5], 9.0), *LOSSES[6:])
    same, grown = judged(a_record(window_nll=losses), a_record())
    assert same.verdict == CHANGED
    assert same.reason.startswith("the artifact is the one that was accepted, its scores are not")
    assert len(same.details) == 1
    assert same.details[0].endswith("nats/token: +2.2e-17 [-2.3e-17, +6.7e-17], other in 1 of 40 windows")
    assert grown.verdict == PASS


def test_only_the_header_and_scores() -> None:
    now = a_record(files={"model.gguf": "cd" * 32}, window_nll=(*LOSSES[1:], 4.0))
    check = judged(now, a_record())[0]
    assert check.verdict == CHANGED
    assert check.reason.startswith("the tensors are those that were accepted; a file's header, or one without weights")
    assert check.details[1] == "every tensor is the same: what differs in model.gguf is its header, or no weights"


@pytest.mark.parametrize(("growth", "verdict"), [(0.01, FAIL), (0.0021, INCONCLUSIVE), (0.0001, PASS), (-0.1, PASS)])
def test_the_growth_of_the_loss_is_held_to_its_limit(growth: float, verdict: str) -> None:
    noise = np.random.default_rng(3).normal(growth, 1e-3, 40)
    now = a_record(window_nll=tuple(map(float, np.array(LOSSES) + noise)))
    check = judged(now, a_record())[1]
    assert (check.name, check.verdict) == ("max_regression", verdict)
    assert check.value == pytest.approx(noise.mean())
    assert (check.windows_needed is not None) == (verdict == INCONCLUSIVE)


OTHER_SOURCE = {"name": "tiny", "revision": None, "files": {"model.safetensors": "cd" * 32}}


@pytest.mark.parametrize(
    ("change", "key", "detail"),
    [
        ({"identity": {"source": OTHER_SOURCE}}, "source", "source: model.safetensors of tiny: another checkpoint"),
        ({"identity": {"corpus": "file"}}, "corpus", "corpus: expected sample, found file"),
        *(
            ({"identity": {key: "99" * 32}}, key, f"{key}: expected {two * 6}…, found {'99' * 6}…")
            for key, two in (("text_sha256", "11"), ("tokenizer_sha256", "22"), ("ids_sha256", "33"))
        ),
        ({"identity": {"context": 256}}, "context", "context: expected 512, found 256"),
        ({"scheme": "q4_0"}, "scheme", "scheme: expected q8_0, found q4_0"),
        ({"identity": {"windows": 39}, "window_nll": LOSSES[:39]}, "windows", "windows: expected 40, found 39"),
    ],
)
def test_what_cannot_be_compared_fails(change: dict[str, Any], key: str, detail: str) -> None:
    same, grown = judged(a_record(**change), a_record())
    assert (same.verdict, grown.verdict, grown.value) == (NOT_COMPARABLE, NOT_COMPARABLE, None)
    assert same.reason == f"another {WORDS.get(key, key)} than was accepted: restore it or, where it is meant, {ACCEPT}"
    assert grown.reason == same.reason
    assert same.details == (detail,)


def test_files_of_others_may_lie_elsewhere() -> None:
    found = judged(a_record(path="there/file.gguf"), a_record(path="here/file.gguf"))
    assert verdicts(found) == {"baseline": PASS, "max_regression": PASS}


def test_a_release_is_the_same_engine_whatever_git_says_of_its_commit() -> None:
    one, two, other = (
        a_record(engine={"version": f"llama-cpp-python 0.3.36, ggml {ggml}"}, window_nll=LOSSES[::-1])
        for ggml in ("0.25.3 (0c1e57098)", "0.25.3 (0c1e570-dirty)", "0.25.4 (0c1e57098)")
    )
    assert verdicts(judged(one, two)) == {"baseline": PASS, "max_regression": PASS}
    assert verdicts(judged(one, other)) == {"baseline": NO_BASELINE, "max_regression": NO_BASELINE}


def test_a_checkpoint_under_another_name_is_the_same() -> None:
    source = {"name": "copy", "revision": None, "files": {"model.safetensors": "ab" * 32}}
    assert verdicts(judged(a_record(identity={"source": source}), a_record())) == {
        "baseline": PASS,
        "max_regression": PASS,
    }


@pytest.mark.parametrize("key", ["name", "version", "instruction_set", "device", "kv_type", "flash_attention"])
def test_another_engine_has_no_baseline(key: str) -> None:
    now = a_record(engine={key: "another"}, window_nll=LOSSES[::-1])
    found = judged(now, a_record())
    assert verdicts(found) == {"baseline": NO_BASELINE, "max_regression": NO_BASELINE}
    assert found[0].reason == f"it was accepted by another engine only: look at its figures, then {ACCEPT}"
    assert found[0].details == (f"{key}: accepted {a_record().engine[key]}, now another",)


def test_the_record_of_the_same_engine_is_found_among_others() -> None:
    others = [a_record(engine={"instruction_set": name}, window_nll=LOSSES[::-1]) for name in ("AVX", "AVX512")]
    assert judged(a_record(), others[0], a_record(), others[1])[0].verdict == PASS


def test_a_new_variant_has_no_baseline() -> None:
    found = judged(a_record())
    assert verdicts(found) == {"baseline": NO_BASELINE, "max_regression": NO_BASELINE}
    assert found[0].reason == f"it is new: look at its figures, then {ACCEPT}"


def test_a_variant_that_nobody_asks_about_has_no_check() -> None:
    assert judged(a_record(), limits=Limits()) == []
    other = a_record(engine={"instruction_set": "AVX512"})
    assert verdicts(judged(a_record(), other, limits=Limits())) == {"baseline": NO_BASELINE}


def test_a_run_without_a_record_fails() -> None:
    found = judged(None, a_record())
    assert verdicts(found) == {"baseline": FAIL, "max_regression": FAIL}
    assert "run dvc repro" in found[0].reason
    assert verdicts(judged(None, a_record(), limits=Limits())) == {"baseline": FAIL}


def test_one_window_bounds_no_growth() -> None:
    one = {"identity": {"windows": 1}, "window_nll": (4.0,)}
    assert verdicts(judged(a_record(**one), a_record(**one))) == {"baseline": PASS, "max_regression": INCONCLUSIVE}
