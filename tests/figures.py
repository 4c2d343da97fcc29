"""Measurements made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.report import markdown
from pipeline.report.fronts import SIZE_KLD, fronts
from pipeline.report.pareto import Pick, picks

IDENTITY = {
    "source": {"name": "tiny", "revision": None, "files": {"model.safetensors": "ab" * 32}},
    "corpus": "sample",
    "text_sha256": "11" * 32,
    "tokenizer_sha256": "22" * 32,
    "ids_sha256": "33" * 32,
    "context": 512,
    "windows": 40,
}
ENGINE = {
    "name": "llama.cpp",
    "version": "b1",
    "instruction_set": "AVX2",
    "device": "cpu",
    "kv_type": "f16",
    "flash_attention": "off",
    "threads": 2,
    "batch": 2048,
    "micro_batch": 512,
    "mmap": True,
}
MODEL = {
    "weights": 6_819_840,
    "active_weights": 6_819_840,
    "mtp_weights": 0,
    "layers": 6,
    "attention_layers": 6,
    "kv_bytes_per_token": 3072,
    "state_bytes": 0,
}
TIMING_ENGINE = {**ENGINE, "device": "gpu", "flash_attention": "auto", "threads": 4}
MLX_ENGINE = {
    **ENGINE,
    "name": "torch",
    "version": "torch 2",
    "kv_type": "float32",
    "batch": None,
    "micro_batch": None,
    "mmap": None,
}
MLX_TIMING_ENGINE = {**MLX_ENGINE, "name": "mlx", "version": "mlx 0.32", "device": "gpu", "batch": 2048}
COREML_ENGINE = {**MLX_ENGINE, "name": "reference executor", "version": "coremltools 9", "kv_type": "f16"}
PARITY = {"windows": 2, "tokens": 510, "max_difference": 8e-6, "limit": 1e-3, "engine": MLX_TIMING_ENGINE}
UNREPRESENTATIVE = "MLX on a CPU is not what anybody runs"
NEEDS_MACOS = "needs macOS"
TIMING = {"decode": 64, "rounds": 7, "device": "auto", "threads": 0, "flash_attention": "auto", "kv_type": "f16"}
MACHINE = {
    "cpu": "A CPU",
    "architecture": "x86_64",
    "instruction_set": "avx2",
    "physical_cores": 2,
    "logical_cores": 4,
    "memory_gib": 23.5,
    "os": "Linux 6",
}


def figure(value: float, spread: float | None) -> dict[str, float | None]:
    if spread is None:
        return {"value": value, "low": None, "high": None}
    return {"value": value, "low": value - spread, "high": value + spread}


def drift(share: float = 0.01) -> dict[str, Any]:
    drifted = abs(share) > 0.05
    return {"value": share, "p_value": 0.004 if drifted else 0.7, "drifted": drifted}


def rate(value: float, disturbed: int = 0, drifted: float = 0.01) -> dict[str, Any]:
    return {**figure(value, 10.0), "rounds": 7, "disturbed_rounds": disturbed, "drift": drift(drifted)}


def costs() -> dict[str, Any]:
    cold = {"load_seconds": {"value": 0.254, "n": 3}, "first_prefill_seconds": {"value": 1.5, "n": 3}}
    return {
        "cold_start": {**cold, "tokens": 128, "page_cache_dropped": True},
        "peak_memory_bytes": 123_400_000,
        "memory_by": "resident set",
        "kv_bytes": 6_291_456,
    }


NO_COSTS = {"cold_start": {}, "peak_memory_bytes": None, "memory_by": None, "kv_bytes": None}


def variant(size: int, kld: float, ratio: float, prefill: float | None = 1000.0, **other: Any) -> dict[str, Any]:
    speed = {} if prefill is None else {"128": rate(prefill / 2), "512": rate(prefill)}
    return {
        "format": "gguf",
        "scheme": "q4_0",
        "path": None,
        "tensors_sha256": f"{size:064x}",
        "size_bytes": size,
        "folder_bytes": size,
        "bits_per_weight": 4.5,
        "effective_types": {"Q4_0": 900, "Q6_K": 98, "F32": 2},
        "dropped": {},
        "imatrix": None,
        "routers": "",
        "ppl": figure(80.5, 5.0),
        "ln_ppl_ratio": figure(ratio, 0.002),
        "kld": {name: figure(kld, kld / 10) for name in ("mean", "median", "p99", "p99_9")} | {"max": {"value": 9.0}},
        "same_top": figure(0.9, 0.01),
        "target_probability_rms": 0.02,
        "bits_per_byte": 2.01234,
        "windows": 40,
        "scored_tokens": 40 * 255,
        "reply": None,
        "engine": ENGINE,
        "parity": None,
        "timing_engine": {} if prefill is None else TIMING_ENGINE,
        "identity": IDENTITY,
        "prefill": speed,
        "decode": {} if prefill is None else {"64": rate(300.0)},
        "unrepresentative": None,
        "not_measured": {},
        "placement": None,
        **(NO_COSTS if prefill is None else costs()),
        **other,
    }


def mlx_variant(size: int, kld: float, ratio: float, prefill: float | None = 50.0, **other: Any) -> dict[str, Any]:
    """As it is measured where there is no Apple GPU."""
    mlx = {
        "format": "mlx",
        "scheme": "int4",
        "folder_bytes": size + 500_000,
        "effective_types": {"int4-g64": 998, "BF16": 2},
        "engine": MLX_ENGINE,
        "parity": PARITY,
        "timing_engine": {} if prefill is None else MLX_TIMING_ENGINE | {"device": "cpu"},
        "unrepresentative": None if prefill is None else UNREPRESENTATIVE,
        **NO_COSTS,
    }
    return variant(size, kld, ratio, prefill, **mlx | other)


def coreml_variant(size: int, kld: float, ratio: float, **other: Any) -> dict[str, Any]:
    """As it is measured where there is no macOS."""
    coreml = {
        "format": "coreml",
        "scheme": "int8",
        "folder_bytes": size + 600_000,
        "effective_types": {"int8": 998, "F32": 2},
        "engine": COREML_ENGINE,
        "not_measured": dict.fromkeys(("prefill 128", "prefill 512", "decode 64"), NEEDS_MACOS),
    }
    return variant(size, kld, ratio, None, **coreml | other)


def hand_made() -> dict[str, Any]:
    variants = {
        "big": variant(8_000_000, 0.001, 0.001, 900.0),
        "middle": variant(6_000_000, 0.01, 0.006, 1100.0),
        "worse": variant(6_500_000, 0.02, 0.02, 1500.0),
        "small": variant(4_000_000, 0.1, 0.06, 2000.0),
    }
    found = {
        "reference": {
            "ppl": 80.0,
            "engine": {**ENGINE, "name": "transformers", "version": "transformers 5"},
            "model": MODEL,
            "reply": None,
        },
        "identity": IDENTITY,
        "machine": MACHINE,
        "power_source": "mains",
        "timing": {**TIMING, "order": "interleaved"},
        "variants": variants,
        "also": {},
    }
    return with_fronts(found)


def klds_of(variants: Mapping[str, Any], windows: int = 40) -> dict[str, NDArray[np.float64]]:
    """Mean KL of windows that rises and falls with the text alone: what two differ by is the same in each window."""
    text = np.resize([0.01, -0.01], windows) if windows > 1 else np.zeros(1)
    return {name: v["kld"]["mean"]["value"] + text for name, v in variants.items()}


def with_fronts(measurements: Mapping[str, Any], windows: int = 40) -> dict[str, Any]:
    """The measurements with the fronts of their variants."""
    variants = measurements["variants"]
    return {**measurements, "fronts": fronts(variants, klds_of(variants, windows))}


def picks_of(variants: Mapping[str, Any]) -> list[Pick]:
    return picks(variants, fronts(variants, klds_of(variants))[SIZE_KLD])


def rendered(measurements: Mapping[str, Any], names: Sequence[str], windows: int = 40) -> str:
    """The report of measurements whose variants a test has changed."""
    return markdown.render(with_fronts(measurements, windows), names)


def fronts_in(text: str) -> str:
    """The report's section on fronts."""
    return text.partition("\n## Fronts\n")[2].partition("\n## ")[0]


def figures_in(text: str) -> str:
    """The report but for that section, whose table holds standings."""
    return text.replace(fronts_in(text), "")


def rows_of(text: str, name: str) -> list[list[str]]:
    """Cells of the rows of a variant, bold or not, in each table of figures that has one."""
    lines = [
        line
        for line in figures_in(text).splitlines()
        if line.startswith((f"| {name} |", f"| **{name}** |")) and line.split(" | ")[0].strip("| *") == name
    ]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def row_of(text: str, name: str) -> list[str]:
    """Its row in the first table, of all variants."""
    return rows_of(text, name)[0]
