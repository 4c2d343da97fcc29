"""A checkpoint of the newest kind that is large: what it takes to convert it and to run its reference layer by layer.

    python -m benchmarks.large [--gigabytes 2] [--vocabulary 8192]

A random hybrid in bf16, three layers of Gated DeltaNet to one of attention, in several shards. Each run is a process of
its own: wall time with start-up, and the most that it had resident. Exit code 1 where that is above its limit. The
times for 27B weights are extrapolated by the bytes of the checkpoint. The reference holds the head in float32: with
a Qwen's own vocabulary of 248,320 that is 2 GB at this width.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.convert import run
from benchmarks.material import TINY
from pipeline.models import spec_of
from pipeline.types import TensorSpec

SHARD_BYTES = 500_000_000
LARGE_BYTES = 54e9  # 27B weights in bf16
WINDOWS, CONTEXT = 2, 512
CONVERT_MB, SCORE_MB = 1000, 4000

CONFIG = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 8,
    "linear_num_value_heads": 24,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 4096,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}

SCORE = """
import sys
from pathlib import Path
import numpy as np
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_forward import write_reference
from pipeline.types import Windows
windows, context = int(sys.argv[3]), int(sys.argv[4])
ids = np.random.default_rng(0).integers(0, 4096, (windows, context)).astype(np.int32)
given = Windows("random", "", "", ids, np.ones(windows, np.int64))
with Checkpoint(Path(sys.argv[1])) as checkpoint:
    write_reference(checkpoint, checkpoint.identity(), given, Path(sys.argv[2]), layer_by_layer=True)
"""

CONVERT = "import sys; from pipeline.cli import main; main(sys.argv[1:])"


def make(folder: Path, size: float, vocabulary: int) -> float:
    """A checkpoint of about `size` bytes in a new folder; its bytes."""
    config: dict[str, Any] = CONFIG | {"vocab_size": vocabulary}
    fours = 1
    while _bytes(_spec(config, 4 * (fours + 1))) <= size:
        fours += 1
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4 * fours}))
    for side in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (folder / side).write_bytes((TINY / side).read_bytes())
    shards = list(_shards(_spec(config, 4 * fours)))
    names = [f"model-{number + 1:05d}-of-{len(shards):05d}.safetensors" for number in range(len(shards))]
    weight_map: dict[str, str] = {}
    for name, tensors in zip(names, shards, strict=True):
        _write(folder / name, tensors)
        weight_map |= dict.fromkeys([tensor.name for tensor in tensors], name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return _bytes(_spec(config, 4 * fours))


def _spec(config: dict[str, Any], layers: int) -> tuple[TensorSpec, ...]:
    return spec_of(config | {"num_hidden_layers": layers}).tensors


def _bytes(tensors: tuple[TensorSpec, ...]) -> float:
    return sum(2.0 * tensor.weights for tensor in tensors)


def _shards(tensors: tuple[TensorSpec, ...]) -> Iterator[list[TensorSpec]]:
    shard: list[TensorSpec] = []
    for tensor in tensors:
        if shard and _bytes((*shard, tensor)) > SHARD_BYTES:
            yield shard
            shard = []
        shard.append(tensor)
    yield shard


def _write(path: Path, tensors: list[TensorSpec]) -> None:
    """Random signs, mantissas and one bit of the exponent: fast, and of a size that keeps a model finite."""
    header, at = {}, 0
    for tensor in tensors:
        header[tensor.name] = {"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, at + 2 * tensor.weights]}
        at += 2 * tensor.weights
    text = json.dumps(header).encode()
    rng = np.random.default_rng(len(text))
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            for start in range(0, tensor.weights, 1 << 22):
                count = min(1 << 22, tensor.weights - start)
                bits = np.frombuffer(rng.bytes(2 * count), np.uint16)
                file.write((bits & np.uint16(0x80FF) | np.uint16(0x3B00)).tobytes())  # ±2^-9 to ±2^-7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="of the checkpoint, 2 unless given")
    parser.add_argument("--vocabulary", type=int, default=8192, help="tokens, 8192 unless given")
    asked = parser.parse_args()
    over = []
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        source, begin = work / "source", time.perf_counter()
        made = make(source, asked.gigabytes * 1e9, asked.vocabulary)
        print(f"A random hybrid of {made / 1e9:.2f} GB, made in {time.perf_counter() - begin:.0f} s")
        print(f"{'':24} {'s':>7} {'s per GB':>9} {'MB':>6} {'limit':>6}  27B (54 GB), extrapolated")
        convert = [sys.executable, "-c", CONVERT, "convert", str(source), "--format"]
        commands = {
            "gguf q4_k_m": ([*convert, "gguf", "--scheme", "q4_k_m", "--out", str(work / "gguf")], CONVERT_MB),
            "mlx int4": ([*convert, "mlx", "--scheme", "int4", "--out", str(work / "mlx")], CONVERT_MB),
            f"reference, {WINDOWS} windows": (
                [sys.executable, "-c", SCORE, str(source), str(work / "reference"), str(WINDOWS), str(CONTEXT)],
                SCORE_MB,
            ),
        }
        for name, (command, limit) in commands.items():
            seconds, memory = run(command)
            per_gb = seconds / made * 1e9
            print(
                f"{name:24} {seconds:7.1f} {per_gb:9.2f} {memory:6.0f} {limit:6}  "
                f"{seconds * LARGE_BYTES / made / 60:.0f} min",
                flush=True,
            )
            if memory > limit:
                over.append(name)
    if over:
        print(f"above the limit: {', '.join(over)}")
        sys.exit(1)


if __name__ == "__main__":
    main()
