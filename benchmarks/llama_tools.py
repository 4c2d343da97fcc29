"""llama.cpp's own programs, of the very build that llama-cpp-python has installed.

They are looked for in PATH, then in the user's cache folder; else built there from the sources of the installed
version, which takes about ten minutes, cmake, a C++ compiler and the package index. They run with the installed
libraries before those they were built with, so that the same code is measured.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

from pipeline.cores import usable_cores
from pipeline.files import cache_folder, new_folder

PROGRAMS = ("llama-bench", "llama-perplexity", "llama-quantize")
OPTIONS = {
    "CMAKE_BUILD_TYPE": "Release",
    "BUILD_SHARED_LIBS": "ON",
    **dict.fromkeys(("LLAMA_BUILD_TESTS", "LLAMA_BUILD_EXAMPLES", "LLAMA_BUILD_SERVER"), "OFF"),
    **dict.fromkeys(("LLAMA_CURL", "LLAMA_OPENSSL"), "OFF"),
}


def find(name: str) -> Path:
    """The program, which is built where it is not at hand."""
    found = shutil.which(name)
    if found:
        return Path(found)
    folder = cache_folder() / f"llama-tools-{version('llama-cpp-python')}"
    if not folder.exists():
        _build(folder)
    return folder / name


def run(name: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    """What the program says, run with the installed libraries."""
    import llama_cpp

    variable = "DYLD_LIBRARY_PATH" if sys.platform == "darwin" else "LD_LIBRARY_PATH"
    program = find(name).resolve()
    folders = [str(Path(llama_cpp.__file__).parent / "lib"), str(program.parent), os.environ.get(variable, "")]
    environment = os.environ | {variable: os.pathsep.join(filter(None, folders))}
    command = [str(program), *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed with {done.returncode}: {' '.join(command)}\n{done.stderr[-2000:]}")
    return done


def _build(folder: Path) -> None:
    package = f"llama-cpp-python=={version('llama-cpp-python')}"
    print(f"building {', '.join(PROGRAMS)} from the sources of {package}: about ten minutes, once", flush=True)
    if not shutil.which("cmake"):
        raise SystemExit(f"{', '.join(PROGRAMS)} are not in PATH and cmake is not there to build them: install it.")
    with tempfile.TemporaryDirectory() as temporary, new_folder(folder) as out:
        work = Path(temporary)
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", "llama-cpp-python"]
        _do([*download, "--dest", str(work), package])
        (archive,) = work.glob("*.tar.gz")
        with tarfile.open(archive) as sources:
            sources.extractall(work, filter="data")
        source, build = work / archive.name.removesuffix(".tar.gz") / "vendor" / "llama.cpp", work / "build"
        _do(["cmake", "-S", str(source), "-B", str(build), *(f"-D{key}={value}" for key, value in OPTIONS.items())])
        _do(["cmake", "--build", str(build), "--parallel", str(usable_cores()), "--target", *PROGRAMS])
        for file in (build / "bin").iterdir():
            shutil.copy2(file, out / file.name, follow_symlinks=False)


def _do(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"failed: {' '.join(command)}\n{(done.stdout + done.stderr)[-3000:]}")
