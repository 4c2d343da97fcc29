"""The machine that figures belong to: figures of different machines are never put in one front."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from typing import Any

from pipeline.cores import cpu_info, cpu_name

FLAGS = (
    *("avx", "avx2", "f16c", "fma", "avx_vnni", "avx512f", "avx512bw", "avx512vl", "avx512_vnni", "avx512_bf16"),
    *("avx512_fp16", "amx_tile", "amx_int8", "amx_bf16", "asimd", "asimddp", "asimdhp", "i8mm", "bf16", "sve", "sve2"),
)
"""Of all CPU flags, those that matrix kernels are chosen by."""


def fingerprint() -> dict[str, Any]:
    """CPU, instruction set, cores, memory and OS; the same machine gives the same bytes."""
    import psutil

    flags = set(cpu_info().get("flags", []))
    return {
        "cpu": cpu_name(),
        "architecture": platform.machine(),
        "instruction_set": " ".join(flag for flag in FLAGS if flag in flags),
        "physical_cores": psutil.cpu_count(logical=False),
        "logical_cores": psutil.cpu_count(),
        "memory_gib": round(psutil.virtual_memory().total / 2**30, 1),
        "os": f"{platform.system()} {platform.release()}",
    }


def short_id(machine: Mapping[str, Any]) -> str:
    """Eight hex digits that two figures of one machine share."""
    return hashlib.sha256(json.dumps(machine, sort_keys=True).encode()).hexdigest()[:8]


def power_source() -> str:
    """'mains', 'battery', or 'unknown' where the machine does not say; it changes by the hour, so it stays out of the
    fingerprint.
    """
    import psutil

    battery = psutil.sensors_battery() if hasattr(psutil, "sensors_battery") else None
    if battery is None or battery.power_plugged is None:
        return "unknown"
    return "mains" if battery.power_plugged else "battery"
