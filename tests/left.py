"""What the stages leave, made by hand in the shapes of their JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
from figures import ENGINE, IDENTITY, MACHINE, MODEL, TIMING, TIMING_ENGINE, figure
from numpy.typing import NDArray

from pipeline import paths
from pipeline.files import write_json

FILES = {"model.gguf": "ef" * 32}
KLD = {"mean": 0.1, "median": 0.05, "p99": 0.5, "p99_9": 0.9}

COSTS = {
    "unrepresentative": None,
    "not_measured": {"prefill 8192": "beyond it"},
    "cold_start": {
        "load_seconds": {"value": 0.2, "samples": [0.1, 0.2, 0.3]},
        "first_prefill_seconds": {"value": 0.5, "samples": [0.7, 0.5, 0.4]},
        "tokens": 128,
        "page_cache_dropped": False,
    },
    "peak_memory_bytes": 50_000_000,
    "memory_by": "resident set",
    "kv_bytes": 4096,
    "placement": None,
}


def leave(root: Path, names: list[str], files: Mapping[str, dict[str, str]] = MappingProxyType({})) -> None:
    """The files of variants; `files` are the hashes of those whose artifacts are no copies of each other."""
    write_json(root / paths.REFERENCE / "meta.json", {**IDENTITY, "engine": ENGINE, "model": MODEL})
    drifted = {"value": -0.1, "p_value": 0.01, "drifted": True}
    task = {"seconds": [0.5] * 7, "warm_up_seconds": [0.5, 0.5], "disturbed_rounds": [2], "drift": drifted}
    tasks = {
        "prefill": {"128": {**task, "tokens_per_second": figure(256.0, 0.0)}},
        "decode": {"64": {**task, "tokens_per_second": figure(128.0, 0.0)}},
    }
    speed = {
        "machine": MACHINE,
        "power_source": "mains",
        "settings": {"prompt_lengths": [128, 8192], **TIMING},
        "order": "interleaved",
        "visits": names * 7,
        "rounds_per_visit": 1,
        "variants": {
            name: {"artifact": files.get(name, FILES), "engine": TIMING_ENGINE, **tasks, **COSTS} for name in names
        },
    }
    write_json(root / paths.SPEED, speed)
    quality = {
        "ppl": PPL,
        "ppl_interval": {"low": 75.0, "high": 88.0},
        "reference_ppl": 80.0,
        "ln_ppl_ratio": figure(0.01, 0.002),
        "kld": KLD | {"max": 2.0},
        "kld_interval": {name: {"low": value / 2, "high": value * 2} for name, value in KLD.items()},
        "same_top": 0.9,
        "same_top_interval": {"low": 0.88, "high": 0.92},
        "target_probability_rms": 0.02,
        "bits_per_byte": 2.0,
        "windows": 40,
        "scored_tokens": 40 * 255,
        "reply": None,
        "engine": ENGINE,
        "parity": None,
        "identity": IDENTITY,
    }
    for i, name in enumerate(names):
        write_json(root / paths.quality(name), quality | {"artifact": files.get(name, FILES)})
        artifact = {
            "format": "gguf",
            "scheme": "q4_0",
            "path": None,
            "tensors_sha256": name,
            "files": files.get(name, FILES),
            "size_bytes": 5_000_000 + i,
            "folder_bytes": 6_000_000 + i,
            "bits_per_weight": 4.5,
            "effective_types": {"Q4_0": {"tensors": 5, "weights": 900}, "F32": {"tensors": 3, "weights": 100}},
            "tensors": {"output.weight": "Q4_0 0123456789abcdef"},
        }
        write_json(root / paths.variant(name) / "artifact.json", artifact)
        write_scores(root, name)


LOGPROB = -np.random.default_rng(1).random((40, 255), np.float32) * 8
PPL = math.exp(-LOGPROB.mean(dtype=np.float64))


def write_scores(root: Path, name: str, logprob: NDArray[np.float32] = LOGPROB, klds: Any = KLD["mean"]) -> None:
    """Scores per token with these log-probabilities, and the KL of each window or of all; quality.json has their means.

    Of log-probabilities that no run has, it keeps those that it had.
    """
    kld = np.broadcast_to(np.asarray(klds, np.float32).reshape(-1, *[1] * (logprob.ndim - 1)), logprob.shape)
    path = root / paths.scores(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, logprob=logprob, kld=kld, same_top=logprob > -1)

    def means(quality: dict[str, Any]) -> None:
        quality["kld"]["mean"] = round(float(kld.mean(dtype=np.float64)), 7)
        loss = -float(logprob.mean(dtype=np.float64))
        quality["ppl"] = math.exp(loss) if math.isfinite(loss) else quality["ppl"]

    edit(root / paths.quality(name), means)


def edit(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    found = json.loads(path.read_text())
    change(found)
    write_json(path, found)
