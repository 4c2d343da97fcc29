"""A whole file: its metadata read back by gguf-py, its tensors, and what happens when it cannot be written."""

from __future__ import annotations

import json
from collections import namedtuple
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from support import MERGES, SPECIALS, Shape, random_tensors, to_bytes, tokenizer_json, write_checkpoint

from pipeline.errors import (
    ArtifactError,
    CheckpointError,
    OutputError,
    ParamsError,
    PipelineError,
    QuantizationError,
    TokenizerError,
)
from pipeline.files import new_folder, sha256
from pipeline.formats.gguf import reader
from pipeline.formats.gguf.reader import StoredTensor
from pipeline.formats.gguf.run import GgufRuntime
from pipeline.formats.gguf.schemes import Q4_0, SCHEMES
from pipeline.formats.gguf.write import write
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact, EffectiveType

QWEN3 = Shape(
    "qwen3", 2, hidden=128, ff=256, heads=2, kv_heads=1, head_dim=128
)  # Qwen3-0.6B's ratio: q is twice as wide
ENDOFTEXT, IM_START, IM_END = range(260, 263)  # behind 256 bytes and 4 merges


def convert(source: Path, scheme: str, folder: Path) -> tuple[Path, Artifact]:
    folder.mkdir(parents=True, exist_ok=True)
    with Checkpoint(source) as checkpoint:
        artifact = write(checkpoint, scheme, folder)
    (name,) = artifact.files
    return folder / name, artifact


