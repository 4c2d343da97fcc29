"""Weights rounded by an importance matrix, against llama_model_quantize given the same one: types and bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
from family import FAMILY, tiny
from gguf import GGUFReader

from pipeline.errors import ArtifactError, ParamsError, QuantizationError
from pipeline.formats.gguf import arrange, imatrix
from pipeline.formats.gguf.imatrix import Imatrix
from pipeline.formats.gguf.importance import of_sums
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.formats.gguf.write import FILE, write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Calibration, Options, Sums

WIDE = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 1, "head_dim": 64}
MODELS: dict[str, dict[str, Any]] = {
    "dense": {
        "model_type": "qwen3",
        **WIDE,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "tie_word_embeddings": True,
    },
    "experts": {"model_type": "qwen3_moe", **WIDE, "moe_intermediate_size": 256, "num_hidden_layers": 1, "experts": 2},
    "ragged": {"model_type": "qwen3", **WIDE, "intermediate_size": 416, "num_hidden_layers": 1},
}
FAST = ("q4_0", "q5_1", "q8_0", "q2_k", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "iq4_nl")
SLOW = ("iq4_xs", "iq3_s", "iq2_xs", "iq1_m")
CASES = [
    *(("dense", scheme) for scheme in ("q4_0", "q2_k", "q4_k_m", "q5_k_m", "iq4_nl")),  # mixes that go by the layer
    *(("experts", scheme) for scheme in (*FAST, *SLOW)),
    *(("ragged", scheme) for scheme in ("q4_k_m", "iq4_xs")),  # fallbacks
]


def random_imatrix(folder: Path, left_out: str = "") -> Imatrix:
    """Inputs of very different importance, no embedding, and of each tensor's experts one that was never activated."""
    rng = np.random.default_rng(1)
    with Checkpoint(folder) as checkpoint:
        parts = arrange.arranged(spec_of(checkpoint.config, checkpoint.shapes))
    tensors = {}
    for part in parts:
        shape = part.tensor.shape
        if len(shape) > 1 and part.name.startswith("blk.") and (not left_out or left_out not in part.name):
            count = 1 if len(shape) == 2 else shape[0]
            tokens = np.array([7] if len(shape) == 2 else [0, *range(3, 2 + count)], np.int64)
            sums = rng.lognormal(0, 1.5, (count, shape[-1])).astype(np.float32) * (tokens[:, None] > 0)
            tensors[part.name] = Sums(sums.astype(np.float32), tokens)
    return Imatrix(tensors, ("text.txt",), 1, 7)


def as_llama_quantize_reads(path: Path) -> dict[str, np.ndarray]:
    """load_imatrix of tools/quantize/quantize.cpp, by gguf-py."""
    stored = {tensor.name: tensor.data for tensor in GGUFReader(path).tensors}
    found = {}
    for name in {name.rsplit(".", 1)[0] for name in stored}:
        rows = []
        for sums, count in zip(stored[f"{name}.in_sum2"], stored[f"{name}.counts"].ravel(), strict=True):
            rows.append(sums / np.float32(count) if count else np.ones_like(sums))
        found[name] = np.concatenate(rows)
    return found


@dataclass(frozen=True)
class Model:
    """A checkpoint, its weights in a GGUF file of float32, and an importance matrix of it."""

    checkpoint: Path
    base: Path
    imatrix: Path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Model]:
    @cache
    def made(name: str) -> Model:
        folder = tmp_path_factory.mktemp(name)
        checkpoint = tiny(folder=folder / "source", **MODELS[name])
        imatrix.write(folder / "imatrix.gguf", random_imatrix(checkpoint))
        (folder / "f32").mkdir()
        with Checkpoint(checkpoint) as source:
            write(source, "f32", folder / "f32")
        return Model(checkpoint, folder / "f32" / FILE, folder / "imatrix.gguf")

    return made


@pytest.mark.parametrize(("name", "scheme"), CASES)
def test_every_tensor_equals_llama_quantize(
    name: str, scheme: str, models: Callable[[str], Model], tmp_path: Path
) -> None:
    model = models(name)
    with Checkpoint(model.checkpoint) as source:
        made = write(source, scheme, tmp_path, options=Options(imatrix=model.imatrix))
    given = as_llama_quantize_reads(model.imatrix)
    theirs = oracle.quantize(model.base, SCHEMES[scheme].ftype, tmp_path / "theirs.gguf", importance=given)
    assert oracle.tensors(tmp_path / FILE) == oracle.tensors(theirs)
    assert made.scheme == f"{scheme}+imatrix"
    assert made.imatrix is not None
    head = [] if "output.weight" not in made.tensors else ["output.weight"]
    assert sorted(made.imatrix.without) == sorted(["token_embd.weight", *head])


