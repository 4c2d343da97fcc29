"""A wheel of llama-cpp-python that was built for another machine is named before it ends the process."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rights import without_privilege

from pipeline.errors import PipelineError
from pipeline.formats.gguf import engine, kernels, probe
from pipeline.processes import in_own_process

ROOT = Path(__file__).parents[3]
NO_INSTRUCTION = {"LLAMAFILE", "OPENMP", "REPACK", "KLEIDIAI", "ACCELERATE", "SVE_CNT"}
REBUILD = (
    "Build it here: pip install --force-reinstall --no-deps --no-cache-dir --no-binary llama-cpp-python "
    "llama-cpp-python==0.3.36"
)
DIES = "import os, signal\nos.kill(os.getpid(), signal.SIGILL)\n"
DIES_LATER = (
    "import os, signal\ndef llama_backend_init(): pass\n"
    "def llama_print_system_info(): os.kill(os.getpid(), signal.SIGILL)\n"
)
OTHER_CPU = (
    "def llama_backend_init(): pass\n"
    "def llama_print_system_info():\n"
    "    return b'MTL : EMBED_LIBRARY = 1 | CPU : SSE3 = 1 | AVX2 = 1 | AVX_VNNI = 0 | AVX512 = 1 | OPENMP = 1 | '\n"
)


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Nothing was tried before."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    caches = (probe.libraries, engine.llama, kernels.library)
    for cached in caches:
        cached.cache_clear()
    yield tmp_path / "cache" / "quantgate" / "probes"
    for cached in caches:
        cached.cache_clear()


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU whose flags are known at once."""
    monkeypatch.setattr(probe, "flags", lambda: ("A CPU", {"sse2", "pni", "avx", "avx2"}))