def metadata(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    return {key: found.contents() for key, found in GGUFReader(path).fields.items() if not key.startswith("GGUF.")}


def test_metadata_of_qwen3_equals_the_config(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "some-model", QWEN3, config={"rms_norm_eps": 1e-5, "rope_theta": 5e5})
    found = metadata(convert(source, "q8_0", tmp_path / "out")[0])
    tokens = sorted(tokenizer_json()["model"]["vocab"], key=tokenizer_json()["model"]["vocab"].__getitem__)
    assert found == {
        "general.architecture": "qwen3",
        "general.type": "model",
        "general.name": "some-model",
        "general.file_type": 7,
        "general.quantization_version": 2,
        "qwen3.block_count": 2,
        "qwen3.context_length": 2048,
        "qwen3.embedding_length": 128,
        "qwen3.feed_forward_length": 256,
        "qwen3.attention.head_count": 2,
        "qwen3.attention.head_count_kv": 1,
        "qwen3.attention.key_length": 128,
        "qwen3.attention.value_length": 128,
        "qwen3.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        "qwen3.rope.freq_base": 5e5,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": [*tokens, *SPECIALS, *(f"[PAD{i}]" for i in range(263, 272))],
        "tokenizer.ggml.token_type": [1] * 260 + [3] * 3 + [5] * 9,
        "tokenizer.ggml.merges": [" ".join(merge) for merge in MERGES],
        "tokenizer.ggml.eos_token_id": IM_END,
        "tokenizer.ggml.add_bos_token": False,
    }


def test_names_of_qwen2s_tensors(tmp_path: Path) -> None:
    path, _ = convert(write_checkpoint(tmp_path / "c", Shape(layers=1, tied=False)), "bf16", tmp_path / "out")
    layer = [
        *(f"{part}.{kind}" for part in ("attn_q", "attn_k", "attn_v") for kind in ("weight", "bias")),
        *(f"{part}.weight" for part in ("attn_norm", "attn_output", "ffn_norm", "ffn_gate", "ffn_up", "ffn_down")),
    ]
    names = {"token_embd.weight", "output_norm.weight", "output.weight", *(f"blk.0.{part}" for part in layer)}
    assert oracle.tensors(path).keys() == names


@pytest.mark.parametrize("scheme", SCHEMES)
def test_the_file_type_is_the_schemes(scheme: str, tmp_path: Path) -> None:
    path, _ = convert(write_checkpoint(tmp_path / "c"), scheme, tmp_path / "out")
    ftypes = {  # llama.h
        **{"f32": 0, "f16": 1, "bf16": 32, "q8_0": 7, "q6_k": 18, "q5_k_m": 17, "q5_k_s": 16, "q5_1": 9, "q5_0": 8},
        **{"q4_k_m": 15, "q4_k_s": 14, "q4_1": 3, "q4_0": 2, "iq4_nl": 25, "iq4_xs": 30},
        **{"q3_k_l": 13, "q3_k_m": 12, "q3_k_s": 11, "q2_k": 10},
        **{"iq3_s": 26, "iq3_xxs": 23, "iq2_s": 28, "iq2_xs": 20, "iq2_xxs": 19, "iq1_m": 31},
    }
    assert oracle.field(path, "general.file_type") == ftypes[scheme]


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_the_sources_own_type_keeps_every_byte(dtype: str, tmp_path: Path) -> None:
    path, _ = convert(write_checkpoint(tmp_path / "c", QWEN3, dtype), dtype.lower(), tmp_path / "out")
    found, weights = oracle.tensors(path), random_tensors(QWEN3)
    assert len(found) == len(weights)
    for ours, theirs in {
        "token_embd.weight": "model.embed_tokens.weight",
        "blk.0.attn_k.weight": "model.layers.0.self_attn.k_proj.weight",
        "blk.1.attn_q.weight": "model.layers.1.self_attn.q_proj.weight",
        "blk.1.attn_output.weight": "model.layers.1.self_attn.o_proj.weight",
        "blk.1.ffn_gate.weight": "model.layers.1.mlp.gate_proj.weight",
        "blk.1.ffn_down.weight": "model.layers.1.mlp.down_proj.weight",
    }.items():
        assert found[ours] == (dtype, to_bytes(weights[theirs], dtype))
    norm = weights["model.layers.1.self_attn.q_norm.weight"]
    kept = {
        "F32": lambda: norm,
        "F16": lambda: norm.astype(np.float16).astype(np.float32),
        "BF16": lambda: (norm.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32),
    }[dtype]()
    assert found["blk.1.attn_q_norm.weight"] == ("F32", kept.tobytes())


YARN: dict[str, Any] = {"factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    "config",
    [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    ],
    ids=["type", "rope_type", "rope_parameters"],
)
def test_yarn_gives_the_same_keys_however_it_is_written(config: dict[str, Any], tmp_path: Path) -> None:
    """llama.cpp#13322."""
    found = metadata(convert(write_checkpoint(tmp_path / "c", config=config), "q8_0", tmp_path / "out")[0])
    assert {key: value for key, value in found.items() if key.startswith("qwen2.rope.")} == {
        "qwen2.rope.freq_base": 1e6,
        "qwen2.rope.scaling.type": "yarn",
        "qwen2.rope.scaling.factor": 4.0,
        "qwen2.rope.scaling.original_context_length": 512,
    }


def test_yarn_gives_the_same_bytes_however_it_is_written(tmp_path: Path) -> None:
    """Not only the rope keys: nothing else of the file depends on the spelling."""
    spellings: list[dict[str, Any]] = [
        {"rope_scaling": {"type": "yarn", **YARN}},
        {"rope_scaling": {"rope_type": "yarn", **YARN}},
        {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, **YARN}},
    ]
    files = []
    for i, config in enumerate(spellings):
        source = write_checkpoint(tmp_path / str(i) / "c", config=config)  # of one name, which the file holds
        files.append(convert(source, "q8_0", tmp_path / f"out-{i}")[0].read_bytes())
    assert len(set(files)) == 1
    plain, _ = convert(write_checkpoint(tmp_path / "plain" / "c"), "q8_0", tmp_path / "out")
    assert plain.read_bytes() != files[0]


