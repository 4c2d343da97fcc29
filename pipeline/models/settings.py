"""What all architectures read of config.json: sizes, checked, and the dtype."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

from pipeline.errors import CheckpointError, listed

SIZES = {
    "num_hidden_layers": 512,  # LLAMA_MAX_LAYERS
    "hidden_size": 1 << 20,
    "num_attention_heads": 1 << 16,
    "intermediate_size": 1 << 24,
    "vocab_size": 1 << 24,
    "max_position_embeddings": (1 << 31) - 1,
}
"""The most that each may be: a slip of the pen must not make a table of billions of tensors."""

AGAIN = "Fetch the checkpoint again, or correct its config.json."

DTYPES = ("bfloat16", "float16", "float32")

MOST_HEAD_DIM = 1 << 16
FLOAT32_MAX = 3.4e38


def checked(config: dict[str, Any], more: Iterable[str] = (), optional: Iterable[str] = ()) -> dict[str, Any]:
    """The fields of a ModelSpec that every architecture has, but rope and tensors; of sizes that are `optional` and
    missing, 0. `more` are further problems to be told with those found here.

    Raises:
        CheckpointError: naming every key that is missing or has a value that is not computed.
    """
    problems = [p for key, most in SIZES.items() for p in size_problems(config, key, most, key in optional)]
    eps, tied = config.get("rms_norm_eps", 1e-6), config.get("tie_word_embeddings") or False
    if not is_number(eps):
        problems.append(f"rms_norm_eps: expected a number above 0, found {eps!r}")
    if not isinstance(tied, bool):
        problems.append(f"tie_word_embeddings: expected true or false, found {tied!r}")
    if config.get("hidden_act", "silu") != "silu":
        problems.append(f"hidden_act: expected 'silu', found {config['hidden_act']!r}")
    if _slides(config):
        problems.append("use_sliding_window: sliding-window attention is not supported; it must be false")
    heads, kv_heads = config.get("num_attention_heads"), config.get("num_key_value_heads")
    kv_heads = heads if kv_heads is None else kv_heads
    if not is_positive(kv_heads):
        problems.append("num_key_value_heads: not a positive integer")
    elif is_positive(heads) and heads % kv_heads:
        problems.append(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim, d_model = config.get("head_dim"), config.get("hidden_size")
    if head_dim is None and is_positive(heads) and is_positive(d_model):
        head_dim = d_model // heads
    if head_dim is not None and not (is_positive(head_dim) and head_dim <= MOST_HEAD_DIM):
        most = f" of at most {MOST_HEAD_DIM}" if is_positive(head_dim) else ""
        problems.append(f"head_dim must be a positive integer{most}, found {head_dim!r}")
    problems += more
    if problems:
        raise CheckpointError(f"config.json of {config['model_type']}:\n{listed(problems)}\n{AGAIN}")
    return {
        "model_type": config["model_type"],
        "n_layers": config["num_hidden_layers"],
        "d_model": config["hidden_size"],
        "n_heads": heads,
        "n_kv_heads": kv_heads,
        "head_dim": head_dim,
        "d_ff": config.get("intermediate_size") or 0,
        "vocab_size": config["vocab_size"],
        "context_length": config["max_position_embeddings"],
        "norm_eps": float(eps),
        "tied": tied,
        "dtype": _dtype(config),
    }


def size_problems(config: dict[str, Any], key: str, most: int, optional: bool = False) -> Iterator[str]:
    """What is wrong with a size that must be from 1 to `most`."""
    value = config.get(key)
    if optional and value is None:
        return
    if not is_positive(value):
        yield f"{key}: missing or not a positive integer" + (f", found {value!r}" if key in config else "")
    elif value > most:
        yield f"{key}: expected at most {most}, found {value}"


def is_positive(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_number(value: Any) -> TypeGuard[float]:
    """A number above 0 that float32 holds; neither true nor NaN is one."""
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= FLOAT32_MAX


def _dtype(config: dict[str, Any]) -> str | None:
    """`torch_dtype`, which transformers 5 writes as `dtype`."""
    found = config.get("torch_dtype") or config.get("dtype")
    return found if found in DTYPES else None


def _slides(config: dict[str, Any]) -> bool:
    layers = config.get("layer_types") or []
    return bool(config.get("use_sliding_window")) or (isinstance(layers, list) and "sliding_attention" in layers)