def stub(folder: Path, code: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A package llama_cpp of this code, found before the installed one, in other processes too."""
    package = folder / "stub" / "llama_cpp"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(code)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setenv("PYTHONPATH", str(package.parent))
    monkeypatch.delitem(sys.modules, "llama_cpp", raising=False)
    return package


@pytest.mark.parametrize("code", [DIES, DIES_LATER])
@pytest.mark.parametrize("load", [engine.llama, kernels.library])
def test_a_package_that_dies_is_refused(
    code: str, load: Any, quick: None, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = stub(tmp_path, code, monkeypatch)
    with pytest.raises(PipelineError) as caught:
        load()
    assert str(caught.value) == (
        f"llama-cpp-python in {package} does not run on this machine: the process that loads it dies of signal 4 "
        f"(Illegal instruction). {REBUILD}"
    )
    assert not cache_folder.exists()


SILENT = {
    "a flag that old kernels do not list": (b"SSE3 = 1 | AVX2 = 1 | AVX_VNNI = 1", {"sse2", "pni", "avx2"}),
    "flags of another architecture": (b"SSE3 = 1 | AVX2 = 1", {"fp", "asimd"}),
    "no flags": (b"NEON = 1 | DOTPROD = 1", set[str]()),
}


@pytest.mark.parametrize("case", SILENT)
def test_what_proves_nothing_stops_nobody(
    case: str, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    features, flags = SILENT[case]
    info = f"def llama_backend_init(): pass\ndef llama_print_system_info(): return {b'CPU : ' + features!r}\n"
    package = stub(tmp_path, info, monkeypatch)
    monkeypatch.setattr(probe, "flags", lambda: ("A CPU", flags))
    assert probe.libraries() == package / "lib"
    assert len([*cache_folder.iterdir()]) == 1


@pytest.mark.parametrize("signal_name", ["SIGKILL", "SIGTERM"])
def test_a_process_that_is_ended_from_outside_proves_nothing(
    signal_name: str, quick: None, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = stub(tmp_path, f"import os, signal\nos.kill(os.getpid(), signal.{signal_name})\n", monkeypatch)
    assert probe.libraries() == package / "lib"
    assert not cache_folder.exists()


def test_a_process_that_hangs_proves_nothing(
    quick: None, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = stub(tmp_path, "import time\ntime.sleep(60)\n", monkeypatch)
    monkeypatch.setattr(probe, "PATIENCE", 0.5)
    assert probe.libraries() == package / "lib"
    assert not cache_folder.exists()


def test_what_a_build_uses_and_the_cpu_lacks_is_named(
    quick: None, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = stub(tmp_path, OTHER_CPU, monkeypatch)
    with pytest.raises(PipelineError) as caught:
        probe.libraries()
    assert str(caught.value) == (
        f"llama-cpp-python in {package} was built for another machine: it uses AVX512, which this CPU (A CPU) does not "
        f"have. {REBUILD}"
    )
    assert not cache_folder.exists()


def test_a_cpu_that_has_it_all_runs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = stub(tmp_path, OTHER_CPU, monkeypatch)
    monkeypatch.setattr(probe, "flags", lambda: ("A CPU", {"pni", "avx2", "avx512f"}))
    assert probe.libraries() == package / "lib"


def test_a_cpu_of_which_nothing_is_known_is_only_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = stub(tmp_path, OTHER_CPU, monkeypatch)
    monkeypatch.setattr(probe, "flags", lambda: ("A CPU", set()))
    assert probe.libraries() == package / "lib"


def test_the_installed_build_runs_here_and_is_not_tried_again(
    cache_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = probe.libraries()
    assert probe.library(folder, "ggml-base").is_file()
    assert len([*cache_folder.iterdir()]) == 1

    def fail(*_: Any, **__: Any) -> None:
        raise AssertionError("it was tried before")

    monkeypatch.setattr(subprocess, "run", fail)
    monkeypatch.setattr(probe, "flags", fail)  # they take seconds
    probe.libraries.cache_clear()
    assert probe.libraries() == folder
    assert kernels.library().ggml_type_size(0) == 4
    probe.libraries.cache_clear()
    monkeypatch.setattr(probe, "cpu", lambda: "another one")
    with pytest.raises(AssertionError, match="tried before"):
        probe.libraries()


def test_other_libraries_are_tried_again(quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = stub(tmp_path, OTHER_CPU.replace("AVX512 = 1", "AVX512 = 0"), monkeypatch)
    (package / "lib").mkdir()
    (package / "lib" / "libllama.so").write_bytes(b"one")
    probe.libraries()
    found = {probe._identity(package / "lib")}
    (package / "lib" / "libllama.so").write_bytes(b"other")
    found.add(probe._identity(package / "lib"))
    os.utime(package / "lib" / "libllama.so", ns=(1, 1))
    found.add(probe._identity(package / "lib"))
    assert len(found) == 3
    (package / "__init__.py").write_text(DIES)
    probe.libraries.cache_clear()
    with pytest.raises(PipelineError, match="dies of signal 4"):
        probe.libraries()


def test_the_real_build_says_what_it_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also before it is initialised, which may be what ends it."""
    monkeypatch.setattr(probe, "flags", lambda: ("A CPU", {name for names in probe.FLAGS.values() for name in names}))
    used = [name for name in engine.instruction_set().split() if name not in NO_INSTRUCTION]
    assert set(used) <= probe.FLAGS.keys()
    present = {flag for name in used[1:] for flag in probe.FLAGS[name]}
    monkeypatch.setattr(probe, "flags", lambda: ("A CPU", present | {"sse2", "asimd"}))
    monkeypatch.setattr(probe, "PROBE", probe.PROBE.replace("import llama_cpp\n", DIES))
    monkeypatch.setattr(probe, "cpu", lambda: "another one")
    probe.libraries.cache_clear()
    with pytest.raises(PipelineError, match=f"it uses {used[0]}, which this CPU"):
        probe.libraries()


def test_every_name_is_a_function_of_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_runs", lambda package, folder: True)
    library = ctypes.CDLL(str(probe.library(probe.libraries(), "ggml-cpu")))
    assert all(hasattr(library, f"ggml_cpu_has_{name.lower()}") for name in probe.FLAGS)


def test_a_package_that_python_refuses_is_left_to_its_import(
    quick: None, cache_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, "raise ImportError('no libllama')\n", monkeypatch)
    with pytest.raises(PipelineError, match=r"llama-cpp-python does not load \(no libllama\). Run: pip install -e"):
        engine.llama()
    assert not cache_folder.exists()


def test_a_cache_folder_that_cannot_be_written_is_done_without(
    quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = stub(tmp_path, OTHER_CPU.replace("AVX512 = 1", "AVX512 = 0"), monkeypatch)
    (tmp_path / "cache").mkdir(mode=0)
    with without_privilege():
        assert probe.libraries() == package / "lib"
    assert [*(tmp_path / "cache").iterdir()] == []


def test_it_is_named_in_other_processes_too(
    source: Path, quick: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub(tmp_path, DIES, monkeypatch)
    with pytest.raises(PipelineError, match="dies of signal 4"):
        in_own_process("a benchmark", engine.llama)
    out = tmp_path / "out"
    arguments = ["convert", str(source), "--format", "gguf", "--scheme", "q8_0", "--out", str(out)]
    code = "from pipeline.cli import main; main()"
    done = subprocess.run([sys.executable, "-c", code, *arguments], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert "dies of signal 4 (Illegal instruction). Build it here: pip install" in done.stderr
    assert "Traceback" not in done.stderr
    assert not out.exists()


def test_without_the_package_it_is_said_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "find_spec", lambda name: None)
    with pytest.raises(PipelineError, match=r"llama-cpp-python is not installed\. Run: pip install -e"):
        kernels.library()
