"""inspect where a checkpoint suits one format or scheme and not another."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from commands import refused, run, squeezed, succeeded
from family import tiny as tiny_of
from support import Shape, tokenizer_json, write_checkpoint

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


# What is wrong, all at once


def problems_of(folder: Path) -> list[str]:
    result = run("inspect", folder, "--json", "-")
    assert result.exit_code == BAD_INPUT
    found: list[str] = json.loads(result.stdout)["problems"]
    return found


def edit_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def test_config_files_and_tokenizer_are_told_together(tmp_path: Path) -> None:
    """None hides another: sizes and rope of config.json, a shard, and a tokenizer without its end token."""
    folder = write_checkpoint(tmp_path / "bad", shards=3)
    edit_config(folder, hidden_size=0, rope_scaling={"type": "longrope"}, quantization_config={"quant_method": "gptq"})
    (folder / "model-00002-of-00003.safetensors").unlink()
    (folder / "model-00003-of-00003.safetensors").write_bytes(b"no header")
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    quantized, broken, absent, config, tokenizer = problems_of(folder)
    assert "is already quantized (config.json: quantization_config, gptq)" in quantized
    assert "model-00003-of-00003.safetensors: not a safetensors file" in broken
    assert "model-00002-of-00003.safetensors is absent" in absent
    assert config.splitlines()[1:3] == [
        "  - hidden_size: missing or not a positive integer, found 0",
        "  - rope scaling 'longrope' is not supported; known: default, linear, yarn",
    ]
    assert "generation_config.json: eos_token_id must be an id" in tokenizer


def test_where_config_json_is_not_understood_nothing_is_made_up(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad", config={"model_type": "qwen9"})
    found = json.loads(run("inspect", folder, "--scheme", "gguf/q8_0", "--json", "-").stdout)
    assert [found[key] for key in ("architecture", "numbers", "weights", "tensors", "plan")] == [None] * 5
    assert (found["schemes"], found["dropped"], found["dtypes"]) == ({}, [], ["BF16"])
    (problem,) = found["problems"]
    assert problem.startswith("config.json: model_type 'qwen9' is not supported; did you mean 'qwen")
    lines = run("inspect", folder).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[0] for line in lines if line.strip()][:3] == ["checkpoint", "dtypes", "problem"]


def test_unknown_tensors_of_an_absent_shard_are_told_with_it(tmp_path: Path) -> None:
    """The index is all that knows of them; and of a head that a tied checkpoint need not hold."""
    folder = write_checkpoint(tmp_path / "bad", shards=2)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"] |= dict.fromkeys(("model.ghost.weight", "lm_head.weight"), "gone.safetensors")
    path.write_text(json.dumps(index))
    (incomplete,) = problems_of(folder)
    told = "gone.safetensors is absent; model.safetensors.index.json puts model.ghost.weight, lm_head.weight there"
    assert told in incomplete


def test_tensors_of_an_absent_shard_are_not_told_one_by_one(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad", shards=4, change=lambda tensors: tensors.pop("model.norm.weight"))
    (folder / "model-00001-of-00004.safetensors").unlink()
    incomplete, tensors = problems_of(folder)
    assert "model-00001-of-00004.safetensors is absent" in incomplete
    lines = [line for line in tensors.splitlines() if line.startswith("  - ")]
    assert lines == ["  - model.norm.weight: missing, expected [64]"]
    found = json.loads(run("inspect", folder, "--json", "-").stdout)
    assert len(found["schemes"]["gguf/q8_0"]["plan"]) > 8  # what it would be


def test_no_tensor_is_told_where_no_file_is_read(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad")
    (folder / "model.safetensors").write_bytes(b"no header")
    (problem,) = problems_of(folder)
    assert "model.safetensors: not a safetensors file" in problem


def test_every_problem_of_a_tokenizer_is_told_with_the_formats_it_is_of(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad", config={"vocab_size": 272, "eos_token_id": 9999})
    tokenizer = tokenizer_json(split=r"\w+")
    tokenizer["added_tokens"][0]["id"] = 400
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text('{"chat_template": 5}')
    found = problems_of(folder)
    assert [problem.partition(" ")[0] for problem in found if problem.startswith("gguf: ")] == ["gguf:"] * 2
    assert any("regex is none that llama.cpp is known to have" in problem for problem in found)
    assert any("chat_template must be text" in problem for problem in found)
    (vocabulary,) = [problem for problem in found if "has id 400, but the embedding has 272 rows" in problem]
    assert vocabulary.startswith(str(folder))  # every format's


def test_fp8_without_scales_is_told_with_the_rest(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "bad", change=lambda tensors: tensors.pop("model.norm.weight"))
    path = folder / "model.safetensors"
    length = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8:length])
    name = "model.layers.0.mlp.up_proj.weight"
    begin, end = header[name]["data_offsets"]
    header[name] |= {"dtype": "F8_E4M3", "data_offsets": [begin, begin + (end - begin) // 2]}
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + path.read_bytes()[length:])
    (problem,) = problems_of(folder)
    assert [line for line in problem.splitlines() if line.startswith("  - ")] == [
        f"  - {name}: FP8 without scales of its blocks: {name}_scale_inv is missing, expected [1, 1]",
        "  - model.norm.weight: missing, expected [64]",
    ]


# Numbers, plans and what is dropped


def test_the_plan_of_every_scheme_is_in_the_json(narrow: Path, tmp_path: Path) -> None:
    found = json.loads(succeeded("inspect", narrow, "--json", "-").stdout)
    for name, scheme in found["schemes"].items():
        assert ("plan" in scheme) != ("refused" in scheme), name
        if "plan" in scheme:
            rows = scheme["plan"]
            assert sum(row["tensors"] for row in rows) == found["tensors"]
            assert {row["type"] for row in rows} == scheme["effective_types"].keys()
    rows = [row for row in found["schemes"]["gguf/q4_k_m"]["plan"] if row["role"] == "attn_v"]
    assert [(row["layers"], row["tensors"], row["type"]) for row in rows] == [
        ("0, 3, 6-7", 4, "Q8_0"),
        ("1-2, 4-5", 4, "Q5_0"),
    ]


@pytest.mark.parametrize(("asked", "formats"), [("all", FORMATS), ("mlx/all", ("mlx",)), ("gguf/all", ("gguf",))])
def test_all_schemes_are_shown_by_type_and_role(asked: str, formats: tuple[str, ...], tiny: Path) -> None:
    lines = succeeded("inspect", tiny, "--scheme", asked).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    begins = [i for i, line in enumerate(lines) if line.split() == ["scheme", "type", "tensors"]]
    assert len(begins) == len(formats)
    text = "\n".join(lines[begins[0] :])
    assert [name for name in FORMATS if f"\n{name}/" in text] == [*formats]
    if asked == "gguf/all":
        said = " ".join(text.split())
        assert "gguf/q4_k_m Q4_K attn_q, attn_k, attn_v (4 of 6), attn_output, ffn_gate, ffn_up, ffn_down" in said
        assert "Q6_K embed, attn_v (2 of 6), ffn_down (2 of 6) F32 attn_norm" in said


def test_types_of_their_own_go_with_one_scheme(tiny: Path) -> None:
    assert "--type needs --scheme" in refused("inspect", tiny, "--scheme", "gguf/all", "--type", "attn_v=q8_0")
    assert "format 'ggfu' does not exist" in refused("inspect", tiny, "--scheme", "ggfu/all")


def test_the_numbers_of_a_model_are_told(tiny: Path) -> None:
    found = json.loads(succeeded("inspect", tiny, "--json", "-").stdout)
    token = 2 * 6 * 2 * 64 * 2  # K and V, layers, heads, head_dim, bytes
    assert found["numbers"] == {
        "weights": 6_819_840,
        "active_weights": 6_819_840,
        "mtp_weights": 0,
        "layers": 6,
        "attention_layers": 6,
        "kv_bytes_per_token": token,
        "state_bytes": 0,
        "caches": {
            "f16": {"per_token": token, "context": token * 4096},
            "q8_0": {"per_token": token // 64 * 34, "context": token // 64 * 34 * 4096},
            "q4_0": {"per_token": token // 64 * 18, "context": token // 64 * 18 * 4096},
        },
    }
    lines = [line.split(maxsplit=3) for line in succeeded("inspect", tiny).stdout.splitlines()]
    assert ["KV", "of", "a", "token   3 KiB in f16, 1.6 KiB in q8_0, 864 bytes in q4_0"] in lines


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A hybrid with experts, a vision tower and an MTP layer."""
    folder = tmp_path_factory.mktemp("inspection") / "wrapped"
    return tiny_of("qwen3_5_moe", folder, experts=6, wrapped=True, mtp=1)


