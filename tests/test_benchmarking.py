"""Artifact folders timed: side by side, one at a time, cold, with settings of their own, within their context."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from support import Shape, write_checkpoint

from pipeline import artifact, benchmarking
from pipeline.benchmarking import benchmark_folders
from pipeline.errors import MeasurementError, ParamsError
from pipeline.formats import room
from pipeline.metrics import visits
from pipeline.metrics.visits import Opening, cold_start, there_and_back, visit
from pipeline.processes import in_own_process

SETTINGS = {"device": "cpu", "threads": 1, "flash_attention": "auto", "kv_type": "f16"}
CONTEXT = 300
SHAPE = Shape("qwen3", 2, hidden=64, ff=96, heads=2, kv_heads=2, head_dim=32)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("benchmarking")
    source = write_checkpoint(root / "source", SHAPE, config={"max_position_embeddings": CONTEXT})
    made = {scheme: root / scheme for scheme in ("q8_0", "bf16", "q4_0")}
    for scheme, folder in made.items():
        artifact.convert(source, "gguf", scheme, folder)
    return made


def timed(folders: dict[str, Path], lengths: list[int], rounds: int = 2, **other: Any) -> dict[str, Any]:
    return benchmark_folders(folders, lengths, 4, rounds, **{"settings": SETTINGS, **other})


@pytest.fixture(scope="module")
def side_by_side(folders: dict[str, Path]) -> dict[str, Any]:
    overrides = {"q8_0": {"kv_type": "q8_0", "flash_attention": True}}
    return timed(folders, [8, 512, 16], overrides=overrides)


# Side by side


def test_small_artifacts_are_timed_in_interleaved_rounds(side_by_side: dict[str, Any]) -> None:
    assert (side_by_side["order"], side_by_side["rounds_per_visit"]) == ("interleaved", 1)
    assert side_by_side["visits"] == ["q8_0", "bf16", "q4_0", "bf16", "q4_0", "q8_0"]
    assert side_by_side["settings"] == {"prompt_lengths": [8, 512, 16], "decode": 4, "rounds": 2, **SETTINGS}
    for variant in side_by_side["variants"].values():
        assert [*variant["prefill"]] == ["8", "16"]
        assert [*variant["decode"]] == ["4"]
        for task in [*variant["prefill"].values(), *variant["decode"].values()]:
            assert len(task["seconds"]) == 2
            assert task["drift"].keys() == {"value", "p_value", "drifted"}


def test_a_length_beyond_the_context_is_not_measured_and_says_why(side_by_side: dict[str, Any]) -> None:
    reason = "with 4 tokens to decode it is beyond its context of 300"
    for variant in side_by_side["variants"].values():
        assert variant["not_measured"] == {"prefill 512": reason}


def test_a_length_that_fills_the_context_is_measured(folders: dict[str, Path]) -> None:
    found = timed({"q8_0": folders["q8_0"]}, [CONTEXT - 4, CONTEXT - 3])["variants"]["q8_0"]
    assert [*found["prefill"]] == [str(CONTEXT - 4)]
    assert [*found["not_measured"]] == [f"prefill {CONTEXT - 3}"]


def test_no_length_that_fits_is_an_error(folders: dict[str, Path]) -> None:
    said = "bf16: no prompt fits its context of 300 tokens: the shortest takes 297 and 4 to decode"
    with pytest.raises(MeasurementError, match=said):
        timed({"bf16": folders["bf16"]}, [512, 297])


def test_settings_of_its_own_are_over_those_of_all(side_by_side: dict[str, Any]) -> None:
    seen = {
        name: (variant["engine"]["kv_type"], variant["engine"]["flash_attention"])
        for name, variant in side_by_side["variants"].items()
    }
    assert seen == {"q8_0": ("q8_0", "on"), "bf16": ("f16", "auto"), "q4_0": ("f16", "auto")}
    values = 2 * SHAPE.layers * SHAPE.kv_heads * SHAPE.head_dim * 256  # 16 + 4 tokens take 256
    assert side_by_side["variants"]["bf16"]["kv_bytes"] == values * 2
    assert side_by_side["variants"]["q8_0"]["kv_bytes"] == values * 34 // 32


def test_a_kv_type_that_does_not_exist_is_refused(folders: dict[str, Path]) -> None:
    with pytest.raises(ParamsError, match="kv_type 'q9' does not exist"):
        timed({"bf16": folders["bf16"]}, [8], overrides={"bf16": {"kv_type": "q9"}})


# Cold starts and memory


def test_cold_starts_are_kept_apart_with_all_samples(side_by_side: dict[str, Any]) -> None:
    for variant in side_by_side["variants"].values():
        cold = variant["cold_start"]
        assert cold["tokens"] == 8
        assert isinstance(cold["page_cache_dropped"], bool)
        for key in ("load_seconds", "first_prefill_seconds"):
            samples = cold[key]["samples"]
            assert len(samples) == benchmarking.COLD_STARTS == 3
            assert 0 < min(samples) <= cold[key]["value"] == median(samples)
            assert not set(samples) & set(variant["prefill"]["8"]["seconds"])
        assert 10e6 < variant["peak_memory_bytes"] < 500e6
        assert variant["memory_by"] == "resident set"
        assert variant["unrepresentative"] is None


def opening(folder: Path, lengths: tuple[int, ...] = (8, 16), **settings: Any) -> Opening:
    own = SETTINGS | {"flash_attention": None} | settings
    return Opening(folder, artifact.load(folder), lengths, 4, own)


@pytest.mark.parametrize("dropped", [True, False])
def test_a_cold_start_says_whether_the_weights_came_from_the_disk(
    dropped: bool, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[Path] = []
    monkeypatch.setattr(visits, "drop_from_page_cache", lambda paths: asked.extend(paths) or dropped)
    found = cold_start(opening(folders["q8_0"]), and_memory=False)
    assert found.page_cache_dropped is dropped
    assert asked == [folders["q8_0"] / "model.gguf"]
    assert found.peak_memory_bytes is None


def test_peak_memory_is_that_of_the_longest_prompt_and_its_cache(tmp_path: Path) -> None:
    """A cache of 33 MB against one of 4 MB, in the same process that has had its cold start."""
    shape = Shape("qwen3", 4, hidden=64, ff=64, heads=8, kv_heads=8, head_dim=64)
    source = write_checkpoint(tmp_path / "c", shape, config={"max_position_embeddings": 4096})
    artifact.convert(source, "gguf", "q8_0", tmp_path / "made")
    short, long = (
        in_own_process("x", cold_start, opening(tmp_path / "made", (8, length), kv_type="f32"), True)
        for length in (16, 2000)
    )
    assert (short.kv_bytes, long.kv_bytes) == (2 * 4 * 8 * 64 * 4 * 256, 2 * 4 * 8 * 64 * 4 * 2048)
    assert (short.tokens, long.tokens) == (8, 8)
    grown = (long.peak_memory_bytes or 0) - (short.peak_memory_bytes or 0)
    assert grown > 0.9 * (long.kv_bytes - short.kv_bytes)


# One at a time


@pytest.fixture(scope="module")
def one_at_a_time(folders: dict[str, Path]) -> dict[str, Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(benchmarking, "half_of_memory", lambda: 1000.0)
        patch.setattr(benchmarking, "_side_by_side", None)
        return timed({name: folders[name] for name in ("q8_0", "bf16")}, [8, 512], rounds=7)


def test_artifacts_beyond_half_of_memory_are_visited_there_and_back(one_at_a_time: dict[str, Any]) -> None:
    assert one_at_a_time["order"] == "abba"
    assert one_at_a_time["visits"] == ["q8_0", "bf16", "bf16", "q8_0"]
    assert one_at_a_time["rounds_per_visit"] == 4  # two visits of 4 are the 7 asked for, and one
    for variant in one_at_a_time["variants"].values():
        for task in (variant["prefill"]["8"], variant["decode"]["4"]):
            assert len(task["seconds"]) == 8
            assert len(task["warm_up_seconds"]) >= 4  # each visit warms up
            assert all(0 <= at < 8 for at in task["disturbed_rounds"])
        assert [*variant["not_measured"]] == ["prefill 512"]
        assert variant["engine"]["name"] == "llama.cpp"
        assert len(variant["cold_start"]["load_seconds"]["samples"]) == 3


def test_the_sizes_decide(folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """They stay side by side while they sum to less than half of memory."""
    sizes = sum(artifact.load(folder).size_bytes for folder in folders.values())
    seen: list[str] = []
    monkeypatch.setattr(benchmarking, "_cold_starts", lambda openings: {name: [] for name in openings})
    for way in ("_side_by_side", "_one_at_a_time"):
        monkeypatch.setattr(benchmarking, way, lambda *_, way=way: seen.append(way))
    for half in (sizes + 1.0, float(sizes)):
        monkeypatch.setattr(benchmarking, "half_of_memory", lambda half=half: half)
        with pytest.raises(AttributeError):  # nothing was timed
            timed(folders, [8])
    assert seen == ["_side_by_side", "_one_at_a_time"]


def test_three_go_forward_and_backward() -> None:
    assert there_and_back(["a", "b", "c"]) == [*"abc", *"cba"]
    assert there_and_back(["a"]) == ["a", "a"]


def test_visits_go_on_with_prompts_no_one_has_seen(folders: dict[str, Path]) -> None:
    first = visit(opening(folders["q8_0"]), 1, 0)
    second = visit(opening(folders["q8_0"]), 1, first.given)
    assert first.given >= 3 * 3  # three tasks, warmed up twice at least
    assert second.given >= first.given + 9


def kill(*_: Any) -> None:
    os.kill(os.getpid(), 9)


@pytest.mark.parametrize("of", ["cold_start", "visit"])
def test_an_artifact_whose_process_dies_is_named(
    of: str, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmarking, "half_of_memory", lambda: 0.0)
    monkeypatch.setattr(benchmarking, "COLD_STARTS", 1)
    monkeypatch.setattr(benchmarking, of, kill)
    what = {"cold_start": "bf16, cold start", "visit": "bf16, timing"}[of]
    with pytest.raises(MeasurementError, match=rf"{what}: its process was killed \(signal 9\)"):
        timed({"bf16": folders["bf16"]}, [8])


# Artifacts that this machine cannot run


@pytest.fixture
def no_mlx(folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of a format that cannot be timed here: it is never opened."""
    place = tmp_path / "elsewhere"
    shutil.copytree(folders["q4_0"], place)
    raw = json.loads((place / artifact.FILE).read_text())
    (place / artifact.FILE).write_text(json.dumps(raw | {"format": "mlx"}))
    monkeypatch.setattr(room("mlx", "run"), "unmeasurable", lambda: "needs macOS")
    for name in ("open_runtime", "context_length", "unrepresentative"):
        monkeypatch.setattr(room("mlx", "run"), name, None)
    return place


