"""`inspect --imatrix`: the plans that `convert --imatrix` makes, before it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from commands import refused, run, squeezed, succeeded
from family import tiny
from support import Shape, write_checkpoint

from pipeline.console import BAD_INPUT
from pipeline.formats.gguf import imatrix
from pipeline.formats.gguf.arrange import arranged
from pipeline.formats.gguf.imatrix import Imatrix
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Sums

NEED_ONE = {f"gguf/{name}" for name in ("iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m")}


def write_imatrix(folder: Path, path: Path, without: str = "token_embd.weight", idle: int = 0) -> Path:
    """Of every matrix of a checkpoint but one; the last `idle` experts of each layer had no token."""
    checkpoint = Checkpoint(folder)
    random = np.random.default_rng(3)
    tensors = {}
    for part in arranged(spec_of(checkpoint.config, checkpoint.shapes)):
        *several, _, columns = (1, *part.tensor.shape)[-3:]
        if len(part.tensor.shape) > 1 and part.name != without:
            count = several[0]
            tokens = np.where(np.arange(count) < count - idle * (count > 1), 5, 0)
            tensors[part.name] = Sums(random.random((count, columns), np.float32) * tokens[:, None], tokens)
    imatrix.write(path, Imatrix({n: Sums(s.sums.astype(np.float32), s.tokens) for n, s in tensors.items()}, (), 1, 5))
    return path


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("inspect") / "wide", Shape(layers=8, hidden=256, ff=256))


@pytest.fixture(scope="module")
def given(wide: Path) -> Path:
    return write_imatrix(wide, wide.parent / "own.gguf")


def inspected(*arguments: object) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(succeeded("inspect", *arguments, "--json", "-").stdout)
    return found


def refused_of(found: dict[str, Any]) -> set[str]:
    return {name for name, scheme in found["schemes"].items() if "refused" in scheme}


def test_schemes_that_need_one_are_planned_with_it(wide: Path, given: Path) -> None:
    without, found = inspected(wide), inspected(wide, "--imatrix", given)
    assert without["imatrix"] is None
    assert found["imatrix"] == {"file": "own.gguf", "tensors": 56, "experts": []}
    assert refused_of(without) == NEED_ONE
    assert refused_of(found) == set()
    assert found["problems"] == []
    assert "IQ2_XS" in found["schemes"]["gguf/iq2_xs"]["effective_types"]
    plan = inspected(wide, "--imatrix", given, "--scheme", "iq2_xs")["plan"]
    assert plan == found["schemes"]["gguf/iq2_xs"]["plan"]
    said = squeezed(refused("inspect", wide, "--scheme", "iq2_xs"))
    assert squeezed("iq2_xs needs an importance matrix") in said


def test_the_other_formats_are_planned_as_without(wide: Path, given: Path) -> None:
    without, found = (inspected(wide, *more)["schemes"] for more in ((), ("--imatrix", given)))
    others = [name for name in without if not name.startswith("gguf/")]
    assert len(others) > 20
    assert {name: without[name] for name in others} == {name: found[name] for name in others}
    assert inspected(wide, "--imatrix", given, "--scheme", "mlx/int4")["plan"] == without["mlx/int4"]["plan"]


@pytest.mark.parametrize("scheme", ["q4_0", "q5_0", "iq4_nl", "iq4_xs"])
def test_it_is_the_plan_that_convert_follows(scheme: str, wide: Path, given: Path, tmp_path: Path) -> None:
    arguments = ("convert", wide, "--format", "gguf", "--scheme", scheme, "--imatrix", given)
    succeeded(*arguments, "--out", tmp_path / scheme)
    made = json.loads((tmp_path / scheme / "artifact.json").read_text())
    without, found = (inspected(wide, *more)["schemes"][f"gguf/{scheme}"] for more in ((), ("--imatrix", given)))
    weights = {name: entry["weights"] for name, entry in made["effective_types"].items()}
    assert found["effective_types"] == weights
    assert found["bits_per_weight"] == made["bits_per_weight"]
    assert without["plan"] != found["plan"]


def test_what_it_lacks_is_refused_of_the_schemes_that_need_it(wide: Path, tmp_path: Path) -> None:
    lacking = write_imatrix(wide, tmp_path / "lacking.gguf", without="blk.1.attn_q.weight")
    found = inspected(wide, "--imatrix", lacking)
    assert found["problems"] == []
    assert refused_of(found) == NEED_ONE
    assert found["schemes"]["gguf/iq2_xs"]["refused"].startswith(
        "iq2_xs needs more than the importance matrix holds for 1 tensors:\n  - attn_q.weight: IQ2_XS\n"
    )


def test_how_far_it_reaches_into_experts_is_told(tmp_path: Path) -> None:
    folder = tiny("qwen3_moe", tmp_path / "tiny", experts=6, num_hidden_layers=2)
    file = write_imatrix(folder, tmp_path / "own.gguf", idle=2)
    result = succeeded("inspect", folder, "--imatrix", file, "--json", tmp_path / "a.json")
    found = json.loads((tmp_path / "a.json").read_text())["imatrix"]
    assert found["experts"] == [{"layer": i, "experts": 6, "activated": 4, "fewest": 0} for i in range(2)]
    lines = result.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert (
        f"imatrix own.gguf: {found['tensors']} matrices experts without any token, whose inputs count alike: " in said
    )
    assert "layer 0: 2 of 6" in said


def test_one_of_another_model_is_a_problem(given: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", Shape(hidden=512, ff=256), change=lambda t: t.pop("model.norm.weight"))
    result = run("inspect", other, "--imatrix", given, "--json", "-")
    assert result.exit_code == BAD_INPUT
    found = json.loads(result.stdout)
    checkpoint, problem = found["problems"]
    assert "model.norm.weight: missing" in checkpoint
    assert problem.startswith(f"gguf: {given} is of another model:\n  - blk.0.")
    assert found["imatrix"] is None
    assert refused_of(found) == NEED_ONE


@pytest.mark.parametrize("model_type", ["qwen2", "qwen9"])
def test_a_file_that_is_none_is_a_problem(model_type: str, tmp_path: Path) -> None:
    """Whether config.json is understood or not."""
    folder = write_checkpoint(tmp_path / "c", config={"model_type": model_type})
    result = run("inspect", folder, "--imatrix", tmp_path / "none.gguf", "--json", "-")
    assert result.exit_code == BAD_INPUT
    found = json.loads(result.stdout)
    assert found["imatrix"] is None
    assert found["problems"][-1].startswith(f"gguf: {tmp_path}/none.gguf is not a file.")
    assert len(found["problems"]) == 1 + (model_type == "qwen9")
