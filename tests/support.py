"""Small checkpoints written by hand, so that what a test feeds in does not come from the code it tests."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.source.checkpoint import Checkpoint
from pipeline.types import TensorSpec

QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = [("h", "e"), ("t", "he"), ("i", "n"), ("Ġ", "the")]


@dataclass(frozen=True)
class Shape:
    model_type: str = "qwen2"
    layers: int = 2
    hidden: int = 64
    ff: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    vocab: int = 272
    tied: bool = True


def config_of(shape: Shape) -> dict[str, Any]:
    config = {
        "architectures": [f"{shape.model_type.capitalize()}ForCausalLM"],
        "model_type": shape.model_type,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.ff,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "vocab_size": shape.vocab,
        "max_position_embeddings": 2048,
        "rope_theta": 1_000_000.0,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "tie_word_embeddings": shape.tied,
        "eos_token_id": 262,
    }
    if shape.model_type == "qwen3":
        config["head_dim"] = shape.head_dim
    return config


def random_tensors(shape: Shape, seed: int = 0) -> dict[str, np.ndarray]:
    """Every tensor of a dense Qwen, float32, by its Hugging Face name."""
    rng = np.random.default_rng(seed)
    head_dim = shape.head_dim if shape.model_type == "qwen3" else shape.hidden // shape.heads
    q, kv = shape.heads * head_dim, shape.kv_heads * head_dim
    tensors: dict[str, np.ndarray] = {}

    def matrix(name: str, rows: int, columns: int) -> None:
        tensors[f"{name}.weight"] = rng.standard_normal((rows, columns), np.float32) * np.float32(columns**-0.5)

    def vector(name: str, n: int, around: float) -> None:
        tensors[name] = (around + 0.1 * rng.standard_normal(n)).astype(np.float32)

    matrix("model.embed_tokens", shape.vocab, shape.hidden)
    for layer in range(shape.layers):
        at = f"model.layers.{layer}"
        for part, rows in (("q", q), ("k", kv), ("v", kv)):
            matrix(f"{at}.self_attn.{part}_proj", rows, shape.hidden)
            if shape.model_type == "qwen2":
                vector(f"{at}.self_attn.{part}_proj.bias", rows, 0.0)
            elif part != "v":
                vector(f"{at}.self_attn.{part}_norm.weight", head_dim, 1.0)
        matrix(f"{at}.self_attn.o_proj", shape.hidden, q)
        for part in ("gate", "up"):
            matrix(f"{at}.mlp.{part}_proj", shape.ff, shape.hidden)
        matrix(f"{at}.mlp.down_proj", shape.hidden, shape.ff)
        vector(f"{at}.input_layernorm.weight", shape.hidden, 1.0)
        vector(f"{at}.post_attention_layernorm.weight", shape.hidden, 1.0)
    vector("model.norm.weight", shape.hidden, 1.0)
    if not shape.tied:
        matrix("lm_head", shape.vocab, shape.hidden)
    return tensors


def to_bytes(weights: np.ndarray, dtype: str) -> bytes:
    """Little-endian bytes; BF16 by truncation, which is a value of the type like any other."""
    if dtype == "BF16":
        return (np.ascontiguousarray(weights, np.float32).view(np.uint32) >> 16).astype("<u2").tobytes()
    return weights.astype({"F32": "<f4", "F16": "<f2"}[dtype]).tobytes()


def write_safetensors(path: Path, tensors: dict[str, np.ndarray], dtype: str = "BF16") -> None:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    blobs = []
    for name, weights in tensors.items():
        blob = to_bytes(weights, dtype)
        header[name] = {"dtype": dtype, "shape": list(weights.shape), "data_offsets": [offset, offset + len(blob)]}
        offset += len(blob)
        blobs.append(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(blobs))


def tokenizer_json(
    vocab: int = 272, split: str = QWEN2_SPLIT, merges: list[tuple[str, str]] | None = None
) -> dict[str, Any]:
    """A byte-level BPE of 256 bytes, a few merges and three special tokens."""
    from tokenizers.pre_tokenizers import ByteLevel

    merges = MERGES if merges is None else merges
    tokens = [*sorted(ByteLevel.alphabet()), *("".join(merge) for merge in merges)]
    first = len(tokens)
    assert first + len(SPECIALS) <= vocab
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {
                "id": first + i,
                "content": token,
                "single_word": False,
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "special": True,
            }
            for i, token in enumerate(SPECIALS)
        ],
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [
                {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False},
                {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False},
            ],
        },
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [list(merge) for merge in merges],
        },
    }


def adds(token: str, i: int) -> dict[str, Any]:
    """A post-processor that puts a token before every text."""
    single = [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 1}}]
    special = {token: {"id": token, "ids": [i], "tokens": [token]}}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": special}


def write_checkpoint(
    folder: Path,
    shape: Shape | None = None,
    dtype: str = "BF16",
    seed: int = 0,
    shards: int = 1,
    change: Callable[[dict[str, np.ndarray]], None] | None = None,
    config: dict[str, Any] | None = None,
) -> Path:
    """A checkpoint folder of random weights; `change` may alter the tensors, `config` adds to config.json."""
    shape = shape or Shape()
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_tensors(shape, seed)
    if change:
        change(tensors)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
    else:
        names = list(tensors)
        weight_map = {}
        for i in range(shards):
            file = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
            part = names[i::shards]
            write_safetensors(folder / file, {name: tensors[name] for name in part}, dtype)
            weight_map |= dict.fromkeys(part, file)
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(config_of(shape) | (config or {})))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(shape.vocab)))
    return folder


def stored(checkpoint: Checkpoint, name: str) -> TensorSpec:
    """A tensor of a checkpoint as one of a model, whatever it is for."""
    return TensorSpec(name, "", None, checkpoint.tensors[name].shape)