def test_what_cannot_be_timed_here_is_listed_with_the_reason(folders: dict[str, Path], no_mlx: Path) -> None:
    speed = timed({"elsewhere": no_mlx, "q8_0": folders["q8_0"]}, [16, 8, 512])
    found = speed["variants"]["elsewhere"]
    assert found == {
        "artifact": artifact.load(no_mlx).files,
        "engine": None,
        "placement": None,
        "prefill": {},
        "decode": {},
        "unrepresentative": None,
        "not_measured": dict.fromkeys(("prefill 8", "prefill 16", "prefill 512", "decode 4"), "needs macOS"),
        "cold_start": {},
        **dict.fromkeys(("peak_memory_bytes", "memory_by", "kv_bytes")),
    }
    assert speed["visits"] == ["q8_0", "q8_0"]
    other = speed["variants"]["q8_0"]
    assert other["engine"]["name"] == "llama.cpp"
    assert other["placement"] is None
    assert [*other["prefill"]] == ["8", "16"]


def test_there_may_be_nothing_to_time(no_mlx: Path) -> None:
    speed = timed({"elsewhere": no_mlx}, [8])
    assert (speed["order"], speed["visits"], speed["rounds_per_visit"]) == ("interleaved", [], 1)
    assert speed["variants"]["elsewhere"]["not_measured"] == {"prefill 8": "needs macOS", "decode 4": "needs macOS"}


