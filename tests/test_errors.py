"""What errors are made of: lists of problems, and hints for a word that is not known."""

from __future__ import annotations

import os

import pytest

from pipeline.cores import physical_cores, usable_cores
from pipeline.errors import CheckpointError, PipelineError, TokenizerError, gathered, listed, suggestion, together


def test_every_problem_is_listed() -> None:
    assert listed(["one", "two"]) == "  - one\n  - two"
    lines = listed([f"problem {i}" for i in range(5000)]).split("\n")
    assert lines == [f"  - problem {i}" for i in range(5000)]  # none is left out, however many
    assert listed([]) == ""


@pytest.mark.parametrize(
    ("word", "said"),
    [("q4_k", "did you mean 'q4_k_m'?"), ("q4_1", "did you mean 'q4_0'?"), ("zzz", "known: q4_0, q4_k_m.")],
)
def test_a_word_close_to_a_known_one_is_suggested(word: str, said: str) -> None:
    assert suggestion(word, ["q4_0", "q4_k_m"]) == said


# Threads


def test_cores_are_those_that_this_process_may_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 3, 5}, raising=False)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 16 if logical else 8)
    assert (usable_cores(), physical_cores()) == (3, 3)
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: 4 if logical else 2)
    assert physical_cores() == 2  # hyper-threads do not count
    monkeypatch.setattr("psutil.cpu_count", lambda logical=True: None)
    assert physical_cores() == 3


def test_where_affinity_is_not_known_all_cores_are_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 6)
    assert usable_cores() == 6
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("problems", "kind", "text"),
    [
        ([CheckpointError("a")], CheckpointError, "a"),
        ([CheckpointError("a"), CheckpointError("b"), CheckpointError("a")], CheckpointError, "a\n\nb"),
        ([CheckpointError("a"), TokenizerError("b")], PipelineError, "a\n\nb"),
    ],
)
def test_problems_are_raised_together(problems: list[PipelineError], kind: type[PipelineError], text: str) -> None:
    def stopping() -> None:
        with together(problems[:1]) as found, gathered(found):
            for problem in problems[1:]:
                with gathered(found):
                    raise problem

    with pytest.raises(PipelineError) as caught:
        stopping()
    assert (type(caught.value), str(caught.value)) == (kind, text)
    with together() as found:
        pass
    assert found == []
