"""Timing with runtimes that return chosen seconds, and with ones that truly work or sleep."""

from __future__ import annotations

import json
import math
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from getpass import getuser
from itertools import count
from typing import Any

import numpy as np
import pytest
import scipy.stats

from pipeline.errors import MeasurementError
from pipeline.metrics import machine, timing
from pipeline.metrics.timing import Drift, Prompts, Samples, Task, as_json, drift_of, rate_of, rotated, tasks_of
from pipeline.metrics.trends import mann_kendall_p, theil_sen_slope
from pipeline.types import Engine, Interval

VOCAB = 1000
LENGTHS = [16, 8]


def engine(threads: int, device: str = "cpu") -> Engine:
    return Engine("fake", "1", "none", device, "f16", "off", threads)


@dataclass
class Fake:
    """Takes no time and says what `clock` says; with no thread at all nothing can disturb it."""

    clock: Callable[[str, int], float]
    name: str = "a"
    log: list[tuple[str, str, int]] = field(default_factory=list)
    prompts: list[np.ndarray] = field(default_factory=list)
    threads: int = 0
    vocab_size: int = VOCAB
    device: str = "cpu"
    kv_bytes: int = 0
    native: None = None

    @property
    def engine(self) -> Engine:
        return engine(self.threads, self.device)

    def score(self, ids: np.ndarray, start: int) -> Iterator[np.ndarray]:
        raise AssertionError("timing scores nothing")

    def prefill(self, ids: np.ndarray) -> float:
        self.log.append((self.name, "prefill", len(ids)))
        self.prompts.append(ids.copy())
        return self.clock("prefill", len(ids))

    def decode(self, n: int) -> float:
        self.log.append((self.name, "decode", n))
        return self.clock("decode", n)

    def close(self) -> None:
        pass


def steady(kind: str, tokens: int) -> float:
    return tokens / (100.0 if kind == "prefill" else 10.0)


def fakes(*names: str, clock: Callable[[str, int], float] = steady) -> dict[str, Fake]:
    log: list[tuple[str, str, int]] = []
    return {name: Fake(clock, name, log) for name in names}


def measure(
    runtimes: dict[str, Fake], *, prompt_lengths: list[int], decode: int, rounds: int, **other: Any
) -> dict[str, Samples]:
    """The same tasks of every runtime."""
    return timing.measure(runtimes, dict.fromkeys(runtimes, tasks_of(prompt_lengths, decode)), rounds, **other)


# Rounds


def test_rounds_visit_the_variants_in_rotated_order() -> None:
    runtimes = fakes("a", "b", "c")
    measure(runtimes, prompt_lengths=LENGTHS, decode=4, rounds=4)
    visits = [name for name, kind, _ in runtimes["a"].log if kind == "decode"]
    assert visits == [*"aabbcc", *"abc", *"bca", *"cab", *"abc"]  # two warm-up rounds agree at once


def test_a_visit_prefills_every_length_and_decodes_behind_the_shortest() -> None:
    runtimes = fakes("a")
    measure(runtimes, prompt_lengths=[16, 8, 16], decode=4, rounds=1)
    last = runtimes["a"].log[-4:]
    assert last == [("a", "prefill", 8), ("a", "prefill", 16), ("a", "prefill", 8), ("a", "decode", 4)]


def test_progress_is_told_of_every_visit() -> None:
    told: list[float] = []
    measure(fakes("a", "b", "c"), prompt_lengths=[8], decode=4, rounds=5, advance=told.append)
    assert told == [1] * 3 * (5 + 1)


def test_every_sample_is_kept_in_order() -> None:
    ticks = count(100)
    runtimes = fakes("a", clock=lambda kind, n: float(next(ticks)))  # 100, 101, 102, …: within 5 % of each other
    samples = measure(runtimes, prompt_lengths=[8], decode=4, rounds=7)["a"]
    prefill, decode = Task("prefill", 8), Task("decode", 4, behind=8)
    assert samples.warm_up == {prefill: [100.0, 101.0], decode: [103.0, 105.0]}  # a decode's own prefill is dropped
    assert samples.seconds == {
        prefill: [106.0 + 3 * i for i in range(7)],
        decode: [108.0 + 3 * i for i in range(7)],
    }
    assert samples.disturbed == {}


def all_prompts(lengths: list[int], vocab: int) -> list[np.ndarray]:
    runtimes = fakes("a", "b")
    runtimes["b"].vocab_size = vocab
    measure(runtimes, prompt_lengths=lengths, decode=4, rounds=7)
    return runtimes["a"].prompts + runtimes["b"].prompts


