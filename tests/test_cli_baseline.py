"""`quantgate baseline` in a project folder."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path

import numpy as np
import pytest
from commands import refused, run, squeezed, succeeded
from figures import IDENTITY, hand_made
from left import LOGPROB, edit, leave, write_scores

from pipeline import paths
from pipeline.checks import baseline
from pipeline.files import write_json

PARAMS = """
checkpoint: tiny
revision: null
corpus: {name: sample, path: null, windows: 40, context: 512}
variants:
  a: {format: gguf, scheme: q4_0}
  b: {format: gguf, scheme: q4_0}
evaluate: {}
benchmark: {}
gate: {limits: {default: {max_kld_mean: 9.0, max_regression: 0.002}}}
"""


@pytest.fixture(autouse=True)
def project(tmp_path: Path) -> Iterator[Path]:
    leave(tmp_path, ["a", "b"])
    (tmp_path / "params.yaml").write_text(PARAMS)
    with chdir(tmp_path):
        yield tmp_path


def fits(text: str) -> bool:
    return max(map(len, text.splitlines())) <= 80


def test_accept_then_diff_then_gate_like(project: Path) -> None:
    said = succeeded("baseline", "accept").stdout
    assert [line.split()[:2] for line in said.splitlines()[1:3]] == [["a", "new"], ["b", "new"]]
    assert said.endswith("\nwrote reports/baseline.json. Commit it.\n")
    same = succeeded("baseline", "diff").stdout.splitlines()
    assert [line.split() for line in same[1:]] == [[name, "same", same[1].split()[2], "0"] for name in ("a", "b")]
    write_scores(project, "b", LOGPROB - np.float32(0.01))
    found = succeeded("baseline", "diff").stdout
    assert fits(found)
    assert ["b", "changed"] in [line.split()[:2] for line in found.splitlines()]
    assert "other in 40 of 40 windows" in " ".join(found.split())
    assert "b" not in succeeded("baseline", "diff", "a").stdout.split()
    again = succeeded("baseline", "accept", "b").stdout
    assert ["b", "changed"] in [line.split()[:2] for line in again.splitlines()]
    assert "changed" not in succeeded("baseline", "diff").stdout


def test_accept_of_one_leaves_the_others_alone(project: Path) -> None:
    succeeded("baseline", "accept")
    before = baseline.load(paths.BASELINE)
    for name in "ab":
        write_scores(project, name, LOGPROB - np.float32(0.01))
    succeeded("baseline", "accept", "a", "a")
    after = baseline.load(paths.BASELINE)
    assert before is not None
    assert after is not None
    assert after.records["a"] != before.records["a"]
    assert after.records["b"] == before.records["b"]


def test_a_variant_that_is_gone_is_dropped(project: Path) -> None:
    succeeded("baseline", "accept")
    (project / "params.yaml").write_text(PARAMS.replace("  b: {format: gguf, scheme: q4_0}\n", ""))
    assert "dropped b: params.yaml has no such variant" in succeeded("baseline", "diff").stdout
    assert "dropped b: params.yaml has no such variant" in succeeded("baseline", "accept").stdout
    found = baseline.load(paths.BASELINE)
    assert found is not None
    assert list(found.records) == ["a"]


def test_show_lists_what_was_accepted(project: Path) -> None:
    succeeded("baseline", "accept")
    said = succeeded("baseline", "show").stdout
    loss = -float(LOGPROB.mean(dtype=np.float64))
    assert fits(said)
    assert said.splitlines()[1].split() == ["a", "q4_0", "1", "40", f"{loss:.5f}", f"{np.exp(loss):.3f}", "1"]
    assert "engine 1: llama.cpp (b1), cpu, AVX2, KV f16, flash attention off" in said
    assert "scored on sample (text 111111111111…), 40 windows of 512 tokens, of tiny" in said


def test_speeds_are_kept_where_asked(project: Path) -> None:
    measured = hand_made()
    big = measured["variants"]["big"]
    measured["variants"] = {name: {**big, "tensors_sha256": name} for name in ("a", "b")}
    write_json(paths.MEASUREMENTS, measured)
    assert "speeds of this machine: a, b\n" in succeeded("baseline", "accept", "--speed").stdout
    assert "speeds of A CPU" in succeeded("baseline", "show").stdout
    found = baseline.load(paths.BASELINE)
    assert found is not None
    ((machine, speed),) = found.speeds.items()
    assert len(machine) == 8
    assert speed["variants"]["a"]["prefill"] == big["prefill"]
    measured["variants"]["b"]["tensors_sha256"] = "other"
    write_json(paths.MEASUREMENTS, measured)
    said = refused("baseline", "accept", "--speed")
    assert "b: reports/measurements.json is of another artifact: run dvc repro" in said


@pytest.mark.parametrize(
    ("params", "said"),
    [
        (
            ("scheme: q4_0}\n  b", "scheme: q8_0}\n  b"),
            "a: it was measured as q4_0, params.yaml says q8_0",
        ),
        (("checkpoint: tiny", "checkpoint: other"), "the reference is of the checkpoint tiny, params.yaml says other"),
        (("windows: 40", "windows: 50"), "b: its windows is 40, params.yaml says 50: run dvc repro"),
        (("name: sample", "name: wikitext-2"), "a: its corpus is sample, params.yaml says wikitext-2: run dvc repro"),
    ],
)
def test_figures_of_other_params_are_refused(params: tuple[str, str], said: str, project: Path) -> None:
    (project / "params.yaml").write_text(PARAMS.replace(*params))
    assert squeezed(said) in squeezed(refused("baseline", "accept"))
    assert not paths.BASELINE.exists()


def test_every_problem_is_named_and_nothing_written(project: Path) -> None:
    succeeded("baseline", "accept")
    before = paths.BASELINE.read_bytes()
    paths.scores("a").unlink()
    edit(paths.variant("b") / "artifact.json", lambda found: found["files"].update({"model.gguf": "00" * 32}))
    said = refused("baseline", "accept")
    assert "nothing was accepted" in said
    assert "a: artifacts/scores/a.npz is absent: run dvc repro" in said
    assert "b: its scores are of another artifact than artifact.json names" in said
    assert paths.BASELINE.read_bytes() == before


def test_scores_on_another_text_than_the_reference_are_refused(project: Path) -> None:
    edit(paths.quality("b"), lambda found: found.update(identity=IDENTITY | {"text_sha256": "99" * 32}))
    said = refused("baseline", "accept")
    assert "b: its text_sha256 is not the reference's: expected 111111111111…, found 999999999999…" in said
    assert "a:" not in said


def test_what_cannot_be_is_refused(project: Path) -> None:
    assert "params.yaml has no variant 'c'" in refused("baseline", "accept", "c")
    for command in ("show", "diff"):
        assert "reports/baseline.json is absent: nothing was ever accepted here" in refused("baseline", command)
    write_json(paths.BASELINE, {"version": 7})
    for command in ("show", "diff", "accept"):
        assert "is of version 7, this quantgate reads version 1" in refused("baseline", command)
    assert json.loads(paths.BASELINE.read_text()) == {"version": 7}


def test_a_run_without_a_record_is_said_by_diff(project: Path) -> None:
    succeeded("baseline", "accept")
    paths.quality("a").unlink()
    said = run("baseline", "diff")
    assert said.exit_code == 0
    assert "absent a: this run has no record of it" in said.stdout
