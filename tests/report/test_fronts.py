"""The fronts: what is surely better removes, what is not sure removes nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import permutations
from typing import Any

import numpy as np
import pytest
from figures import MLX_TIMING_ENGINE, TIMING_ENGINE, figure, mlx_variant, rate, variant
from numpy.typing import NDArray

from pipeline.report.fronts import ALL_THREE, SIZE_KLD, SIZE_PREFILL, fronts, fronts_of, on_front, tied

WINDOWS = 40
TEXT = np.random.default_rng(3).gamma(4.0, 0.02, WINDOWS)  # what windows have in common, far more than differences
NOISE = np.resize([0.004, -0.004], WINDOWS)


def of(**made: tuple[int, float, float | None]) -> dict[str, dict[str, Any]]:
    """Variants by size, bits per weight and prefill in tokens/s (± 10)."""
    return {
        name: variant(size, 0.1, 0.0, prefill, bits_per_weight=bits) for name, (size, bits, prefill) in made.items()
    }


def by_kld(**made: tuple[int, NDArray[np.float64]]) -> dict[str, Any]:
    """The front of size and KL, of variants by size and KL of windows."""
    variants = of(**{name: (size, 4.5, None) for name, (size, _) in made.items()})
    found: dict[str, Any] = fronts(variants, {name: kld for name, (_, kld) in made.items()})[SIZE_KLD]
    return found


def by_prefill(**made: tuple[int, dict[str, float | None]]) -> dict[str, Any]:
    variants = of(**{name: (size, 4.5, 1.0) for name, (size, _) in made.items()})
    for name, (_, found) in made.items():
        variants[name]["prefill"]["512"] = rate(0.0) | found
    return dict(fronts(variants, dict.fromkeys(variants, TEXT))[SIZE_PREFILL]["gpu"])


def of_all(**made: tuple[int, NDArray[np.float64], float]) -> dict[str, Any]:
    variants = of(**{name: (size, 4.5, prefill) for name, (size, _, prefill) in made.items()})
    return dict(fronts(variants, {name: kld for name, (_, kld, _) in made.items()})[ALL_THREE]["gpu"])


def told(front: Mapping[str, Any]) -> dict[str, tuple[bool, list[str], list[str]]]:
    return {name: (e["on_front"], [*e["beaten_by"]], [*e["ties"]]) for name, e in front.items()}


# Size and KL


def test_what_is_surely_nearer_and_not_larger_beats() -> None:
    front = by_kld(a=(4, TEXT), b=(5, TEXT + 0.01 + NOISE))
    assert told(front) == {"b": (False, ["a"], []), "a": (True, [], [])}
    difference = front["b"]["beaten_by"]["a"]["kld_difference"]
    assert difference["value"] == pytest.approx(0.01)
    assert 0 < difference["low"] < 0.01 < difference["high"]
    assert told(by_kld(a=(5, TEXT), b=(5, TEXT + 0.01 + NOISE)))["b"] == (False, ["a"], [])  # as large


def test_what_is_larger_beats_nothing() -> None:
    assert told(by_kld(a=(6, TEXT), b=(5, TEXT + 0.01))) == {"a": (True, [], []), "b": (True, [], [])}


def test_a_difference_that_is_not_sure_removes_nothing_and_is_a_tie() -> None:
    front = by_kld(a=(4, TEXT), b=(5, TEXT + 0.0005 + NOISE))
    assert told(front) == {"b": (True, [], ["a"]), "a": (True, [], ["b"])}
    ab, ba = front["a"]["ties"]["b"]["kld_difference"], front["b"]["ties"]["a"]["kld_difference"]
    assert ba["value"] == pytest.approx(0.0005)
    assert ba["low"] < 0 < ba["high"]
    assert (ab["value"], ab["low"], ab["high"]) == (-ba["value"], -ba["high"], -ba["low"])


def test_own_intervals_that_overlap_are_no_tie() -> None:
    """As a text is hard or easy for both."""
    assert 0.01 < TEXT.std() / np.sqrt(WINDOWS) * 2
    assert told(by_kld(a=(4, TEXT), b=(5, TEXT + 0.01)))["b"] == (False, ["a"], [])


def test_equal_tensors_are_a_tie() -> None:
    front = by_kld(a=(4, TEXT), b=(5, TEXT.copy()))
    assert told(front) == {"b": (True, [], ["a"]), "a": (True, [], ["b"])}
    assert front["b"]["ties"]["a"] == {"kld_difference": {"value": 0.0, "low": 0.0, "high": 0.0}}


def test_a_single_window_tells_nothing_apart() -> None:
    front = by_kld(a=(4, TEXT[:1]), b=(5, TEXT[:1] + 9))
    assert told(front) == {"b": (True, [], []), "a": (True, [], [])}


def test_only_those_on_the_front_are_named_as_beating() -> None:
    front = by_kld(a=(4, TEXT), b=(5, TEXT + 0.01), c=(6, TEXT + 0.02), d=(3, TEXT + 0.005), e=(7, TEXT + 0.03))
    assert on_front(front) == ["a", "d"]
    assert [*front["e"]["beaten_by"]] == [*front["b"]["beaten_by"]] == ["a", "d"]


def test_ties_on_the_front_are_told_without_those_that_are_beaten() -> None:
    """The smallest first: it is what a larger one has to be better than."""
    own = 5 * NOISE
    front = by_kld(a=(6, TEXT + own), b=(4, TEXT), c=(5, TEXT - NOISE), d=(7, TEXT + 0.002 + own))
    assert told(front) == {
        "d": (False, ["a"], ["c", "b"]),
        "a": (True, [], ["c", "b"]),
        "c": (True, [], ["d", "a", "b"]),
        "b": (True, [], ["d", "a", "c"]),
    }
    assert (tied(front, "b"), tied(front, "a")) == (["c", "a"], ["b", "c"])


# Size and prefill


def test_speeds_that_share_no_point_beat_and_others_tie() -> None:
    front = by_prefill(a=(4, figure(1000.0, 10.0)), b=(5, figure(979.0, 10.0)))
    assert told(front) == {"b": (False, ["a"], []), "a": (True, [], [])}
    assert front["b"]["beaten_by"]["a"] == {"prefill": figure(1000.0, 10.0)}
    front = by_prefill(a=(4, figure(1000.0, 10.0)), b=(5, figure(980.0, 10.0)))
    assert told(front) == {"b": (True, [], ["a"]), "a": (True, [], ["b"])}
    assert (front["a"]["ties"]["b"], front["b"]["ties"]["a"]) == (
        {"prefill": figure(980.0, 10.0)},
        {"prefill": figure(1000.0, 10.0)},
    )
    front = by_prefill(a=(6, figure(1000.0, 10.0)), b=(5, figure(500.0, 10.0)))
    assert told(front) == {"a": (True, [], []), "b": (True, [], [])}  # faster, and larger
    front = by_prefill(a=(4, figure(1000.0, None)), b=(5, figure(500.0, None)))
    assert told(front) == {"b": (True, [], []), "a": (True, [], [])}  # too few rounds to know


def test_only_speeds_that_users_have_are_on_a_front() -> None:
    variants = of(a=(4, 4.5, 1000.0), b=(5, 4.5, None))
    variants |= {"c": mlx_variant(3, 0.1, 0.0, 5000.0), "d": variant(6, 0.1, 0.0)}
    del variants["d"]["prefill"]["512"]
    found = fronts(variants, dict.fromkeys(variants, TEXT))
    assert found["prompt_length"] == "512"
    assert {at: [*front] for at, front in found[SIZE_PREFILL].items()} == {"gpu": ["a"]}
    assert {at: [*front] for at, front in found[ALL_THREE].items()} == {"gpu": ["a"]}
    assert [*found[SIZE_KLD]] == ["d", "b", "a", "c"]
    assert fronts_of("a", found) == [SIZE_KLD, SIZE_PREFILL, ALL_THREE]
    assert fronts_of("b", found) == [SIZE_KLD]


def test_devices_have_fronts_of_their_own() -> None:
    variants = of(a=(4, 4.5, 100.0), b=(5, 4.5, 50.0))
    variants["c"] = mlx_variant(3, 0.1, 0.0, 5000.0, timing_engine=MLX_TIMING_ENGINE, unrepresentative=None)
    for name in ("a", "b"):
        variants[name]["timing_engine"] = TIMING_ENGINE | {"device": "cpu"}
    found = fronts(variants, {"a": TEXT, "b": TEXT + 0.01, "c": TEXT - 0.01})
    for key in (SIZE_PREFILL, ALL_THREE):
        assert {at: told(front) for at, front in found[key].items()} == {
            "cpu": {"b": (False, ["a"], []), "a": (True, [], [])},
            "gpu": {"c": (True, [], [])},
        }


def test_nothing_timed_is_no_front_of_prefill() -> None:
    found = fronts(of(a=(4, 4.5, None)), {"a": TEXT})
    assert (found["prompt_length"], found[SIZE_PREFILL], found[ALL_THREE]) == (None, {}, {})
    none = fronts({}, {})
    assert (none["windows"], none[SIZE_KLD], none["fewer_bits_nearer"]) == (0, {}, {})


# All three


def test_on_all_three_both_must_be_sure() -> None:
    far, unsure = TEXT + 0.01, TEXT + 0.0005 + NOISE
    front = of_all(a=(4, TEXT, 1000.0), b=(5, far, 900.0))
    assert told(front) == {"b": (False, ["a"], []), "a": (True, [], [])}
    assert front["b"]["beaten_by"]["a"].keys() == {"kld_difference", "prefill"}
    assert front["b"]["beaten_by"]["a"]["prefill"] == figure(1000.0, 10.0)
    tie = {"b": (True, [], ["a"]), "a": (True, [], ["b"])}
    assert told(of_all(a=(4, TEXT, 1000.0), b=(5, unsure, 900.0))) == tie  # only speed is sure
    assert told(of_all(a=(4, TEXT, 1000.0), b=(5, far, 990.0))) == tie  # only KL is
    assert told(of_all(a=(4, TEXT, 1000.0), b=(5, unsure, 990.0))) == tie


@pytest.mark.parametrize(("kld", "prefill"), [(TEXT - 0.01, 900.0), (TEXT - 0.01, 1000.0), (TEXT + 0.01, 1100.0)])
def test_what_is_surely_better_in_something_is_no_tie(kld: NDArray[np.float64], prefill: float) -> None:
    none = {"b": (True, [], []), "a": (True, [], [])}
    assert told(of_all(a=(4, TEXT, 1000.0), b=(5, kld, prefill))) == none


def test_of_equal_size_what_is_better_in_one_thing_ties_where_the_other_is_not_sure() -> None:
    front = told(of_all(a=(5, TEXT, 1000.0), b=(5, TEXT + 0.01, 1005.0)))
    assert front == {"a": (True, [], ["b"]), "b": (True, [], ["a"])}


# Simulated variants of known truth


def simulated(rng: np.random.Generator, truth: Mapping[str, float], windows: int) -> dict[str, NDArray[np.float64]]:
    """KLs whose true means are those of the text plus `truth`; what is of a variant alone spreads by 0.01."""
    text = rng.gamma(4.0, 0.02, windows)
    return {name: text + of_it + rng.normal(0.0, 0.01, windows) for name, of_it in truth.items()}


def test_variants_of_the_same_truth_are_seldom_removed() -> None:
    """One in forty pairs by chance: an interval of 95 % has both tails."""
    rng, runs = np.random.default_rng(11), 400
    removed = 0
    for _ in range(runs):
        klds = simulated(rng, {"a": 0.0, "b": 0.0}, 16)
        removed += not by_kld(a=(4, klds["a"]), b=(5, klds["b"]))["b"]["on_front"]
    assert 2 <= removed <= 20  # binomial(400, 0.025): beyond these by less than 1 %


def test_a_real_difference_removes_at_enough_windows_and_not_before() -> None:
    rng = np.random.default_rng(12)
    beaten = {
        windows: sum(
            not by_kld(a=(4, klds["a"]), b=(5, klds["b"]))["b"]["on_front"]
            for klds in (simulated(rng, {"a": 0.0, "b": 0.005}, windows) for _ in range(50))
        )
        for windows in (4, 200)
    }
    assert beaten[4] < 15
    assert beaten[200] >= 48  # 0.005 are 5 standard errors


def test_fronts_of_any_variants_hold_together() -> None:
    """Never empty, ties on both sides, each beaten by one on the front, whatever the order of the variants."""
    rng = np.random.default_rng(13)
    for _ in range(40):
        names = "abcdef"
        truth = {name: float(rng.choice([0.0, 0.0, 0.01, 0.02])) for name in names}
        klds = simulated(rng, truth, 12)
        sizes, speeds = rng.integers(1, 5, 6), rng.choice([100.0, 110.0, 150.0, 200.0], 6)
        variants = of(**{n: (int(s), 4.5, float(v)) for n, s, v in zip(names, sizes, speeds, strict=True)})
        found = fronts(variants, klds)
        for front in (found[SIZE_KLD], found[SIZE_PREFILL]["gpu"], found[ALL_THREE]["gpu"]):
            assert on_front(front)
            for name, entry in front.items():
                assert entry["on_front"] == (not entry["beaten_by"])
                assert {*entry["beaten_by"]} <= {*on_front(front)}
                assert all(name in front[other]["ties"] for other in entry["ties"])
                assert not {*entry["beaten_by"]} & {*entry["ties"]}
        shuffled = [*names]
        rng.shuffle(shuffled)
        again = fronts({n: variants[n] for n in shuffled}, {n: klds[n] for n in reversed(shuffled)})
        assert json.dumps(again) == json.dumps(found)


# Bits


def order(**made: tuple[float, NDArray[np.float64]]) -> dict[str, list[str]]:
    variants = of(**{name: (4, bits, None) for name, (bits, _) in made.items()})
    found = fronts(variants, {name: kld for name, (_, kld) in made.items()})["fewer_bits_nearer"]
    return {name: [*nearer] for name, nearer in found.items()}


def test_fewer_bits_that_are_surely_nearer_are_noted() -> None:
    assert order(a=(4.5, TEXT), b=(5.5, TEXT + 0.01)) == {"b": ["a"]}
    assert order(a=(5.5, TEXT), b=(4.5, TEXT + 0.01)) == {}
    assert order(a=(4.5, TEXT), b=(5.5, TEXT + 0.0005 + NOISE)) == {}  # not sure
    assert order(a=(5.504, TEXT), b=(5.496, TEXT + 0.01)) == {}
    assert order(a=(5.496, TEXT), b=(5.504, TEXT + 0.01)) == {}  # the same number, as it is shown
    assert order(a=(4.5, TEXT[:1]), b=(5.5, TEXT[:1] + 1)) == {}


def test_each_is_noted_once_with_the_fewest_bits() -> None:
    klds = {"a": (4.5, TEXT + 0.01), "b": (5.5, TEXT), "c": (6.5, TEXT + 0.02), "d": (8.5, TEXT + 0.02)}
    for names in permutations(klds):
        assert order(**{name: klds[name] for name in names}) == {"c": ["a"], "d": ["a"]}
    variants = of(a=(4, 4.5, None), b=(4, 5.5, None))
    found = fronts(variants, {"a": TEXT, "b": TEXT + 0.01})["fewer_bits_nearer"]["b"]["a"]
    assert found.keys() == {"kld_difference"}
    assert found["kld_difference"]["value"] == pytest.approx(0.01)
