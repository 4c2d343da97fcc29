"""inspect where a checkpoint suits one format or scheme and not another."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from commands import refused, run, succeeded
from support import Shape, write_checkpoint

from pipeline.console import BAD_INPUT
from pipeline.formats import FORMATS, room

ROOT = Path(__file__).parent.parent


def test_every_scheme_of_every_format_is_listed(narrow: Path, tmp_path: Path) -> None:
    lines = succeeded("inspect", narrow, "--scheme", "coreml/int8", "--json", tmp_path / "a.json").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    found = json.loads((tmp_path / "a.json").read_text())
    wanted = [f"{name}/{scheme}" for name in FORMATS for scheme in room(name, "schemes").SCHEMES]
    assert [*found["schemes"]] == wanted
    assert [*dict.fromkeys(line.split()[0] for line in lines if line.partition(" ")[0] in wanted)] == wanted
    types = {name: found["schemes"][f"coreml/{name}"]["effective_types"].keys() for name in ("fp16", "int16", "pal4")}
    assert types == {"fp16": {"F16", "F32"}, "int16": {"int16", "F16", "F32"}, "pal4": {"pal4-g16", "F16", "F32"}}
    int16, fp16 = (found["schemes"][f"coreml/{name}"]["bits_per_weight"] for name in ("int16", "fp16"))
    assert fp16 < int16 < 17  # the scales of short rows
    (embed,) = [row for row in found["plan"] if row["role"] == "embed"]
    assert (embed["type"], embed["reason"]) == ("int8", "the scheme's own")
    (norms,) = {(row["type"], row["reason"]) for row in found["plan"] if row["role"] == "attn_norm"}
    assert norms == ("F32", "norms are computed in float32, where float16 would overflow")


@pytest.fixture(scope="module")
def narrow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows of 96 weights, which no group of 64 or 128 divides."""
    return write_checkpoint(tmp_path_factory.mktemp("inspection") / "narrow", Shape(hidden=96, layers=8))


def test_a_scheme_that_a_checkpoint_cannot_have_is_listed_as_refused(narrow: Path, tmp_path: Path) -> None:
    lines = succeeded("inspect", narrow, "--json", tmp_path / "a.json").stdout.splitlines()
    found = json.loads((tmp_path / "a.json").read_text())["schemes"]
    assert {name for name, scheme in found.items() if scheme.keys() == {"refused"}} == {
        *(f"mlx/int{bits}{group}" for bits in (8, 6, 4, 3) for group in ("", "-g128")),
        *("mlx/mixed_4_6", "mlx/mixed_3_6", "mlx/mixed_3_4", "mlx/mixed_2_6"),
    }
    assert found["mlx/int4"]["refused"].startswith(
        "int4 cannot hold every matrix:\n  - rows of 96 weights do not divide into groups of 64: model.embed_tokens.we"
    )
    assert found["mlx/int4-g32"]["effective_types"].keys() == {"int4-g32", "BF16"}
    assert max(map(len, lines)) <= 80
    assert ["mlx/int4", "-", "-", "refused"] in map(str.split, lines)
    said = " ".join(line.strip() for line in lines)
    assert said.count("cannot hold every matrix: - rows of 96 weights") == 2  # once for each group
    assert "refused mlx/int8-g128, mlx/int6-g128, mlx/int4-g128, mlx/int3-g128: cannot hold every" in said


def test_the_plan_of_such_a_scheme_is_refused(narrow: Path) -> None:
    said = refused("inspect", narrow, "--scheme", "mlx/int4")
    assert said.startswith("Error: int4 cannot hold every matrix:\n")
    assert "take int8-g32, int6-g32, int4-g32, int3-g32, mxfp8, mxfp4." in said


def plan_of(checkpoint: Path, scheme: str) -> set[str]:
    found = json.loads(succeeded("inspect", checkpoint, "--scheme", scheme, "--json", "-").stdout)
    return {row["type"] for row in found["plan"]}