@pytest.mark.parametrize("beta", [{"beta_fast": 16.0}, {"beta_slow": 2.0}])
def test_yarn_betas_that_llama_cpp_does_not_read_are_refused(beta: dict[str, float], tmp_path: Path) -> None:
    """It reads `rope.scaling.yarn_beta_*` for grok and mistral3 only: a Qwen with other betas runs wrong unseen."""
    source = write_checkpoint(tmp_path / "c", config={"rope_scaling": {"rope_type": "yarn", **YARN, **beta}})
    with pytest.raises(PipelineError, match="beta_"):
        convert(source, "q8_0", tmp_path / "out")


def test_special_ids_of_the_config(tmp_path: Path) -> None:
    ids = {"bos_token_id": ENDOFTEXT, "eos_token_id": [IM_END, ENDOFTEXT], "pad_token_id": IM_START}
    path, _ = convert(write_checkpoint(tmp_path / "c", config=ids), "q8_0", tmp_path / "out")
    found = metadata(path)
    assert found["tokenizer.ggml.bos_token_id"] == ENDOFTEXT
    assert found["tokenizer.ggml.eos_token_id"] == IM_END
    assert found["tokenizer.ggml.padding_token_id"] == IM_START
    assert found["tokenizer.ggml.add_bos_token"] is False


def test_special_ids_of_the_tokenizer_come_first(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    settings = {"bos_token": None, "eos_token": {"content": "<|endoftext|>"}, "pad_token": "<|im_start|>"}
    (source / "tokenizer_config.json").write_text(json.dumps(settings))
    found = metadata(convert(source, "q8_0", tmp_path / "out")[0])
    assert "tokenizer.ggml.bos_token_id" not in found
    assert found["tokenizer.ggml.eos_token_id"] == ENDOFTEXT
    assert found["tokenizer.ggml.padding_token_id"] == IM_START


def test_the_chat_template_is_carried(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }} é{% endfor %}"
    (source / "tokenizer_config.json").write_text(json.dumps({"chat_template": "another"}))
    (source / "chat_template.jinja").write_text(template, encoding="utf-8")
    path, _ = convert(source, "q8_0", tmp_path / "out")
    assert oracle.field(path, "tokenizer.chat_template") == template