def test_prompts_are_unique_and_within_the_smaller_vocabulary() -> None:
    prompts = all_prompts([8, 16], 300)
    assert len(prompts) == 2 * (2 + 7) * 3
    assert len({prompt.tobytes() for prompt in prompts}) == len(prompts)
    ids = np.concatenate(prompts)
    assert ids.dtype == np.int32
    assert 0 <= ids.min() < 10
    assert 290 < ids.max() < 300


def test_short_prompts_are_unique_too() -> None:
    """`--prompt-length 1` is allowed, and no two prompts may be alike while there are enough tokens."""
    prompts = all_prompts([1], 300)
    assert len({prompt.tobytes() for prompt in prompts}) == len(prompts)


def test_prompts_are_the_same_in_every_run() -> None:
    assert [p.tolist() for p in all_prompts([8], 300)] == [p.tolist() for p in all_prompts([8], 300)]


# Warm-up


def test_warm_up_ends_when_two_times_agree() -> None:
    times = [40.0, 2.0, 1.06, 1.0, 1.04]
    ticks = iter([*times, *[1.0] * 100])
    samples = measure(fakes("a", clock=lambda kind, n: next(ticks)), prompt_lengths=[8], decode=4, rounds=1)["a"]
    assert samples.warm_up[Task("prefill", 8)] == times
    assert samples.seconds[Task("prefill", 8)] == [1.0]


def test_warm_up_ends_after_ten_rounds_at_most() -> None:
    ticks = (2.0 ** -(i % 40) for i in count())
    samples = measure(fakes("a", clock=lambda kind, n: next(ticks)), prompt_lengths=[8], decode=4, rounds=1)["a"]
    assert samples.warm_up[Task("prefill", 8)] == [2.0**-i for i in range(10)]


# Times that cannot be