@pytest.mark.parametrize("scheme", ["q4_0", "q4_k_m", "iq4_xs"])
def test_importance_changes_the_bytes_and_says_so(scheme: str, models: Callable[[str], Model], tmp_path: Path) -> None:
    """Else the equality above would say nothing."""
    model = models("experts")
    with Checkpoint(model.checkpoint) as source:
        for name, given in (("with", model.imatrix), ("without", None)):
            (tmp_path / name).mkdir()
            write(source, scheme, tmp_path / name, options=Options(imatrix=given))
    found, plain = (oracle.tensors(tmp_path / name / FILE) for name in ("with", "without"))
    quantized = {name for name, (kind, _) in found.items() if kind[0] in "QI" and name.startswith("blk.")}
    assert {name for name in quantized if found[name] == plain[name]} == set()
    assert oracle.field(tmp_path / "with" / FILE, "quantize.imatrix.file") == "imatrix.gguf"
    assert oracle.field(tmp_path / "with" / FILE, "quantize.imatrix.dataset") == "text.txt"
    assert oracle.field(tmp_path / "with" / FILE, "quantize.imatrix.chunks_count") == 1


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny(folder=tmp_path_factory.mktemp("experts") / "source", **MODELS["experts"])


def test_coverage_of_experts_is_told(experts: Path, tmp_path: Path) -> None:
    imatrix.write(tmp_path / "imatrix.gguf", random_imatrix(experts))
    (tmp_path / "out").mkdir()
    with Checkpoint(experts) as source:
        made = write(source, "q4_k_m", tmp_path / "out", options=Options(imatrix=tmp_path / "imatrix.gguf")).imatrix
    assert made is not None
    assert [(use.layer, use.experts, use.activated, use.fewest) for use in made.experts] == [(0, 2, 1, 0)]
    assert (made.datasets, made.chunks, made.chunk_size, made.text_sha256) == (("text.txt",), 1, 7, None)
    assert made.matrices == 4 + 3


def test_a_matrix_that_is_not_in_it_goes_without_where_it_can(experts: Path, tmp_path: Path) -> None:
    imatrix.write(tmp_path / "imatrix.gguf", random_imatrix(experts, left_out="ffn_down_exps"))
    with Checkpoint(experts) as source:
        for scheme in ("q4_k_m", "iq2_xs"):
            (tmp_path / scheme).mkdir()
        made = write(source, "q4_k_m", tmp_path / "q4_k_m", options=Options(imatrix=tmp_path / "imatrix.gguf"))
        assert made.imatrix is not None
        assert "blk.0.ffn_down_exps.weight" in made.imatrix.without
        with pytest.raises(QuantizationError, match="iq2_xs needs more than the importance matrix holds for 1 tensor"):
            write(source, "iq2_xs", tmp_path / "iq2_xs", options=Options(imatrix=tmp_path / "imatrix.gguf"))
    assert not any((tmp_path / "iq2_xs").iterdir())


def test_what_is_no_use_or_of_another_model_is_refused(experts: Path, tmp_path: Path) -> None:
    other = random_imatrix(tiny("qwen3_moe", tmp_path / "other", experts=4, num_hidden_layers=1))
    imatrix.write(tmp_path / "other.gguf", other)
    (tmp_path / "out").mkdir()
    with Checkpoint(experts) as source:
        with pytest.raises(ArtifactError, match=r"other.gguf is of another model"):
            write(source, "q4_0", tmp_path / "out", options=Options(imatrix=tmp_path / "other.gguf"))
        with pytest.raises(ParamsError, match="imatrix: bf16 quantizes nothing"):
            write(source, "bf16", tmp_path / "out", options=Options(imatrix=tmp_path / "other.gguf"))
    assert not any((tmp_path / "out").iterdir())


@pytest.mark.parametrize("model_type", FAMILY)
def test_sums_go_to_every_matrix_of_the_file_in_its_order_of_columns(model_type: str, tmp_path: Path) -> None:
    folder = tiny(model_type, tmp_path / "source")
    (tmp_path / "f32").mkdir()
    with Checkpoint(folder) as source:
        write(source, "f32", tmp_path / "f32")
        spec = spec_of(source.config, source.shapes)
        sums = {}
        for tensor in spec.tensors:
            if len(tensor.shape) > 1 and tensor.role not in {"embed", "head", "delta_conv"}:
                rows = source.rows(tensor, 0, 1 if len(tensor.shape) == 2 else tensor.shape[0])  # stand for sums
                sums[tensor.name] = Sums(rows, np.ones(len(rows), np.int64))
    made = of_sums(spec, sums, Calibration("text.txt", "", "", np.zeros((2, 8), np.int32)))
    assert (made.chunks, made.chunk_size, made.datasets) == (2, 8, ("text.txt",))
    stored = {tensor.name: tensor for tensor in GGUFReader(tmp_path / "f32" / FILE).tensors}
    convolutions = {name for name in stored if "conv1d" in name}
    matrices = {name for name, tensor in stored.items() if name.startswith("blk.") and len(tensor.shape) > 1}
    shared_gates = {name for name in stored if name.endswith("ffn_gate_inp_shexp.weight")}  # one row: a vector there
    assert made.tensors.keys() == (matrices - convolutions) | shared_gates
    for name in stored:
        if name.endswith(
            ("ssm_out.weight", "attn_output.weight", "ffn_down.weight")
        ):  # whose first row stays the first
            assert np.array_equal(made.tensors[name].sums[0], stored[name].data[0]), name
    if spec.experts:
        one, two = (made.tensors[f"blk.0.ffn_{part}_exps.weight"].sums for part in ("gate", "up"))
        assert one.shape == (spec.experts.count, spec.d_model)
        assert np.array_equal(one, two)
