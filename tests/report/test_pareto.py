"""The picks, and what speeds they go by."""

from __future__ import annotations

import math
from itertools import permutations
from typing import Any

import pytest
from figures import MLX_TIMING_ENGINE, TIMING_ENGINE, UNREPRESENTATIVE, figure, mlx_variant, picks_of, rate, variant

from pipeline.report.pareto import prompt_length

OF, OVER = ", the median of 7 rounds", ", the paired interval of 40 windows"


def test_picks_answer_three_questions(measurements: dict[str, Any]) -> None:
    close, fast, small = picks_of(measurements["variants"])
    assert (close.question, close.variant) == ("smallest within 1 % of the reference's perplexity", "middle")
    assert close.why == f"6.0 MB; perplexity +0.60 % (+0.40 to +0.80){OVER}; all smaller ones are surely beyond"
    assert (fast.question, fast.variant) == ("fastest prefill within 3 % of the reference's perplexity", "worse")
    assert fast.why == (
        f"1500 [1490, 1510] tokens/s at 512 tokens{OF}; perplexity +2.02 % (+1.82 to +2.22){OVER}; surely faster than "
        "all others within"
    )
    assert (small.question, small.variant) == ("smallest of all", "small")


def test_the_smallest_say_what_is_to_be_shipped_where_it_is_more(measurements: dict[str, Any]) -> None:
    measurements["variants"]["mlx"] = mlx_variant(3_900_000, 0.2, 0.1)
    small = picks_of(measurements["variants"])[-1]
    assert (small.variant, small.why) == (
        "mlx",
        f"3.9 MB of weights, 4.4 MB to ship; perplexity +10.52 % (+10.30 to +10.74){OVER}",
    )


@pytest.mark.parametrize(("high", "variant_name"), [(math.log1p(0.01), "small"), (math.log1p(0.01) + 1e-9, "big")])
def test_within_means_the_whole_interval(high: float, variant_name: str) -> None:
    variants = {"big": variant(9, 0.1, 0.0), "small": variant(5, 0.1, 0.0)}
    variants["small"]["ln_ppl_ratio"] = {"value": 0.001, "low": -0.01, "high": high}
    assert picks_of(variants)[0].variant == variant_name


@pytest.mark.parametrize(
    ("low", "said"),
    [
        (math.log1p(0.01), "; smaller, and neither surely within nor beyond: small"),
        (math.log1p(0.01) + 1e-9, "; all smaller ones are surely beyond"),
    ],
)
def test_the_smallest_says_what_is_known_of_smaller_ones(low: float, said: str) -> None:
    variants = {"big": variant(9, 0.1, 0.0), "pick": variant(5, 0.2, 0.0), "small": variant(4, 0.3, 0.0)}
    variants["small"]["ln_ppl_ratio"] = {"value": 0.03, "low": low, "high": 0.05}
    assert picks_of(variants)[0].why == f"0.0 MB; perplexity +0.00 % (-0.20 to +0.20){OVER}{said}"
    del variants["small"]
    assert picks_of(variants)[0].why.endswith(OVER)


def test_the_smallest_names_those_of_the_same_divergence() -> None:
    variants = {name: variant(size, 0.1, 0.0) for name, size in (("a", 7), ("b", 9), ("pick", 5))}
    variants["far"] = variant(8, 0.2, 0.0)
    assert picks_of(variants)[0].why.endswith(f"{OVER}; KL not told apart from a, b")


def test_picks_do_not_depend_on_the_order_of_variants() -> None:
    variants = {name: variant(5, kld, 0.0) for name, kld in (("c", 0.1), ("a", 0.1), ("b", 0.2))}
    for order in permutations(variants):
        found = picks_of({name: variants[name] for name in order})
        assert [pick.variant for pick in found] == ["a"] * 3  # as small and as near as another: by name


def test_no_pick_where_nothing_qualifies() -> None:
    close, fast, small = picks_of({"a": variant(5, 0.1, 0.5), "b": variant(4, 0.2, 0.7)})
    assert (close.variant, close.why) == (None, "no variant is surely within 1 %")
    assert (fast.variant, fast.why) == (None, "no variant with a measured prefill is surely within 3 %")
    assert small.variant == "b"


def test_no_pick_where_nothing_was_measured() -> None:
    assert [(pick.variant, bool(pick.why)) for pick in picks_of({})] == [(None, True)] * 3


def test_one_window_bounds_nothing_and_so_qualifies_for_nothing() -> None:
    one = variant(5, 0.1, 0.0)
    one["ln_ppl_ratio"] = figure(0.0, None)
    close, fast, small = picks_of({"a": one})
    assert (close.variant, fast.variant, small.variant) == (None, None, "a")
    assert small.why == "0.0 MB; perplexity +0.00 % (one window: no interval)"