def test_a_hybrid_is_told_by_its_layers_experts_and_what_is_dropped(wrapped: Path) -> None:
    found = json.loads(succeeded("inspect", wrapped, "--json", "-").stdout)
    assert found["problems"] == []
    assert found["architecture"]["experts"] == {
        **{"count": 6, "used": 2, "d_ff": 32, "shared_d_ff": 64, "norm_topk": True},
    }
    counted = found["numbers"]
    assert (counted["layers"], counted["attention_layers"]) == (4, 1)
    assert counted["active_weights"] == counted["weights"] - 4 * 4 * 3 * 64 * 32
    assert counted["kv_bytes_per_token"] == 2 * 1 * 2 * 32 * 2
    assert counted["state_bytes"] == 3 * (3 * (2 * 2 * 16 + 4 * 16) + 4 * 16 * 16) * 4
    assert counted["caches"]["f16"]["context"] == 2048 * counted["kv_bytes_per_token"] + counted["state_bytes"]
    dropped = {part["part"]: part for part in found["dropped"]}
    tower, mtp = dropped["vision tower"], dropped["MTP layers"]
    assert (tower["tensors"], tower["weights"], tower["formats"]) == (3, 16 * 3 * 2 * 16 + 9 * 16 + 16, ["gguf", "mlx"])
    assert (mtp["formats"], mtp["weights"], mtp["tensors"]) == (["mlx"], counted["mtp_weights"], len(mtp["names"]))
    roles = {name: {row["role"] for row in found["schemes"][name]["plan"]} for name in ("gguf/q8_0", "mlx/int8-g32")}
    assert "mtp_join" in roles["gguf/q8_0"] - roles["mlx/int8-g32"]
    assert all("Gated DeltaNet in 3 of 4" in found["schemes"][f"coreml/{s}"]["refused"] for s in ("fp16", "pal4"))