def test_an_unknown_pre_tokenizer_is_refused_and_shown(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c")
    (source / "tokenizer.json").write_text(json.dumps(tokenizer_json(split=r"\p{L}+|\p{N}{1,3}")))
    with pytest.raises(TokenizerError, match=r"\\p\{L\}\+\|\\p\{N\}\{1,3\}"):
        convert(source, "q8_0", tmp_path / "out")


def test_artifact_says_what_the_file_is(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN3)
    path, artifact = convert(source, "q4_k_m", tmp_path / "out")
    weights = {name: w.size for name, w in random_tensors(QWEN3).items()}
    vectors = [name for name, w in random_tensors(QWEN3).items() if w.ndim == 1]
    embed, down = weights["model.embed_tokens.weight"], weights["model.layers.0.mlp.down_proj.weight"]
    output = weights["model.layers.0.self_attn.o_proj.weight"]  # rows of 2 x 128: the only others that divide by 256
    q8_0 = embed + weights["model.layers.1.self_attn.v_proj.weight"]
    f32 = sum(weights[name] for name in vectors)
    q5_0 = sum(weights.values()) - f32 - q8_0 - 2 * down - 2 * output
    assert artifact.effective_types == {
        "Q5_0": EffectiveType(9, q5_0),
        "Q4_K": EffectiveType(3, down + 2 * output),
        "Q8_0": EffectiveType(2, q8_0),
        "Q6_K": EffectiveType(1, down),
        "F32": EffectiveType(len(vectors), f32),
    }
    bits = 32 * f32 + 8.5 * q8_0 + 5.5 * q5_0 + 4.5 * (down + 2 * output) + 6.5625 * down
    assert artifact.weights == sum(weights.values())
    assert artifact.bits_per_weight == pytest.approx(bits / artifact.weights, rel=1e-12)
    assert artifact.size_bytes == path.stat().st_size
    assert artifact.files == {"model.gguf": sha256(path)}
    assert (artifact.format, artifact.scheme, artifact.source.name) == ("gguf", "q4_k_m", "c")
    assert artifact.source.files.keys() == {"model.safetensors", "config.json", "tokenizer.json"}


def test_progress_reaches_all_weights(tmp_path: Path) -> None:
    done: list[float] = []
    with Checkpoint(write_checkpoint(tmp_path / "c")) as checkpoint:
        artifact = write(checkpoint, "q8_0", tmp_path, done.append)
    assert sum(done) == artifact.weights


def test_a_tied_head_is_absent_and_the_file_runs(tmp_path: Path) -> None:
    """llama.cpp#6578."""
    path, _ = convert(write_checkpoint(tmp_path / "c", Shape(layers=24)), "q8_0", tmp_path / "out")
    assert "output.weight" not in oracle.tensors(path)
    with closing(GgufRuntime(path, context=64, threads=1)) as runtime:
        logits = np.concatenate([rows.copy() for rows in runtime.score(np.arange(64, dtype=np.int32), 0)])
    assert logits.shape == (64, 272)
    assert np.isfinite(logits).all()
    assert logits.std() > 0.1


def test_an_equal_head_beside_a_tied_embedding_is_written_once(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    without, _ = convert(write_checkpoint(tmp_path / "a" / "c"), "q4_k_m", tmp_path / "a" / "out")
    with_head = write_checkpoint(tmp_path / "b" / "c", change=add_head)
    assert "lm_head.weight" in Checkpoint(with_head).tensors
    assert convert(with_head, "q4_k_m", tmp_path / "b" / "out")[0].read_bytes() == without.read_bytes()


def test_another_head_beside_a_tied_embedding_is_refused(tmp_path: Path) -> None:
    def add_head(tensors: dict[str, np.ndarray]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + np.float32(1)

    source = write_checkpoint(tmp_path / "c", change=add_head)
    with pytest.raises(CheckpointError, match=r"lm_head\.weight: differs"):
        convert(source, "q8_0", tmp_path / "out")


def test_shards_and_a_single_file_give_the_same_bytes(tmp_path: Path) -> None:
    """However the source is cut."""
    single, _ = convert(write_checkpoint(tmp_path / "a" / "c"), "q4_k_m", tmp_path / "a" / "out")
    sharded = write_checkpoint(tmp_path / "b" / "c", shards=3)
    assert len(list(sharded.glob("*.safetensors"))) == 3
    assert convert(sharded, "q4_k_m", tmp_path / "b" / "out")[0].read_bytes() == single.read_bytes()


@pytest.mark.parametrize("scheme", ["f32", "bf16", "q5_0", "q4_k_m"])
def test_converting_twice_gives_the_same_bytes(scheme: str, tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "c", QWEN3)
    first, _ = convert(source, scheme, tmp_path / "first")
    again, _ = convert(source, scheme, tmp_path / "again")
    assert first.read_bytes() == again.read_bytes()


def test_a_path_with_spaces_and_other_letters(tmp_path: Path) -> None:
    """As on a person's disk."""
    plain, _ = convert(write_checkpoint(tmp_path / "c"), "q8_0", tmp_path / "out")
    source = write_checkpoint(tmp_path / "weiß ist 白" / "Qwén my model")
    path, _ = convert(source, "q8_0", tmp_path / "où ça" / "im Ordner")
    assert oracle.tensors(path) == oracle.tensors(plain)
    assert oracle.field(path, "general.name") == "Qwén my model"
    GgufRuntime(path, context=8, threads=1).close()


def nothing_left(folder: Path) -> bool:
    return list(folder.iterdir()) == []


@pytest.mark.parametrize("scheme", ["q8_0", "q4_k_m", "f32"])
def test_weights_that_are_not_finite_are_all_named_and_nothing_is_left(scheme: str, tmp_path: Path) -> None:
    broken = ["model.layers.0.mlp.up_proj.weight", "model.layers.1.self_attn.q_proj.bias"]

    def break_two(tensors: dict[str, np.ndarray]) -> None:
        tensors[broken[0]][3, 5] = np.nan
        tensors[broken[1]][2] = np.inf

    source = write_checkpoint(tmp_path / "c", change=break_two)
    (tmp_path / "results").mkdir()
    with (
        Checkpoint(source) as checkpoint,
        pytest.raises(QuantizationError) as raised,
        new_folder(tmp_path / "results" / "out") as partial,
    ):
        write(checkpoint, scheme, partial)
    lines = [line for line in str(raised.value).splitlines() if line.startswith("  - ")]
    assert sorted(lines) == [f"  - {name}: weights that are not finite" for name in broken]
    assert nothing_left(tmp_path / "results")


def test_weights_too_large_for_f16_are_named(tmp_path: Path) -> None:
    def enlarge(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.layers.1.mlp.down_proj.weight"][0, 0] = 1e5

    source = write_checkpoint(tmp_path / "c", change=enlarge)
    with pytest.raises(QuantizationError, match=r"layers\.1\.mlp\.down_proj\.weight: weights too large for F16"):
        convert(source, "f16", tmp_path / "out")


def test_too_little_disk_is_refused_before_a_byte_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = namedtuple("usage", "total used free")
    source = write_checkpoint(tmp_path / "c")
    monkeypatch.setattr("shutil.disk_usage", lambda folder: usage(10**9, 10**9 - 1000, 1000))
    with pytest.raises(OutputError, match=r"needs \d+ MB, 0 MB are free"):
        convert(source, "q8_0", tmp_path / "out")
    assert nothing_left(tmp_path / "out")


def test_an_unknown_scheme_is_refused_with_a_suggestion(tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match=r"'q4_k'; did you mean 'q4_k_s'\?"):
        convert(write_checkpoint(tmp_path / "c"), "q4_k", tmp_path / "out")
    assert nothing_left(tmp_path / "out")


Table = list[StoredTensor]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], r"expected 26 tensors and \d+ bytes, read back 25"),
        (lambda rows: [*rows, rows[0]], r"expected 26 tensors and \d+ bytes, read back 27"),
        (lambda rows: [replace(row, encoding=Q4_0) for row in rows], r"token_embd\.weight \[272, 64\] Q8_0, .* Q4_0, "),
        (
            lambda rows: [replace(row, shape=(64, 272)) for row in rows],
            r"token_embd\.weight \[272, 64\] .* \[64, 272\]",
        ),
        (lambda rows: [replace(row, offset=row.offset + 32) for row in rows], r"expected tensor token_embd\.weight"),
        (lambda rows: rows[::-1], r"expected tensor token_embd\.weight.* read back output_norm"),
    ],
    ids=["dropped", "added", "type", "shape", "offset", "order"],
)
def test_a_table_that_does_not_read_back_as_planned(
    change: Callable[[Table], Table], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, read = write_checkpoint(tmp_path / "c"), reader.table
    monkeypatch.setattr(reader, "table", lambda path: change(read(path)))
    with pytest.raises(ArtifactError, match=message):
        convert(source, "q8_0", tmp_path / "out")


def test_a_file_of_another_length_does_not_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, read = write_checkpoint(tmp_path / "c"), reader.table

    def read_longer(path: Path) -> Table:
        rows = read(path)
        with path.open("ab") as file:
            file.write(b"\0" * 7)
        return rows

    monkeypatch.setattr(reader, "table", read_longer)
    with pytest.raises(ArtifactError, match=r"expected 26 tensors and \d+ bytes"):
        convert(source, "q8_0", tmp_path / "out")
