"""--chunk, --max-context, --score-window: the sizes of a Core ML package on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import refused, succeeded
from support import Shape, write_checkpoint

SIZES = ("--chunk", 64, "--max-context", 256, "--score-window", 32)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("sizes") / "small", Shape("qwen3"))


def converting(checkpoint: Path, out: Path, format_name: str, scheme: str, *more: object) -> tuple[object, ...]:
    return ("convert", checkpoint, "--format", format_name, "--scheme", scheme, "--out", out, *more)


def test_the_sizes_are_in_the_help() -> None:
    said = " ".join(succeeded("convert", "--help").stdout.split())
    for option, default in (("chunk", 128), ("max-context", 2112), ("score-window", 512)):
        assert f"--{option} INTEGER Core ML: tokens" in said
        assert f"[default: {default}]" in said


@pytest.mark.parametrize(("format_name", "scheme"), [("gguf", "q8_0"), ("mlx", "int4")])
def test_formats_without_sizes_refuse_them(format_name: str, scheme: str, small: Path, tmp_path: Path) -> None:
    said = refused(*converting(small, tmp_path / "a", format_name, scheme, *SIZES))
    sizes = "chunk, max_context, score_window"
    assert " ".join(said.split()) == (
        f"Error: {sizes}: {format_name} artifacts have no fixed sizes. Only coreml packages do."
    )
    said = refused(*converting(small, tmp_path / "a", format_name, scheme, "--score-window", 512))
    assert said.startswith(f"Error: score_window: {format_name} artifacts have no fixed sizes.")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (("--chunk", 63), "chunk must be 64 to 512 tokens, found 63."),
        (("--chunk", 513), "chunk must be 64 to 512 tokens, found 513."),
        (("--max-context", 0), "max_context must be at least 2 tokens, found 0."),
        (("--score-window", -1), "score_window must be at least 2 tokens, found -1."),
        (("--max-context", 2049), "max_context 2049 is beyond the model's context of 2048 tokens. Ask for less."),
        (("--score-window", 4096), "score_window 4096 is beyond the model's context of 2048 tokens. Ask for less."),
        (("--chunk", "many"), "Invalid value for '--chunk': 'many' is not a valid integer."),
        (("--type", "attn_v=q8_0"), "types: coreml schemes take none (attn_v). Only gguf schemes do."),
    ],
)
def test_sizes_that_cannot_be_leave_nothing(given: tuple[object, ...], said: str, small: Path, tmp_path: Path) -> None:
    assert said in " ".join(refused(*converting(small, tmp_path / "a", "coreml", "int8", *given)).split())
    assert list(tmp_path.iterdir()) == []


def test_convert_says_the_sizes_that_are_its_own(small: Path, tmp_path: Path) -> None:
    label = "int8+chunk=64,max_context=256,score_window=32"
    result = succeeded(*converting(small, tmp_path / "own", "coreml", "int8", *SIZES))
    assert f"{tmp_path / 'own'}: coreml {label}, " in " ".join(result.stdout.split())
    assert json.loads((tmp_path / "own" / "artifact.json").read_text())["scheme"] == label
