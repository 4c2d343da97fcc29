"""--type PATTERN=TYPE: custom mixes on the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from commands import refused, succeeded
from support import Shape, write_checkpoint


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mix") / "source", Shape("qwen3"))


def test_convert_takes_types_and_says_what_it_made(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "mix"
    arguments = ("convert", source, "--format", "gguf", "--scheme", "q4_0", "--out", out)
    result = succeeded(*arguments, "--type", "attn_v=q8_0", "--type", r"blk\.[01]\.ffn_(up|gate)=Q5_1")
    found = json.loads((out / "artifact.json").read_text())
    assert found["scheme"] == r"q4_0+attn_v=q8_0,blk\.[01]\.ffn_(up|gate)=q5_1"
    assert {name: entry["tensors"] for name, entry in found["effective_types"].items()} == {
        "Q4_0": 2 * 4,  # q, k, output, down
        "Q5_1": 2 * 2,
        "Q8_0": 2 + 1,  # v, and the tied embedding
        "F32": 2 * 4 + 1,
    }
    said = " ".join(result.stdout.split())
    assert rf"{out}: gguf q4_0+attn_v=q8_0,blk\.[01]\.ffn_(up|gate)=q5_1, " in said
    assert "Q5_1" in said


def test_the_first_of_the_types_decides(source: Path, tmp_path: Path) -> None:
    kinds = {}
    for name, types in {"a": ("attn_v=q8_0", "attn_=q5_1"), "b": ("attn_=q5_1",)}.items():
        arguments = ("convert", source, "--format", "gguf", "--scheme", "q4_0", "--out", tmp_path / name)
        succeeded(*arguments, *(part for given in types for part in ("--type", given)))
        found = json.loads((tmp_path / name / "artifact.json").read_text())
        kinds[name] = found["effective_types"]["Q5_1"]["tensors"]
    assert kinds == {"a": 2 * 3, "b": 2 * 4}


def test_inspect_shows_what_was_asked_for(source: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    types = ("--type", r"blk\.[1]\.attn_v=q8_0", "--type", "output=q5_1")
    result = succeeded("inspect", source, "--scheme", "q4_0", *types, "--json", file)
    plan = {(row["role"], row["layers"]): (row["type"], row["reason"]) for row in json.loads(file.read_text())["plan"]}
    assert plan["attn_v", "1"] == ("Q8_0", r"asked for: blk\.[1]\.attn_v=Q8_0")
    assert plan["attn_v", "0"] == ("Q4_0", "the scheme's own")
    assert plan["embed", ""] == ("Q5_1", "asked for: output=Q5_1, tied to the embedding")
    assert r"asked for: blk\.[1]\.attn_v=Q8_0" in " ".join(result.stdout.split())  # brackets are no markup
    assert max(len(line) for line in result.stdout.splitlines()) <= 80


@pytest.mark.parametrize("given", ["attn_v", "=q8_0", "attn_v=", "=", ""])
def test_a_malformed_type_is_refused(given: str, source: Path, tmp_path: Path) -> None:
    for command in (("convert", source, "--format", "gguf", "--out", tmp_path / "a"), ("inspect", source)):
        said = refused(*command, "--scheme", "q4_0", "--type", given)
        assert "Invalid value for '--type': expected PATTERN=TYPE, as attn_v=q8_0." in said
    assert list(tmp_path.iterdir()) == []


def test_a_pattern_given_twice_is_refused(source: Path, tmp_path: Path) -> None:
    arguments = ("convert", source, "--format", "gguf", "--scheme", "q4_0", "--out", tmp_path / "a")
    said = refused(*arguments, "--type", "attn_v=q8_0", "--type", "attn_v=q6_k")
    assert "Invalid value for '--type': attn_v is given twice." in said


def test_a_pattern_may_hold_an_equals_sign(source: Path) -> None:
    assert "no matrix is named like 'a=b'" in refused("inspect", source, "--scheme", "q4_0", "--type", "a=b=q8_0")


def test_types_without_a_scheme_are_refused(source: Path) -> None:
    said = refused("inspect", source, "--type", "attn_v=q8_0")
    assert "--type needs --scheme: the types go over those of a scheme." in said


@pytest.mark.parametrize(
    ("scheme", "given", "message"),
    [
        ("q4_0", "attn_v=q8", "types: attn_v asks for the type 'q8'; did you mean 'q8_0'?"),
        (
            "q4_0",
            "attn_w=q8_0",
            "types: no matrix is named like 'attn_w'. Names are token_embd.weight, blk.0.attn_q.weight,",
        ),
        ("q4_0", "attn_[=q8_0", "types: 'attn_[' is not a regular expression: unterminated character set"),
        ("bf16", "attn_v=q8_0", "llama-quantize gives bf16 files no types by pattern (attn_v)"),
        ("q4_0", "token_embd=q6_k", "token_embd has rows of 64, not a multiple of 256: it cannot be Q6_K."),
    ],
)
def test_types_that_cannot_be_leave_nothing(
    scheme: str, given: str, message: str, source: Path, tmp_path: Path
) -> None:
    said = refused("convert", source, "--format", "gguf", "--out", tmp_path / "a", "--scheme", scheme, "--type", given)
    assert message in said
    assert refused("inspect", source, "--scheme", f"gguf/{scheme}", "--type", given) == said
    assert list(tmp_path.iterdir()) == []
