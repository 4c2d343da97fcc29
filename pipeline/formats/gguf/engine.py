"""llama.cpp as a library: loaded once, quiet, asked for its version and instruction set."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from pipeline.errors import ArtifactError, PipelineError
from pipeline.formats.gguf import probe

_log: list[str] = []  # the last lines that llama.cpp logged, for errors


@cache
def llama() -> ModuleType:
    """The module llama_cpp with its backend initialised and its log kept instead of printed.

    Raises:
        PipelineError: llama-cpp-python is not installed, or was built for another machine.
    """
    probe.libraries()
    try:
        import llama_cpp
    except ImportError as error:
        raise PipelineError(f"llama-cpp-python does not load ({error}). Run: pip install -e '.[gguf]'") from error
    llama_cpp.llama_log_set(_keep_log(llama_cpp), ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp  # type: ignore[no-any-return]


@cache
def _keep_log(llama_cpp: Any) -> Any:
    """The callback, cached so that ctypes does not let it go."""

    def keep(level: int, text: bytes, user_data: object) -> None:
        _log.append(text.decode(errors="replace"))
        del _log[:-40]

    return llama_cpp.llama_log_callback(keep)


def last_words(lines: int = 3) -> str:
    """What llama.cpp said last, for an error message."""
    said = [line for line in "".join(_log).splitlines() if line.strip()]
    return "\n".join(f"  llama.cpp: {line}" for line in said[-lines:])


def version() -> str:
    """'llama-cpp-python 0.3.36, ggml 0.25.3 (0c1e57098)': the commit tells llama.cpp's.

    Raises:
        PipelineError: as llama.
    """
    from pipeline.formats.gguf.kernels import library

    lib = library()
    lib.ggml_version.restype = lib.ggml_commit.restype = ctypes.c_char_p
    return f"llama-cpp-python {llama().__version__}, ggml {lib.ggml_version().decode()} ({lib.ggml_commit().decode()})"


def instruction_set() -> str:
    """'AVX AVX2 F16C FMA …': what the engine's CPU part was built with and uses; scores depend on it.

    Raises:
        PipelineError: as llama.
    """
    return cpu_features(llama().llama_print_system_info().decode())


def cpu_features(info: str) -> str:
    """The features in the part "CPU : A = 1 | B = 0 | …" of llama.cpp's line, which may begin with other backends."""
    features = [part.strip() for part in info.rpartition("CPU : ")[2].split("|")]
    return " ".join(feature[:-4] for feature in features if feature.endswith(" = 1"))


def device() -> str:
    """Where layers run when nothing else is asked: 'gpu' (Metal, CUDA, …) where the build has one, else 'cpu'.

    Raises:
        PipelineError: as llama.
    """
    return "gpu" if llama().llama_supports_gpu_offload() else "cpu"


def load_model(path: Path, **settings: Any) -> Any:
    """A llama_model, to be freed by its taker.

    Raises:
        ArtifactError: llama.cpp does not load the file, with its last words.
        PipelineError: as llama.
    """
    cpp = llama()
    _log.clear()
    params = cpp.llama_model_default_params()
    for name, value in settings.items():
        setattr(params, name, value)
    model = cpp.llama_model_load_from_file(os.fsencode(path), params)
    if not model:
        raise ArtifactError(f"llama.cpp cannot load {path}:\n{last_words()}")
    return model


def token_ids(vocab: Any, text: str, add_special: bool = True) -> list[int]:
    """Ids of a text by a llama_vocab, special tokens in it recognised; `add_special` as the file says.

    Raises:
        PipelineError: as llama.
    """
    data = text.encode()
    room = len(data) + 2  # a token is a byte or more; BOS and EOS
    ids = (ctypes.c_int32 * room)()
    count = llama().llama_tokenize(vocab, data, len(data), ids, room, add_special, True)
    return ids[:count]


def metadata(model: Any, key: str, default: str | None = None) -> str:
    """The value of a key of the model's file, as text. `{arch}` in the key stands for the file's architecture.

    Raises:
        ArtifactError: the file has no such key, and no default was given.
    """
    if "{arch}" in key:
        key = key.format(arch=metadata(model, "general.architecture"))
    text = ctypes.create_string_buffer(256)
    if llama().llama_model_meta_val_str(model, key.encode(), text, len(text)) >= 0:
        return text.value.decode()
    if default is None:
        raise ArtifactError(f"the GGUF file has no key {key}. Convert it again.")
    return default