@pytest.mark.parametrize("seconds", [0.0, -0.001, math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("kind", ["prefill", "decode"])
def test_a_time_that_cannot_be_is_an_error(kind: str, seconds: float) -> None:
    runtimes = fakes("a", clock=lambda of, n: seconds if of == kind and n == 4 else 1.0)
    with pytest.raises(MeasurementError, match=rf"{kind} of 4 tokens took {seconds} seconds"):
        measure(runtimes, prompt_lengths=[4], decode=4, rounds=7)


def test_a_prompt_that_turns_free_in_a_later_round_is_an_error() -> None:
    ticks = iter([1.0] * 10 + [0.0] * 100)
    with pytest.raises(MeasurementError, match="was a prompt cached"):
        measure(fakes("a", clock=lambda kind, n: next(ticks)), prompt_lengths=[4], decode=4, rounds=7)


# Disturbance


def slept(kind: str, n: int) -> float:
    time.sleep(0.004)
    return 0.004


def busy(kind: str, n: int) -> float:
    begin = time.process_time()
    while time.process_time() - begin < 0.02:
        pass
    return 0.02


def test_a_disturbed_round_is_repeated_three_times_and_marked() -> None:
    runtime = Fake(slept, threads=2)
    samples = measure({"a": runtime}, prompt_lengths=[8], decode=4, rounds=2)["a"]
    prefill, decode = Task("prefill", 8), Task("decode", 4, behind=8)
    assert samples.disturbed == {prefill: [0, 1], decode: [0, 1]}
    assert samples.seconds == {prefill: [0.004] * 2, decode: [0.004] * 2}  # one sample per round
    calls = [kind for _, kind, _ in runtime.log]
    assert calls.count("decode") == 2 + 2 * (1 + timing.REPEATS)
    assert timing.REPEATS == 3


def test_work_on_a_gpu_is_never_marked() -> None:
    """It takes no CPU time, which therefore says nothing."""
    runtime = Fake(slept, threads=2, device="gpu")
    samples = measure({"a": runtime}, prompt_lengths=[8], decode=4, rounds=2)["a"]
    assert samples.disturbed == {}
    assert samples.seconds == {Task("prefill", 8): [0.004] * 2, Task("decode", 4, behind=8): [0.004] * 2}
    assert [kind for _, kind, _ in runtime.log].count("decode") == 2 + 2  # nothing was repeated


def test_work_on_one_core_of_two_is_disturbed() -> None:
    samples = measure({"a": Fake(busy, threads=2)}, prompt_lengths=[8], decode=4, rounds=1)["a"]
    assert samples.disturbed == {Task("prefill", 8): [0], Task("decode", 4, behind=8): [0]}


def test_undisturbed_work_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy loop; the wall clock is that of a machine with nothing else to do, since the one of the test has."""
    monkeypatch.setattr(timing.time, "perf_counter", time.process_time)
    runtime = Fake(busy, threads=1)
    samples = measure({"a": runtime}, prompt_lengths=[8], decode=4, rounds=2)["a"]
    assert samples.disturbed == {}
    assert [kind for _, kind, _ in runtime.log].count("decode") == 2 + 2


def test_a_round_disturbed_once_is_replaced_and_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    wall = [0.0]
    durations = iter([1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 9.0, 2.0])  # warm-up: 6 calls; the first try of the round is slow

    def clock(kind: str, n: int) -> float:
        seconds = next(durations, 1.0)
        wall[0] += seconds
        return seconds

    cpu = count()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: wall[0])
    monkeypatch.setattr(timing.time, "process_time", lambda: 2.0 * next(cpu))  # two seconds of CPU time a task
    samples = measure({"a": Fake(clock, threads=1)}, prompt_lengths=[8], decode=4, rounds=1)["a"]
    assert samples.seconds[Task("prefill", 8)] == [2.0]
    assert samples.disturbed == {}


# Drift


def slowing(share: float) -> Callable[[str, int], float]:
    """Every prefill takes that much longer than the last one; those of decodes, of 1 token, do not count."""
    rounds = count()
    return lambda kind, n: (1 + share) ** next(rounds) if kind == "prefill" and n > 1 else 1.0


def test_a_runtime_that_slows_by_3_percent_a_round_drifts() -> None:
    samples = measure(fakes("a", clock=slowing(0.03)), prompt_lengths=[1, 8], decode=4, rounds=7)["a"]
    drift = as_json(samples)["prefill"]["8"]["drift"]
    speeds = [1.03**-i for i in range(7)]
    slope = float(scipy.stats.theilslopes(speeds).slope)
    assert drift["value"] == pytest.approx(slope * 6 / speeds[3], rel=1e-12)
    assert drift["value"] == pytest.approx(-0.18, abs=0.005)
    assert drift["p_value"] == pytest.approx(2 / math.factorial(7))
    assert drift["drifted"] is True
    assert as_json(samples)["prefill"]["1"]["drift"] == {"value": 0.0, "p_value": 1.0, "drifted": False}


def test_a_runtime_that_grows_faster_drifts_too() -> None:
    samples = measure(fakes("a", clock=slowing(-0.02)), prompt_lengths=[8], decode=4, rounds=7)["a"]
    assert as_json(samples)["prefill"]["8"]["drift"]["value"] > 0.05
    assert as_json(samples)["prefill"]["8"]["drift"]["drifted"] is True


def test_jitter_is_no_drift() -> None:
    """Of runs that only jitter, by 10 %, chance alone is rarely taken for a drift; more rounds do not change that."""
    rng = np.random.default_rng(5)
    for rounds in (7, 25):
        runs = rng.lognormal(0, 0.1, (400, rounds))
        assert np.mean([drift_of(run.tolist()).drifted for run in runs]) <= 0.05
    jitter = iter([1.0] * 6 + [1.0, 1.0, 1.06, 1.0, 0.95, 1.0, 1.04, 1.0, 0.97, 1.0, 1.02, 1.0, 1.01, 1.0] * 3)
    samples = measure(fakes("a", clock=lambda kind, n: next(jitter)), prompt_lengths=[8], decode=4, rounds=7)["a"]
    assert len(set(samples.seconds[Task("prefill", 8)])) > 3
    assert not as_json(samples)["prefill"]["8"]["drift"]["drifted"]


def test_a_steady_but_small_trend_is_no_drift() -> None:
    found = drift_of([1.005**i for i in range(9)])
    assert found.p_value < 0.001
    assert -0.05 < found.share < -0.03
    assert not found.drifted


def test_a_single_round_has_no_drift() -> None:
    assert drift_of([1.0]) == Drift(0.0, 1.0)


# Visits


def test_rotation_and_tasks() -> None:
    assert [*rotated("abc", 4)] == [*"abc", *"bca", *"cab", *"abc"]
    assert tasks_of([16, 8, 16], 4) == [Task("prefill", 8), Task("prefill", 16), Task("decode", 4, behind=8)]


def test_a_later_visit_is_counted_on() -> None:
    prefill, decode = Task("prefill", 8), Task("decode", 4, behind=8)
    first = Samples({prefill: [1.0, 2.0], decode: [3.0, 4.0]}, {prefill: [1]}, {prefill: [9.0], decode: [8.0]})
    later = Samples({prefill: [5.0, 6.0], decode: [7.0, 8.0]}, {prefill: [0], decode: [1]}, {prefill: [7.0, 7.0]})
    first.add(later)
    assert first == Samples(
        {prefill: [1.0, 2.0, 5.0, 6.0], decode: [3.0, 4.0, 7.0, 8.0]},
        {prefill: [1, 2], decode: [3]},
        {prefill: [9.0, 7.0, 7.0], decode: [8.0]},
    )


def test_prompts_go_on_where_the_last_visit_ended() -> None:
    """Also those of one token, while there are enough."""
    for length in (1, 8):
        first = Prompts(300)
        before = [first.next(length) for _ in range(20)]
        assert first.given == 20
        second = Prompts(300, first.given)
        prompts = before + [second.next(length) for _ in range(20)]
        assert len({prompt.tobytes() for prompt in prompts}) == 40
        assert second.given == 40


# Figures


def test_rate_times_seconds_is_tokens() -> None:
    assert rate_of([0.4] * 7, 128) == Interval(320.0, 320.0, 320.0, 7)
    seconds = [0.5, 0.25, 0.125, 1.0, 2.0, 0.4, 0.8]
    found = rate_of(seconds, 64)
    assert found.value * sorted(seconds)[3] == pytest.approx(64, rel=1e-14)
    assert (found.low, found.high) == (64 / 2.0, 64 / 0.125)
    assert rate_of([1.0] * 5, 10) == Interval(10.0, -math.inf, math.inf, 5)


def test_json_holds_the_raw_seconds_and_rates() -> None:
    seconds = [0.5, 0.25, 0.125, 1.0, 2.0, 0.4, 0.8]
    prefill, decode = Task("prefill", 128), Task("decode", 8, behind=128)
    samples = Samples(
        seconds={prefill: seconds, decode: [1.0, 2.0]},
        disturbed={decode: [1]},
        warm_up={prefill: [9.0, 1.0, 1.0], decode: [2.0, 2.0]},
    )
    found = json.loads(json.dumps(as_json(samples), allow_nan=False))
    assert found == {
        "prefill": {
            "128": {
                "seconds": seconds,
                "warm_up_seconds": [9.0, 1.0, 1.0],
                "disturbed_rounds": [],
                "tokens_per_second": {"value": 128 / 0.5, "low": 64.0, "high": 1024.0},
                "drift": {
                    "value": pytest.approx(theil_sen_slope([1 / s for s in seconds]) * 6 / 2.0, rel=1e-14),
                    "p_value": mann_kendall_p([1 / s for s in seconds]),
                    "drifted": False,
                },
            }
        },
        "decode": {
            "8": {
                "seconds": [1.0, 2.0],
                "warm_up_seconds": [2.0, 2.0],
                "disturbed_rounds": [1],
                "tokens_per_second": {"value": 6.0, "low": None, "high": None},
                "drift": {"value": pytest.approx(-0.5 / 0.75), "p_value": 1.0, "drifted": False},
            }
        },
    }


def test_a_whole_measurement_has_its_median_interval() -> None:
    rates = iter([100.0, 100.0, *[100.0] * 2, *[90.0, 100.0, 110.0, 95.0, 105.0, 99.0, 101.0]])

    def clock(kind: str, n: int) -> float:
        return 1.0 if kind == "decode" or n == 1 else n / next(rates, 100.0)

    samples = measure({"a": Fake(clock)}, prompt_lengths=[8], decode=4, rounds=9)
    (figures,) = as_json(samples["a"])["prefill"].values()
    seconds = figures["seconds"]
    assert len(seconds) == 9
    ordered = sorted(8 / s for s in seconds)
    rate = figures["tokens_per_second"]
    assert (rate["value"], rate["low"], rate["high"]) == (ordered[4], ordered[1], ordered[7])


# The machine


def test_the_fingerprint_is_stable_and_names_no_one() -> None:
    first, second = machine.fingerprint(), machine.fingerprint()
    assert first == second
    assert machine.short_id(first) == machine.short_id(second)
    text = json.dumps(first).lower()
    for private in (socket.gethostname(), getuser()):
        assert f'"{private.lower()}"' not in text
        assert private.lower() not in text.replace('"', " ").split()
    assert first.keys() == {
        *("cpu", "architecture", "instruction_set", "physical_cores", "logical_cores", "memory_gib", "os")
    }
    assert first["logical_cores"] >= (first["physical_cores"] or 1) >= 1
    assert 0.5 < first["memory_gib"] < 100_000


def test_another_machine_has_another_id() -> None:
    found = {"cpu": "x", "physical_cores": 4}
    assert machine.short_id(found) == machine.short_id({"physical_cores": 4, "cpu": "x"})
    assert machine.short_id(found) != machine.short_id(found | {"physical_cores": 8})
    assert len(machine.short_id(found)) == 8


def test_the_power_source_is_one_of_three_words() -> None:
    assert machine.power_source() in {"mains", "battery", "unknown"}