@pytest.mark.parametrize(
    ("rates", "alike"),
    [
        ((figure(1000.0, 10.0), figure(981.0, 10.0)), True),
        ((figure(1000.0, 10.0), figure(980.0, 10.0)), True),  # they share a point
        ((figure(1000.0, 10.0), figure(979.0, 10.0)), False),
        ((figure(1000.0, 0.0), figure(1000.0, 0.0)), True),  # points are intervals too
        ((figure(1000.0, 0.0), figure(999.0, 0.0)), False),
        ((figure(1000.0, 10.0), figure(500.0, None)), True),  # an unbounded one says nothing
        ((figure(1000.0, None), figure(500.0, 1.0)), True),
    ],
)
def test_speeds_whose_intervals_overlap_are_not_told_apart(rates: tuple[dict[str, Any], ...], alike: bool) -> None:
    variants = {"fast": variant(4, 0.1, 0.0), "other": variant(5, 0.1, 0.0), "far": variant(3, 0.1, 0.5, 1000.0)}
    for name, found in zip(("fast", "other"), rates, strict=True):
        variants[name]["prefill"]["512"] = rate(0.0) | found
    pick = picks_of(variants)[1]
    assert pick.variant == "fast"
    bracket = "" if rates[0]["low"] is None else f" [{rates[0]['low']:.0f}, {rates[0]['high']:.0f}]"
    why = f"1000{bracket} tokens/s at 512 tokens{OF}; perplexity +0.00 % (-0.20 to +0.20){OVER}; "
    why += "not told apart from other" if alike else "surely faster than all others within"
    assert pick.why == why  # and "far" is not asked for


def test_of_equal_speeds_the_smaller_is_taken() -> None:
    variants = {"a": variant(6, 0.1, 0.0), "b": variant(5, 0.1, 0.0), "c": variant(7, 0.1, 0.0)}
    assert picks_of(variants)[1].variant == "b"


def test_every_variant_that_is_not_told_apart_is_named() -> None:
    variants = {name: variant(5, 0.1, 0.0, speed) for name, speed in (("a", 995.0), ("b", 1000.0), ("c", 990.0))}
    assert picks_of(variants)[1].why.endswith("; not told apart from a, c")


def test_what_has_no_speed_is_not_the_fastest() -> None:
    variants = {"timed": variant(5, 0.1, 0.0, 10.0), "untimed": variant(4, 0.1, 0.0, None)}
    assert picks_of(variants)[1].variant == "timed"
    assert picks_of({"untimed": variants["untimed"]})[1].variant is None


def test_a_variant_without_the_length_of_the_pick_is_not_the_fastest() -> None:
    variants = {"a": variant(5, 0.1, 0.0, 10.0), "b": variant(4, 0.1, 0.0)}
    del variants["b"]["prefill"]["512"]
    assert picks_of(variants)[1].variant == "a"


@pytest.mark.parametrize(
    ("lengths", "expected"), [(["128", "512", "2048"], "512"), (["64", "128", "1024"], "128"), (["9"], "9"), ([], None)]
)
def test_picks_are_made_at_512_tokens_or_the_middle_length(lengths: list[str], expected: str | None) -> None:
    timed = {"prefill": dict.fromkeys(lengths, rate(1.0)), "unrepresentative": None}
    assert prompt_length({"a": timed}) == expected


# What is not representative


def test_what_is_not_representative_is_never_the_fastest() -> None:
    variants = {"a": variant(5, 0.1, 0.0, 10.0), "b": mlx_variant(4, 0.1, 0.0, 1000.0)}
    pick = picks_of(variants)[1]
    why = f"10 [0, 20] tokens/s at 512 tokens{OF}; perplexity +0.00 % (-0.20 to +0.20){OVER}"
    assert (pick.variant, pick.why) == ("a", why)
    assert picks_of(variants)[0].variant == "b"  # its quality and size are its own
    variants["b"] |= {"unrepresentative": None, "timing_engine": MLX_TIMING_ENGINE}  # and on the same device
    assert picks_of(variants)[1].variant == "b"


def test_no_fastest_where_nothing_is_representative_and_why() -> None:
    variants = {name: mlx_variant(size, 0.1, 0.0) for name, size in (("a", 5), ("b", 4))}
    pick = picks_of(variants)[1]
    assert pick.variant is None
    expected = "no variant with a representative prefill is surely within 3 %; not representative: a, b: "
    expected += UNREPRESENTATIVE
    assert pick.why == expected
    variants["c"] = variant(3, 0.1, 0.5)  # fair, but too far from the reference
    assert (picks_of(variants)[1].variant, picks_of(variants)[1].why) == (None, expected)
    untimed = {"a": mlx_variant(5, 0.1, 0.0, None)}
    assert picks_of(untimed)[1].why == "no variant with a measured prefill is surely within 3 %"


def test_a_length_of_other_speeds_is_not_the_one_picks_are_made_at() -> None:
    fair, other = variant(5, 0.1, 0.0, 10.0), mlx_variant(4, 0.1, 0.0)
    del fair["prefill"]["512"]
    assert prompt_length({"a": fair, "b": other}) == "128"
    assert prompt_length({"b": other}) == "512"


def test_speeds_of_two_devices_are_not_compared() -> None:
    variants = {
        "slow": variant(6, 0.1, 0.0, 100.0, timing_engine=TIMING_ENGINE | {"device": "cpu"}),
        "slower": variant(5, 0.1, 0.0, 50.0, timing_engine=TIMING_ENGINE | {"device": "cpu"}),
        "fast": mlx_variant(4, 0.1, 0.0, 1000.0, timing_engine=MLX_TIMING_ENGINE, unrepresentative=None),
    }
    found = {pick.question: pick.variant for pick in picks_of(variants)[1:-1]}
    question = "fastest prefill within 3 % of the reference's perplexity"
    assert found == {f"{question}, on cpu": "slow", f"{question}, on gpu": "fast"}
    assert {pick.question: pick.variant for pick in picks_of({"fast": variants["fast"]})[1:-1]} == {question: "fast"}
