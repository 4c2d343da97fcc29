"""The command line as a person uses it: tables, JSON, exit codes."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from commands import refused, run, squeezed, succeeded
from figures import COREML_ENGINE, ENGINE, IDENTITY, NEEDS_MACOS, PARITY
from support import Shape, tokenizer_json, write_checkpoint

from pipeline import chat as chats
from pipeline import console_tables, evaluation
from pipeline.cli import main
from pipeline.console import BAD_INPUT

ROOT = Path(__file__).parent.parent


TASKS = ("prefill 128", "prefill 512", "decode 64")

# schemes


def test_the_table_of_schemes_fits_a_terminal() -> None:
    lines = succeeded("schemes").stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any(line.split()[:3] == ["gguf", "q4_k_m", "4.50"] for line in lines)
    assert any(line.split()[:3] == ["gguf", "bf16", "16.00"] for line in lines)
    assert any(line.split()[:3] == ["mlx", "bf16", "16.00"] for line in lines)
    assert "gguf runs on llama.cpp: CPU everywhere, Metal on Apple Silicon" in lines
    assert "coreml runs on Core ML: iOS 18, macOS 15; scored on any machine" in lines


def test_schemes_as_json() -> None:
    listed = json.loads(succeeded("schemes", "--json", "-").stdout)
    found = {row["scheme"]: row for row in listed if row["format"] == "gguf"}
    assert found.keys() == {
        *("f32", "f16", "bf16", "q8_0", "q6_k", "q5_k_m", "q5_k_s", "q5_1", "q5_0", "q4_k_m", "q4_k_s", "q4_1", "q4_0"),
        *("iq4_nl", "iq4_xs", "q3_k_l", "q3_k_m", "q3_k_s", "q2_k"),
        *("iq3_s", "iq3_xxs", "iq2_s", "iq2_xs", "iq2_xxs", "iq1_m"),
    }
    assert found["q8_0"]["bits_per_weight"] == 8.5
    mlx = {row["scheme"]: row["bits_per_weight"] for row in listed if row["format"] == "mlx"}
    assert (mlx["bf16"], mlx["int4"], mlx["int8-g32"], mlx["nvfp4"], mlx["mixed_3_6"]) == (16, 4.5, 9, 4.5, 3.5)
    coreml = {row["scheme"]: row["bits_per_weight"] for row in listed if row["format"] == "coreml"}
    assert coreml == {"fp16": 16, "int16": 16, "int8": 8, "int4": 4.5, "pal6": 6, "pal4": 4}
    assert len(listed) == len(found) + len(mlx) + len(coreml)


# inspect


def test_inspect_shows_the_architecture_and_what_schemes_weigh(tiny: Path) -> None:
    result = succeeded("inspect", tiny)
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    assert any(line.split() == ["model_type", "qwen3"] for line in lines)
    assert any(line.split()[0:1] == ["gguf/q4_k_m"] for line in lines)
    assert "problem" not in result.stdout


def test_json_into_a_folder_is_a_usage_error(tiny: Path, tmp_path: Path) -> None:
    assert "is a directory" in refused("inspect", tiny, "--json", tmp_path)


def test_inspect_shows_the_plan_of_a_scheme(tiny: Path, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    result = succeeded("inspect", tiny, "--scheme", "q4_k_m", "--json", file)
    assert any(line.split()[:2] == ["role", "layers"] for line in result.stdout.splitlines())  # the table stays
    found = json.loads(file.read_text())
    assert found["problems"] == []
    assert found["architecture"]["model_type"] == "qwen3"
    total = found["schemes"]["gguf/q4_k_m"]
    assert total["bits_per_weight"] == total["tensor_bytes"] * 8 / found["weights"]
    assert sum(total["effective_types"].values()) == found["weights"]
    assert {row["type"] for row in found["plan"]} == total["effective_types"].keys()
    assert found["schemes"]["gguf/f32"]["bits_per_weight"] == 32


def test_inspect_writes_json_alone_to_standard_output(tiny: Path) -> None:
    found = json.loads(succeeded("inspect", tiny, "--json", "-").stdout)
    assert found["checkpoint"] == "qwen3-tiny"
    assert found["plan"] is None


def test_inspect_lists_every_problem_and_exits_2(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.up_proj.weight"] = np.zeros((7, 64), np.float32)
        tensors["extra.patch.weight"] = np.zeros((2, 2), np.float32)

    folder = write_checkpoint(tmp_path / "bad", change=spoil)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(split=r"\w+")))
    result = run("inspect", folder, "--json", tmp_path / "a.json")
    assert result.exit_code == BAD_INPUT
    named = ["model.norm.weight", "model.layers.0.mlp.up_proj.weight", "extra.patch.weight", r"\w+"]
    problems = json.loads((tmp_path / "a.json").read_text())["problems"]
    for name in named:
        assert squeezed(name) in squeezed(result.stdout)
        assert any(name in problem for problem in problems)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("config", "split", "said"),
    [
        ({"rope_scaling": YARN | {"beta_fast": 16}}, None, "rope scaling beta_fast is 16"),
        ({"rope_scaling": YARN | {"beta_slow": 2}}, None, "rope scaling beta_slow is 2"),
        ({}, r"\w+", "the pre-tokenizer's regex is none that llama.cpp is known to have"),
    ],
)
def test_inspect_lists_what_the_format_would_refuse_beside_tensors(
    config: dict[str, Any], split: str | None, said: str, tmp_path: Path
) -> None:
    folder = write_checkpoint(tmp_path / "c", config=config)
    if split:
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(split=split)))
    result = run("inspect", folder, "--json", "-")
    assert result.exit_code == BAD_INPUT
    (problem,) = json.loads(result.stdout)["problems"]
    assert said in problem
    refusal = refused("convert", folder, "--format", "gguf", "--scheme", "q8_0", "--out", tmp_path / "out")
    assert problem.startswith("gguf: ")  # MLX takes it
    assert refusal == f"Error: {problem.removeprefix('gguf: ')}\n"  # of what is listed convert says the same


def test_inspect_of_what_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    assert "nowhere" in refused("inspect", tmp_path / "nowhere")
    assert "config.json" in refused("inspect", tmp_path)


def test_a_name_in_brackets_is_shown_as_it_is(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny[red]v2")
    assert "tiny[red]v2" in squeezed(succeeded("inspect", folder).stdout)


# convert


def test_convert_makes_an_artifact_that_says_what_it_is(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "q4_0"
    result = succeeded("convert", source, "--format", "gguf", "--scheme", "q4_0", "--out", out)
    assert {file.name for file in out.iterdir()} == {"model.gguf", "artifact.json"}
    assert {file.name for file in out.parent.iterdir()} == {"q4_0"}
    found = json.loads((out / "artifact.json").read_text())
    assert found["size_bytes"] == (out / "model.gguf").stat().st_size
    assert 4.5 < found["bits_per_weight"] < 9
    assert found["effective_types"].keys() >= {"Q4_0", "F32"}
    assert sum(entry["weights"] for entry in found["effective_types"].values()) == found["weights"]
    assert f"{found['bits_per_weight']:.2f} bits per weight" in " ".join(result.stdout.split())


@pytest.mark.parametrize("empty", [True, False])
def test_convert_into_an_existing_folder_is_refused(empty: bool, source: Path, tmp_path: Path) -> None:
    out = tmp_path / "old"
    out.mkdir()
    if not empty:
        (out / "model.gguf").write_text("old")
    said = refused("convert", source, "--format", "gguf", "--scheme", "q4_0", "--out", out)
    assert "old exists. Remove it or name another output folder." in said
    assert [file.read_text() for file in out.iterdir()] == ([] if empty else ["old"])
    assert {file.name for file in tmp_path.iterdir()} == {"old"}


@pytest.mark.parametrize(
    ("format_name", "scheme", "said"),
    [
        ("gguf", "q4_k", "gguf has no scheme 'q4_k'; did you mean 'q4_k_s'?"),
        ("gguf", "zzz", "known: f32, f16, bf16, q8_0"),
        ("ggfu", "q4_0", "format 'ggfu' does not exist; did you mean 'gguf'?"),
    ],
)
def test_an_unknown_scheme_or_format_is_refused(
    format_name: str, scheme: str, said: str, source: Path, tmp_path: Path
) -> None:
    assert said in refused(
        "convert", source, "--format", format_name, "--scheme", scheme, "--out", tmp_path / "a"
    ).replace("\n", " ")
    assert list(tmp_path.iterdir()) == []


def test_inspect_of_an_unknown_scheme_is_refused(source: Path) -> None:
    assert "did you mean 'q5_k_m'?" in refused("inspect", source, "--scheme", "q5km")


def test_convert_of_a_checkpoint_that_is_not_whole_leaves_nothing(tmp_path: Path) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]

    folder = write_checkpoint(tmp_path / "bad", change=spoil)
    said = refused("convert", folder, "--format", "gguf", "--scheme", "q4_0", "--out", tmp_path / "out")
    assert "model.norm.weight: missing" in said
    assert "model.layers.1.mlp.up_proj.weight: missing" in said
    assert {file.name for file in tmp_path.iterdir()} == {"bad"}


# evaluate


def test_evaluate_measures_quality_and_keeps_the_reference(
    source: Path, made: Path, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    arguments = ("evaluate", made, "--checkpoint", source, "--corpus", text, "--context", 64, "--threads", 2)
    file = tmp_path / "quality.json"
    result = succeeded(*arguments, "--json", file)
    found = json.loads(file.read_text())
    assert found.keys() >= {
        *("ppl", "reference_ppl", "ln_ppl_ratio", "kld", "same_top", "bits_per_byte", "windows", "scored_tokens"),
        "engine",
    }
    assert found["ln_ppl_ratio"].keys() == {"value", "low", "high"}
    assert found["kld"].keys() == {"mean", "median", "p99", "p99_9", "max"}
    assert found["windows"] > 5
    assert found["scored_tokens"] == found["windows"] * 31
    assert 0 < found["kld"]["mean"] < 0.05
    assert found["engine"]["name"] == "llama.cpp"
    assert found["engine"]["threads"] == 2
    artifact = json.loads((made / "artifact.json").read_text())
    assert found["artifact"] == artifact["files"]
    assert found["identity"]["source"] == artifact["source"]
    assert found["identity"]["text_sha256"] == hashlib.sha256(text.read_bytes()).hexdigest()
    assert (found["identity"]["corpus"], found["identity"]["context"]) == ("file", 64)
    assert found["identity"]["windows"] == found["windows"]
    assert found["identity"].keys() == IDENTITY.keys()
    assert f"{found['ppl']:.4f}" in result.stdout
    assert max(len(line) for line in result.stdout.splitlines()) <= 80

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("the reference is in the cache")

    monkeypatch.setattr(evaluation, "write_reference", fail)
    assert json.loads(succeeded(*arguments, "--json", "-").stdout) == found  # the reference is not computed again
    with pytest.raises(AssertionError, match="in the cache"):  # but other windows have another one
        CliRunner().invoke(main, [*map(str, arguments), "--windows", "3"], catch_exceptions=False)
    monkeypatch.setattr(chats, "MESSAGES", [{"role": "user", "content": "Another question?"}])  # or another chat
    with pytest.raises(AssertionError, match="in the cache"):
        CliRunner().invoke(main, [*map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize(
    ("reply", "shown"),
    [
        (None, ["reply no chat template"]),
        (
            {
                "text": "It is [b]\n\x1b[31mParis.",
                "tokens": 9,
                "stopped": "<|im_end|>",
                "same_tokens": 6,
                "problem": None,
                "reference_tokens": 8,
            },
            ['reply "It is [b] \ufffd[31mParis."', "  as reference first 6 of 8 tokens; ends with <|im_end|>"],
        ),
        (
            {
                "text": "x" * 99,
                "tokens": 32,
                "stopped": None,
                "same_tokens": 32,
                "reference_tokens": 32,
                "problem": None,
            },
            [f'reply "{"x" * 55}…"', "  as reference first 32 of 32 tokens; no end within 32"],
        ),
    ],
)
def test_evaluate_shows_the_reply(
    reply: dict[str, Any] | None, shown: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    interval = {"low": 0.1, "high": 0.3}
    figures = {"mean": 0.2, "median": 0.2, "p99": 0.2, "max": 0.2}
    found = {"ppl": 9.0, "ppl_interval": interval, "reference_ppl": 8.0, "ln_ppl_ratio": {"value": 0.2, **interval}}
    found |= {"kld": figures, "kld_interval": {"mean": interval}, "same_top": 0.2, "same_top_interval": interval}
    found |= {"bits_per_byte": 1.0, "scored_tokens": 9, "windows": 3, "parity": None, "reply": reply}
    found |= {"engine": COREML_ENGINE, "calibration_overlap": None}
    console_tables.quality("name", found)
    lines = capsys.readouterr().out.splitlines()
    assert not any(line.startswith("checked") for line in lines)
    assert "by reference executor (coremltools 9)" in [" ".join(line.split()) for line in lines]
    assert max(map(len, lines)) <= 80
    (at,) = [i for i, line in enumerate(lines) if line.startswith("reply")]
    assert [line.split() for line in lines[at:]] == [line.split() for line in shown]
    console_tables.quality("name", found | {"parity": PARITY})
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 80
    checked = "checked against mlx (mlx 0.32) on 2 windows: log-probabilities differ by at most 8.0e-06 nats"
    assert squeezed(f"{checked} (limit 1e-03)") in squeezed(text)


def test_evaluate_asks_for_a_longer_text(source: Path, made: Path, text: Path) -> None:
    said = refused(
        *("evaluate", made, "--checkpoint", source, "--corpus", text, "--context", 64, "--windows", 10_000)
    ).replace("\n", " ")
    assert "10000 windows need 640000 tokens" in said


def test_an_artifact_with_a_changed_byte_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", out)
    expected = json.loads((out / "artifact.json").read_text())["files"]["model.gguf"]
    data = bytearray((out / "model.gguf").read_bytes())
    data[-100] ^= 1
    (out / "model.gguf").write_bytes(data)
    for command in (("evaluate", out, "--checkpoint", source, "--corpus", text, "--context", 64), ("benchmark", out)):
        said = refused(*command)
        assert expected in said
        assert hashlib.sha256(data).hexdigest() in said


def test_a_changed_byte_is_seen_where_size_and_time_are_kept(source: Path, text: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    succeeded("convert", source, "--format", "gguf", "--scheme", "q8_0", "--out", out)
    arguments = ("evaluate", out, "--checkpoint", source, "--corpus", text, "--context", 64)
    succeeded(*arguments)
    before, data = (out / "model.gguf").stat(), bytearray((out / "model.gguf").read_bytes())
    data[-100] ^= 1
    with (out / "model.gguf").open("r+b") as file:
        file.write(data)
    os.utime(out / "model.gguf", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert hashlib.sha256(data).hexdigest() in refused(*arguments)


def test_an_artifact_of_another_checkpoint_is_refused(made: Path, text: Path, tmp_path: Path) -> None:
    other = write_checkpoint(tmp_path / "other", Shape("qwen3"), seed=1)
    said = refused("evaluate", made, "--checkpoint", other, "--corpus", text, "--context", 64)
    assert said == (
        f"Error: {made} was made from other files than {other} has. "
        "Give the checkpoint it was made from, or convert again.\n"
    )


def test_a_folder_without_artifact_is_refused(source: Path, text: Path, tmp_path: Path) -> None:
    assert "holds no artifact.json" in refused("evaluate", tmp_path, "--checkpoint", source, "--corpus", text)
    assert "holds no artifact.json" in refused("benchmark", tmp_path)


@pytest.mark.parametrize(
    "content", ["{", "[]", "{}", '{"files": {}}', '{"effective_types": [], "source": {}}', '"text"']
)
def test_a_broken_artifact_json_is_refused(content: str, tmp_path: Path) -> None:
    (tmp_path / "artifact.json").write_text(content)
    assert "artifact.json" in refused("benchmark", tmp_path)


# benchmark


def test_benchmark_keeps_raw_seconds(source: Path, made: Path, tmp_path: Path) -> None:
    other = tmp_path / "made-q4_0"
    succeeded("convert", source, "--format", "gguf", "--scheme", "q4_0", "--out", other)
    file = tmp_path / "speed.json"
    lengths = ("--prompt-length", 8, "--prompt-length", 16, "--prompt-length", 8192)
    result = succeeded(
        *("benchmark", made, other, *lengths, "--decode", 4, "--rounds", 6, "--threads", 1, "--json", file)
    )
    found = json.loads(file.read_text())
    assert found["variants"].keys() == {"made-q8_0", "made-q4_0"}
    for folder in (made, other):
        artifact = json.loads((folder / "artifact.json").read_text())
        assert found["variants"][folder.name]["artifact"] == artifact["files"]
    for variant in found["variants"].values():
        engine = variant["engine"]
        assert (engine["threads"], engine["mmap"]) == (1, True)
        assert engine["batch"] >= engine["micro_batch"] >= 1
        assert variant["prefill"].keys() == {"8", "16"}
        assert variant["decode"].keys() == {"4"}
        assert variant["not_measured"].keys() == {"prefill 8192"}
        assert variant["cold_start"]["tokens"] == 8
        assert variant["peak_memory_bytes"] > variant["kv_bytes"] > 0
        for kind in ("prefill", "decode"):
            for n, task in variant[kind].items():
                assert len(task["seconds"]) == 6
                assert min(task["seconds"]) > 0
                rates = sorted(int(n) / seconds for seconds in task["seconds"])
                rate = task["tokens_per_second"]
                assert rate["value"] == pytest.approx((rates[2] + rates[3]) / 2, rel=1e-12)
                assert (rate["low"], rate["high"]) == (rates[0], rates[5])
    assert found["settings"]["prompt_lengths"] == [8, 16, 8192]
    assert found["order"] == "interleaved"
    assert found["machine"]["cpu"]
    lines = result.stdout.splitlines()
    assert max(len(line) for line in lines) <= 80
    rows = [line.split()[:3] for line in lines if line.startswith("made-")]
    tasks = [["prefill", "8"], ["prefill", "16"], ["decode", "4"], ["prefill", "8192"]]
    assert [row[1:] for row in rows[:8]] == tasks * 2
    assert [row[0] for row in rows[8:]] == ["made-q8_0", "made-q4_0"]  # cold starts and memory
    assert squeezed("Not measured: prefill 8192 of made-q8_0, made-q4_0: with 4 tokens") in squeezed(result.stdout)


def test_speeds_are_shown_with_their_marks(capsys: pytest.CaptureFixture[str]) -> None:
    def task(rate: float, disturbed: list[int], drift: float) -> dict[str, Any]:
        return {
            "seconds": [1.0] * 7,
            "disturbed_rounds": disturbed,
            "tokens_per_second": {"value": rate, "low": rate - 1, "high": rate + 1},
            "drift": {"value": drift, "p_value": 0.01, "drifted": drift < -0.05},
        }

    seconds = {"value": 1.25, "samples": [1.25] * 3}
    timed = {
        "engine": ENGINE,
        "prefill": {"128": task(12345.6, [], 0.01), "512": task(11111.1, [1, 2], -0.184)},
        "decode": {"64": task(99.9, [3], 0.0)},
        "not_measured": {},
        "cold_start": {
            "load_seconds": seconds,
            "first_prefill_seconds": seconds,
            "tokens": 128,
            "page_cache_dropped": False,
        },
        "unrepresentative": None,
        "peak_memory_bytes": 1_234_567_890,
        "memory_by": "resident set",
        "kv_bytes": 12_582_912,
        "placement": None,
    }
    machine = {"cpu": "A [fast] CPU"}
    console_tables.speed({"machine": machine, "variants": {"a-long[name]-q4_k_m": timed}})
    text = capsys.readouterr().out
    lines = text.splitlines()
    assert max(len(line) for line in lines) <= 80
    rows = [line.split()[1:] for line in lines if line.startswith("a-long[name]-q4_k_m ")]
    assert rows == [
        ["prefill", "128", "12345.6", "[12344.6,", "12346.6]", "7"],
        ["prefill", "512", "11111.1", "[11110.1,", "11112.1]", "†‡", "7"],
        ["decode", "64", "99.9", "[98.9,", "100.9]", "†", "7"],
        ["1.25", "1.25", "1,235", "12.6"],
    ]
    assert "† Some rounds were disturbed, at most 2 of 7" in text
    assert squeezed("by chance: a-long[name]-q4_k_m prefill 512 -18 %.") in squeezed(text)
    assert squeezed("the page cache not dropped before") in squeezed(text)
    assert "A [fast] CPU" in text
    none = {"cold_start": {}, "peak_memory_bytes": None, "memory_by": None, "kv_bytes": None}
    other = {**timed, **none, "prefill": {}, "decode": {"64": task(9.9, [], 0.0)}, "unrepresentative": "[no] GPU"}
    console_tables.speed({"machine": machine, "variants": {"a": timed, "mlx": other}})
    text = capsys.readouterr().out
    assert max(len(line) for line in text.splitlines()) <= 80
    rows = [line.split() for line in text.splitlines() if line.startswith("mlx ")]
    assert rows == [["mlx", "decode", "64", "9.9", "[8.9,", "10.9]", "§", "7"], ["mlx", *["not", "measured"] * 4]]
    assert squeezed("§ Not representative, and so never picked: mlx: [no] GPU. Medians of 7.") in squeezed(text)
    assert "operations of" not in text
    half = {"prefill": {"cpu": 0.25, "gpu": 0.0, "neural_engine": 0.75}, "decode": {"cpu": 1, "gpu": 0}}
    half["decode"]["neural_engine"] = 0
    console_tables.speed({"machine": machine, "variants": {"coreml": timed | {"placement": half}}})
    assert capsys.readouterr().out.splitlines()[-2:] == [
        f"{'artifact':10}{'operations of prefill':30}operations of decode",
        f"{'coreml':10}{'CPU 25 %, Neural Engine 75 %':30}CPU 100 %           ",
    ]


def test_what_needs_macos_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    keys = ("engine", "unrepresentative", "peak_memory_bytes", "memory_by", "kv_bytes", "placement")
    untimed = {**dict.fromkeys(keys), "prefill": {}, "decode": {}, "cold_start": {}}
    untimed["not_measured"] = dict.fromkeys(TASKS, NEEDS_MACOS)
    console_tables.speed({"machine": {"cpu": "A CPU"}, "variants": {"coreml-int8-long": untimed, "b": untimed}})
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert [" ".join(line.split()) for line in lines] == [
        "artifact task tokens/s rounds",
        *(f"{name} {task} not measured (needs macOS)" for name in ("coreml-int8-long", "b") for task in TASKS),
        "",
        "A CPU",  # without a word on intervals that are not there
        "Not measured: speed and memory of coreml-int8-long, b: needs macOS.",
    ]


def test_artifacts_of_one_name_are_refused(made: Path, tmp_path: Path) -> None:
    assert "same folder name" in refused("benchmark", made, tmp_path / made.name)


def test_benchmark_without_artifacts_is_a_usage_error() -> None:
    assert "Missing argument 'ARTIFACT...'" in refused("benchmark")