def test_a_name_that_two_formats_have_needs_the_formats(narrow: Path) -> None:
    said = "Error: bf16 is a scheme of gguf and of mlx: write gguf/bf16 or mlx/bf16.\n"
    assert refused("inspect", narrow, "--scheme", "bf16") == said
    said = "Error: int4 is a scheme of mlx and of coreml: write mlx/int4 or coreml/int4.\n"
    assert refused("inspect", narrow, "--scheme", "int4") == said
    assert plan_of(narrow, "coreml/int4") == {"int4-b32", "F16", "F32"}
    assert plan_of(narrow, "pal6") == plan_of(narrow, "coreml/pal6") == {"pal6-g16", "F16", "F32"}
    assert plan_of(narrow, "gguf/bf16") == {"BF16", "F32"}
    assert plan_of(narrow, "mlx/bf16") == {"BF16"}
    assert plan_of(narrow, "nvfp4") == plan_of(narrow, "mlx/nvfp4") == {"nvfp4", "BF16"}
    assert plan_of(narrow, "f16") == plan_of(narrow, "gguf/f16")


@pytest.mark.parametrize(
    ("scheme", "said"),
    [
        ("int5", "no format has a scheme 'int5'; did you mean 'int"),
        ("mlx/q4_0", "mlx has no scheme 'q4_0'; known: bf16, fp16, int8,"),
        ("mxl/int4", "format 'mxl' does not exist; did you mean 'mlx'?"),
        ("onnx/int4", "format 'onnx' does not exist; known: gguf, mlx, coreml."),
        ("coreml/int3", "coreml has no scheme 'int3'; did you mean 'int"),
    ],
)
def test_an_unknown_scheme_or_format_is_refused(scheme: str, said: str, narrow: Path) -> None:
    assert said in " ".join(refused("inspect", narrow, "--scheme", scheme).split())


def test_what_is_stored_decides_what_mlx_scales_are(tmp_path: Path) -> None:
    """Where config.json does not say what the weights are of."""
    folder = write_checkpoint(tmp_path / "f32", Shape("qwen3"), dtype="F32")
    assert plan_of(folder, "mlx/int4") == {"int4-g64-F32", "F32"}


def test_a_checkpoint_that_is_not_whole_still_shows_what_schemes_weigh(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad", change=lambda tensors: tensors.pop("model.norm.weight"))
    result = run("inspect", folder, "--json", "-")
    assert result.exit_code == BAD_INPUT
    found = json.loads(result.stdout)
    (problem,) = found["problems"]  # of no format
    assert problem.startswith(f"{folder} is not a whole qwen2 checkpoint:\n")
    assert found["schemes"]["mlx/int4"]["effective_types"].keys() == {"int4-g64", "BF16"}


def test_a_problem_of_every_format_is_said_once(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad")
    (folder / "tokenizer.json").unlink()
    result = run("inspect", folder, "--json", "-")
    assert result.exit_code == BAD_INPUT
    (problem,) = json.loads(result.stdout)["problems"]
    assert problem.startswith(f"{folder}/tokenizer.json cannot be read: No such file")


def test_convert_names_every_format(narrow: Path, tmp_path: Path) -> None:
    names = f"{', '.join(FORMATS[:-1])} or {FORMATS[-1]}"
    assert f"--format TEXT {names}" in " ".join(succeeded("convert", "--help").stdout.split())
    said = refused("convert", narrow, "--format", "onnx", "--scheme", "q4_0", "--out", tmp_path / "a")
    assert said == f"Error: format 'onnx' does not exist; known: {', '.join(FORMATS)}.\n"


def test_inspect_needs_no_runtime(narrow: Path) -> None:
    code = (
        "import sys\nfrom pipeline.inspection import inspect\ninspect(sys.argv[1], 'int4-g32')\n"
        "heavy = ('mlx', 'mlx_lm', 'llama_cpp', 'coremltools', 'torch', 'transformers')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code, narrow], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