def test_settings_are_checked_also_where_nothing_is_timed(no_mlx: Path) -> None:
    with pytest.raises(ParamsError, match="device 'gpux' does not exist; known: auto, cpu"):
        timed({"elsewhere": no_mlx}, [8], settings=SETTINGS | {"device": "gpux"})
    with pytest.raises(ParamsError, match="kv_type q8_0 is a setting of GGUF"):
        timed({"elsewhere": no_mlx}, [8], overrides={"elsewhere": {"kv_type": "q8_0"}})


@pytest.mark.parametrize("half", [1e12, 0.0])
def test_placement_is_that_of_the_runtime(
    half: float, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Asked where the runtime is: in this process, or in the one of a visit."""
    placement = {"prefill": {"cpu": 0.25, "gpu": 0.0, "neural_engine": 0.75}}
    monkeypatch.setattr(benchmarking, "half_of_memory", lambda: half)
    monkeypatch.setattr(benchmarking, "_cold_starts", lambda openings: {name: [] for name in openings})
    monkeypatch.setattr(benchmarking, "in_own_process", lambda what, function, *args: function(*args))
    monkeypatch.setattr(room("gguf", "run").GgufRuntime, "placement", lambda self: placement)
    assert timed({"bf16": folders["bf16"]}, [8])["variants"]["bf16"]["placement"] == placement
