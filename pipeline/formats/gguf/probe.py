"""Whether the installed llama.cpp runs on this CPU.

Its CPU part is built with every instruction set of the machine that built it (GGML_NATIVE). A wheel that was kept from
another one dies of the first instruction that this CPU lacks, without a word: when it is imported, or hours later. So
a process of its own loads it first, once per build and CPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import platform
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from pipeline.cores import cpu_info
from pipeline.errors import PipelineError
from pipeline.files import cache_folder, write_text

FLAGS = {
    "SSE3": ("sse3", "pni"),
    "SSSE3": ("ssse3",),
    "AVX": ("avx", "avx1.0"),
    "AVX_VNNI": ("avx_vnni",),
    "AVX2": ("avx2",),
    "BMI2": ("bmi2",),
    "F16C": ("f16c",),
    "FMA": ("fma",),
    "AVX512": ("avx512f",),
    "AVX512_VBMI": ("avx512vbmi", "avx512_vbmi"),
    "AVX512_VNNI": ("avx512_vnni", "avx512vnni"),
    "AVX512_BF16": ("avx512_bf16",),
    "AMX_INT8": ("amx_int8",),
    "NEON": ("asimd", "neon"),
    "ARM_FMA": ("asimd", "vfpv4"),
    "FP16_VA": ("asimdhp",),
    "DOTPROD": ("asimddp",),
    "MATMUL_INT8": ("i8mm",),
    "SVE": ("sve",),
    "SME": ("sme",),
    "SME2": ("sme2",),
}
"""What ggml_cpu_has_* (ggml/include/ggml-cpu.h) say that a build uses, and how a CPU's flags call it: in /proc/cpuinfo
(Linux: arch/x86/include/asm/cpufeatures.h, arch/arm64/kernel/cpuinfo.c), or in sysctl on an Intel Mac.
"""

UNLISTED = frozenset({"AVX_VNNI", "AVX512_BF16", "AMX_INT8", "SME", "SME2"})
"""Features that kernels older than the CPU do not list: their absence alone proves nothing."""
DEADLY = frozenset({signal.SIGILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGFPE})
"""Signals that a process brings upon itself; others come from outside."""
PATIENCE = 120.0
"""Seconds for loading the package, which takes one or two."""

PROBE = """
import ctypes, os, sys
package, cpu_part, *names = sys.argv[1:]
if os.path.exists(cpu_part):  # these functions answer even where the next step dies
    library = ctypes.CDLL(cpu_part)
    known = [name for name in names if hasattr(library, "ggml_cpu_has_" + name.lower())]
    print(*[name for name in known if getattr(library, "ggml_cpu_has_" + name.lower())()], flush=True)
sys.path.insert(0, os.path.dirname(package))
import llama_cpp
llama_cpp.llama_backend_init()
info = llama_cpp.llama_print_system_info().decode().rpartition("CPU : ")[2]
print(*[part.split(" = ")[0].strip() for part in info.split("|") if part.strip().endswith(" = 1")], flush=True)
"""
"""Prints the features of the build: of its CPU part, then of all that llama.cpp loaded."""


@cache
def libraries() -> Path:
    """The folder of llama.cpp's libraries, which this CPU runs. Found without importing the package (0.3 s), and, once
    a build was tried on a CPU, known from the user's cache folder.

    Raises:
        PipelineError: llama-cpp-python is not installed, or was built for another machine.
    """
    spec = find_spec("llama_cpp")
    if spec is None or spec.origin is None:
        raise PipelineError("llama-cpp-python is not installed. Run: pip install -e '.[gguf]'")
    package = Path(spec.origin).parent
    folder = Path(os.environ.get("LLAMA_CPP_LIB_PATH", package / "lib"))  # as the package has it
    known = cache_folder() / "probes" / _identity(folder)
    if not os.path.exists(known) and _runs(package, folder):
        with suppress(PipelineError):  # it only saves time
            write_text(known, "")
    return folder


def library(folder: Path, name: str) -> Path:
    """The file of a shared library."""
    return folder / f"lib{name}.{'dylib' if sys.platform == 'darwin' else 'so'}"


def _identity(folder: Path) -> str:
    """Of a build and a CPU; changed libraries have another size or time."""
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return hashlib.sha256(json.dumps([str(folder.resolve()), stats, cpu()]).encode()).hexdigest()[:24]


def cpu() -> str:
    """What tells this CPU from those with other instructions, in no time."""
    if sys.platform == "darwin":
        text, size = ctypes.create_string_buffer(256), ctypes.c_size_t(256)
        ctypes.CDLL(None).sysctlbyname(b"machdep.cpu.brand_string", text, ctypes.byref(size), None, ctypes.c_size_t(0))
        return f"{platform.machine()} {text.value.decode()}"
    with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as lines:
        return next((line for line in lines if line.startswith(("flags", "Features"))), platform.machine())


def flags() -> tuple[str, set[str]]:
    """The CPU's name and flags; none where the system does not tell. It takes seconds."""
    info = cpu_info()
    return info.get("brand_raw", platform.machine()), set(filter(None, info.get("flags", [])))


def _runs(package: Path, folder: Path) -> bool:
    """Whether the package loads; an error of Python's own is left to who imports it.

    Raises:
        PipelineError: it dies, or uses what the CPU does not have.
    """
    command = [sys.executable, "-P", "-c", PROBE, str(package), str(library(folder, "ggml-cpu")), *FLAGS]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False, timeout=PATIENCE)
    except subprocess.TimeoutExpired:  # of a GPU's start, say: not what is asked here
        return False
    died = -done.returncode in DEADLY
    used = [name for name in dict.fromkeys(done.stdout.split()) if name in FLAGS]
    brand, present = flags() if used else ("", set())
    told = ("sse2" if "SSE3" in used else "asimd") in present  # an emulator may show the flags of another architecture
    lacking = [name for name in used if told and not present & {*FLAGS[name]} and (died or name not in UNLISTED)]
    if lacking:
        what = f"was built for another machine: it uses {', '.join(lacking)}, which this CPU ({brand}) does not have"
    elif died:
        name = f"signal {-done.returncode} ({signal.strsignal(-done.returncode)})"
        what = f"does not run on this machine: the process that loads it dies of {name}"
    else:
        return done.returncode == 0
    pinned = Path(__file__).with_name("requirements.txt").read_text().strip()
    raise PipelineError(
        f"llama-cpp-python in {package} {what}. Build it here: pip install --force-reinstall --no-deps "
        f"--no-cache-dir --no-binary llama-cpp-python {pinned}"
    )