def test_it_is_readable_on_80_columns(wrapped: Path) -> None:
    lines = succeeded("inspect", wrapped, "--scheme", "gguf/q4_k_m").stdout.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    assert "experts 6 of width 32, 2 a token, and one of width 64 that all take" in said
    assert "dropped MTP layers: " in said
    count = json.loads(succeeded("inspect", wrapped, "--json", "-").stdout)["numbers"]["mtp_weights"]
    assert f"mtp_layers 1, of {count:,} weights beside those above" in said
    assert re.search(r"whole context [^,]+ in f16, [^,]+ in q8_0, [^,]+ in q4_0, state included ", said)
    assert said.endswith(" Layer 4 is the MTP layer, which guesses a further token.")  # of which only GGUF has one
    assert "is the MTP layer" not in succeeded("inspect", wrapped, "--scheme", "mlx/int4-g32").stdout


def test_lists_go_on_below_behind_a_comma_alone(wrapped: Path) -> None:
    lines = [line.rstrip() for line in succeeded("inspect", wrapped, "--scheme", "gguf/all").stdout.splitlines()]
    below = [i for i, line in enumerate(lines) if re.match(r" {20,}\S", line) and "layers)" not in line]
    assert len(below) > 20
    assert [lines[i - 1] for i in below if not lines[i - 1].endswith(",")] == []


def test_schemes_that_need_an_importance_matrix_are_told_once(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "c", Shape(hidden=256, ff=256))
    lines = succeeded("inspect", folder).stdout.splitlines()
    assert max(map(len, lines)) <= 80
    said = " ".join(" ".join(lines).split())
    names = "gguf/iq3_xxs, gguf/iq2_s, gguf/iq2_xs, gguf/iq2_xxs, gguf/iq1_m"
    assert f"refused {names}: needs an importance matrix. Make one" in said
    assert said.count("needs an importance matrix") == 1
    assert "attn_q.weight: IQ2_XS, of 2 layers" in refused("inspect", folder, "--scheme", "iq2_xs")  # each in full


def test_no_weight_is_read(wrapped: Path, tmp_path: Path) -> None:
    """The files have no data behind their headers but holes, which would be no weights."""
    folder = tmp_path / "sparse"
    shutil.copytree(wrapped, folder)
    path = folder / "model.safetensors"
    size, length = path.stat().st_size, 8 + int.from_bytes(path.read_bytes()[:8], "little")
    os.truncate(path, length)
    os.truncate(path, size)
    whole, sparse = (json.loads(succeeded("inspect", p, "--json", "-").stdout) for p in (wrapped, folder))
    assert {**whole, "checkpoint": "sparse"} == sparse


@pytest.mark.parametrize(("format_name", "scheme"), [("gguf", "iq2_xs"), ("mlx", "int4"), ("coreml", "int8")])
def test_convert_tells_all_that_inspect_tells(format_name: str, scheme: str, tmp_path: Path) -> None:
    """Of files, tensors, tokenizer and scheme, in one error, and nothing is left behind."""
    settings = {"quantization_config": {"quant_method": "gptq"}}
    folder = write_checkpoint(
        tmp_path / "bad",
        Shape(hidden=256 if format_name == "gguf" else 96),
        config=settings,
        change=lambda tensors: tensors.pop("model.norm.weight"),
    )
    (folder / "tokenizer.json").unlink()
    arguments = ("convert", folder, "--format", format_name, "--scheme", scheme)
    more = ("--max-context", 99_999) if format_name == "coreml" else ()
    said = squeezed(refused(*arguments, *more, "--out", tmp_path / "out"))
    wanted = problems_of(folder)
    assert len(wanted) == 3
    own = {"gguf": "iq2_xs needs an importance matrix", "mlx": "int4 cannot hold every matrix", "coreml": "max_context"}
    assert all(squeezed(problem) in said for problem in (*wanted, own[format_name]))
    assert not (tmp_path / "out").exists()
