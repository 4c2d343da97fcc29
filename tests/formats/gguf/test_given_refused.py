"""Files that others made are refused where they cannot run or are of another checkpoint, with every reason."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader
from rewriting import Change, Tensor, replaced, rewrite, zeros
from support import Shape, write_checkpoint

from pipeline import artifact as artifacts
from pipeline.errors import ArtifactError
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Artifact

SHAPE = Shape("qwen3", hidden=256, ff=256)
KIND = GGMLQuantizationType


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("refused") / "source", SHAPE)


@pytest.fixture(scope="module")
def file(source: Path) -> Path:
    artifacts.convert(source, "gguf", "q8_0", source.parent / "q8_0")
    return source.parent / "q8_0" / "model.gguf"


def described(path: Path, source: Path) -> Artifact:
    with Checkpoint(source) as checkpoint:
        return artifacts.describe(path, "gguf", checkpoint)


def refusal(path: Path, source: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        described(path, source)
    return str(caught.value)


@pytest.mark.parametrize("kind", [KIND.Q8_K, KIND.I8, KIND.I16, KIND.I32, KIND.I64, KIND.F64])
def test_types_that_no_matrix_can_have_are_refused(kind: KIND, source: Path, file: Path, tmp_path: Path) -> None:
    """llama.cpp would load the file, and end the process."""
    other = zeros("blk.1.ffn_up.weight", (256, 256), kind)
    path = rewrite(file, tmp_path / "a.gguf", change=replaced(other))
    said = f"{path} cannot be run:\n  - blk.1.ffn_up.weight is {kind.name}\nllama.cpp computes with"
    assert refusal(path, source).startswith(said)
    with pytest.raises(ArtifactError, match="cannot be run"):  # nor timed
        artifacts.describe(path, "gguf", None)


def test_vectors_in_16_bits_are_refused(source: Path, file: Path, tmp_path: Path) -> None:
    other = Tensor("output_norm.weight", np.ones(256, np.float16), KIND.F16)
    path = rewrite(file, tmp_path / "a.gguf", change=replaced(other))
    assert "  - output_norm.weight is F16\nllama.cpp computes with F32 vectors" in refusal(path, source)


def without(name: str) -> Change:
    return lambda tensors: [tensor for tensor in tensors if tensor.name != name]


def extra(name: str) -> Change:
    return lambda tensors: [*tensors, zeros(name, (4, 256), KIND.F16)]


def tokens_of(path: Path, **texts: str) -> dict[str, Any]:
    tokens = GGUFReader(path).fields["tokenizer.ggml.tokens"].contents()
    return {"tokenizer.ggml.tokens": [texts.get(f"at_{i}", token) for i, token in enumerate(tokens)]}


@pytest.mark.parametrize(
    ("keys", "change", "problem"),
    [
        ({"general.architecture": "qwen2"}, list, "architecture: expected qwen3, found qwen2"),
        ({"general.architecture": None}, list, "architecture: expected qwen3, found None"),
        ({"qwen3.block_count": 0}, list, "block_count: expected 2, found 0"),
        ({"qwen3.attention.head_count_kv": None}, list, "attention.head_count_kv: expected 2, found 4"),
        ({"qwen3.attention.head_count": 8}, list, "attention.head_count: expected 4, found 8"),
        ({"qwen3.attention.head_count_kv": 4}, list, "attention.head_count_kv: expected 2, found 4"),
        ({}, without("blk.1.ffn_up.weight"), "blk.1.ffn_up.weight: missing, expected [256, 256]"),
        ({}, extra("v.patch_embd.weight"), "v.patch_embd.weight: not a tensor of qwen3"),
        (
            {},
            replaced(zeros("blk.0.ffn_up.weight", (512, 256), KIND.F16)),
            "blk.0.ffn_up.weight: expected [256, 256], found [512, 256]",
        ),
        ({}, extra("output.weight"), "output.weight: expected [272, 256], found [4, 256]"),
    ],
)
def test_a_difference_is_refused_by_name(
    keys: dict[str, Any], change: Change, problem: str, source: Path, file: Path, tmp_path: Path
) -> None:
    path = rewrite(file, tmp_path / "a.gguf", keys, change)
    assert refusal(path, source) == (
        f"{path} is not of the checkpoint source:\n  - {problem}\n"
        "Figures on its tokens would mean nothing: compare it with the checkpoint that it was made from."
    )


def test_other_texts_of_tokens_are_refused_but_padding_may_differ(source: Path, file: Path, tmp_path: Path) -> None:
    padded = rewrite(file, tmp_path / "a.gguf", tokens_of(file, at_263="<|pad_0|>", at_271="[UNUSED]"))
    assert described(padded, source).tensors_sha256 == described(file, source).tensors_sha256
    other = rewrite(file, tmp_path / "b.gguf", tokens_of(file, at_3="x", at_262="</s>", at_271="[UNUSED]"))
    _, *problems, _ = refusal(other, source).splitlines()
    assert problems == ["  - token 3: expected '$', found 'x'", "  - token 262: expected '<|im_end|>', found '</s>'"]


def test_of_many_differences_of_a_kind_some_are_shown(source: Path, file: Path, tmp_path: Path) -> None:
    texts = {f"at_{i}": "x" for i in range(263)}
    path = rewrite(file, tmp_path / "a.gguf", tokens_of(file, **texts), without("output_norm.weight"))
    _, missing, *tokens, more, _ = refusal(path, source).splitlines()
    assert missing == "  - output_norm.weight: missing, expected [256]"  # every kind is listed
    assert [line.split(":")[0] for line in tokens] == [f"  - token {i}" for i in range(5)]
    assert more == "  - … and 257 more tokens"  # one of them is x


def test_another_size_of_vocabulary_is_refused(source: Path, tmp_path: Path) -> None:
    larger = write_checkpoint(tmp_path / "larger", replace(SHAPE, vocab=304))
    artifacts.convert(larger, "gguf", "q8_0", tmp_path / "q8_0")
    _, embedding, vocabulary, _ = refusal(tmp_path / "q8_0" / "model.gguf", source).splitlines()
    assert embedding == "  - token_embd.weight: expected [272, 256], found [304, 256]"
    assert vocabulary == "  - vocabulary: expected 272 tokens, found 304"
