"""A GGUF file in llama.cpp, in this process: logits of given ids, prefill and decode times."""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.cores import physical_cores
from pipeline.errors import ArtifactError, MeasurementError, ParamsError, suggestion
from pipeline.formats.gguf import engine, reader
from pipeline.formats.gguf.schemes import BF16, F16, F32, Q4_0, Q8_0
from pipeline.runtimes import Messages, Prompt, Reply
from pipeline.types import Artifact, Engine

BATCH = 2048  # llama.cpp's defaults; both are part of a time
MICRO_BATCH = 512
KV_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
KV_ENCODINGS = {encoding.name.lower(): encoding for encoding in (F32, F16, BF16, Q8_0, Q4_0)}
DEVICES = ("auto", "cpu")


def open_runtime(folder: Path, artifact: Artifact, **settings: Any) -> GgufRuntime:
    """The artifact whose files are in `folder`, loaded; `settings` are GgufRuntime's.

    Raises:
        ParamsError, ArtifactError, PipelineError: as GgufRuntime.
    """
    return GgufRuntime(folder / next(iter(artifact.files)), **settings)  # of a split set llama.cpp wants the first


def check_settings(kv_type: str, flash_attention: bool | None, device: str = "auto") -> None:
    """Refuse what llama.cpp would refuse without a reason.

    Raises:
        ParamsError: an unknown KV type or device, or a quantized KV cache without flash attention.
    """
    if kv_type not in KV_TYPES:
        raise ParamsError(f"kv_type {kv_type!r} does not exist; {suggestion(kv_type, [*KV_TYPES])}")
    if kv_type.startswith("q") and flash_attention is False:
        raise ParamsError(f"kv_type {kv_type} needs flash attention in llama.cpp: set flash_attention to true.")
    if device not in DEVICES:
        raise ParamsError(f"device {device!r} does not exist; {suggestion(device, DEVICES)}")


def unrepresentative(device: str) -> str | None:
    """Why a speed measured here says nothing to users; llama.cpp's users run it on any machine."""
    return None


def unmeasurable() -> str | None:
    """Why nothing can be timed on this machine; None where it can."""
    return None


def check_window(scheme: object, window: int) -> None:
    """Refuse windows longer than the artifacts of a scheme will take: they take any."""


def check_lengths(folder: Path, artifact: Artifact, window: int, conversation: int = 0) -> None:
    """Refuse windows and conversations longer than the artifact takes: it takes any."""


def unscorable(weights: int) -> str | None:
    """Why an artifact of so many weights cannot be scored on this machine: llama.cpp maps them."""
    return None


def context_length(folder: Path, artifact: Artifact) -> int:
    """Tokens of the longest context that the artifact's model was trained for.

    Raises:
        ArtifactError, PipelineError: as engine.load_model.
    """
    model = engine.load_model(folder / next(iter(artifact.files)), vocab_only=True)
    try:
        return int(engine.metadata(model, "{arch}.context_length"))
    finally:
        engine.llama().llama_model_free(model)


class GgufRuntime:
    """Runtime of one model and one context of `context` tokens. Close it: the memory is llama.cpp's.

    threads 0 takes one per physical core; flash_attention None leaves it to llama.cpp; device is auto or cpu.

    Raises:
        ParamsError: an unknown KV type or device, or a quantized KV cache without flash attention.
        ArtifactError: llama.cpp does not load the file or has no room for the context.
        PipelineError: llama-cpp-python is not installed.
    """

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        threads: int = 0,
        flash_attention: bool | None = False,
        kv_type: str = "f16",
        device: str = "auto",
    ) -> None:
        check_settings(kv_type, flash_attention, device)
        self.path = path
        self._cpp: Any = engine.llama()
        self._model = engine.load_model(path, n_gpu_layers=0 if device == "cpu" else -1)
        self._vocab: Any = self._cpp.llama_model_get_vocab(self._model)
        self.vocab_size: int = self._cpp.llama_vocab_n_tokens(self._vocab)
        threads = threads or physical_cores()
        self._context = self._new_context(context, threads, flash_attention, KV_TYPES[kv_type])
        self._batch: Any = self._cpp.llama_batch_init(BATCH, 0, 1)
        for i in range(BATCH):
            self._batch.n_seq_id[i] = 1
            self._batch.seq_id[i][0] = 0
        self._held = 0  # tokens in the cache
        self.native = None  # it is
        self.kv_bytes = self._kv_bytes(kv_type)
        self.engine = Engine(
            name="llama.cpp",
            version=engine.version(),
            instruction_set=engine.instruction_set(),
            device="cpu" if device == "cpu" else engine.device(),
            kv_type=kv_type,
            flash_attention="auto" if flash_attention is None else "on" if flash_attention else "off",
            threads=threads,
            batch=BATCH,
            micro_batch=MICRO_BATCH,
            mmap=True,  # llama.cpp's default
        )

    def _new_context(self, context: int, threads: int, flash_attention: bool | None, kv_type: int) -> Any:
        params = self._cpp.llama_context_default_params()
        params.n_ctx = context
        params.n_batch = BATCH
        params.n_ubatch = MICRO_BATCH
        params.n_threads = params.n_threads_batch = threads
        params.flash_attn_type = -1 if flash_attention is None else int(flash_attention)
        params.type_k = params.type_v = kv_type
        made = self._cpp.llama_init_from_model(self._model, params)
        if not made:
            self._cpp.llama_model_free(self._model)
            raise ArtifactError(
                f"llama.cpp makes no context of {context} tokens for {self.path}:\n{engine.last_words()}\n"
                "Ask for another KV type, a shorter context, or free memory."
            )
        return made

    def _kv_bytes(self, kv_type: str) -> int:
        """Keys and values of every position of the context, which llama.cpp makes a multiple of 256; and of a hybrid's
        layers with a DeltaNet their state instead, float32 and of one size however long the context is.
        """
        cpp, model = self._cpp, self._model
        head = str(cpp.llama_model_n_embd(model) // cpp.llama_model_n_head(model))  # where the file does not say
        sizes = [int(engine.metadata(model, f"{{arch}}.attention.{part}_length", head)) for part in ("key", "value")]
        linear = self._linear_layers()
        layers = cpp.llama_model_n_layer(model) - linear  # without MTP layers
        values = layers * cpp.llama_model_n_head_kv(model) * sum(sizes)
        state = linear * self._state_values() * F32.block_bytes if linear else 0
        return KV_ENCODINGS[kv_type].row_bytes(values * cpp.llama_n_ctx(self._context)) + state

    def _linear_layers(self) -> int:
        if engine.metadata(self._model, "{arch}.ssm.state_size", "") == "":
            return 0
        tables = (reader.table(file) for file in reader.files_of(self.path))
        return sum(tensor.name.endswith(".ssm_conv1d.weight") for table in tables for tensor in table)

    def _state_values(self) -> int:
        """Of a layer: what its convolution looks back at, and the state (llama-hparams.cpp, n_embd_r and n_embd_s)."""
        conv, inner, groups, state = (
            int(engine.metadata(self._model, f"{{arch}}.ssm.{key}"))
            for key in ("conv_kernel", "inner_size", "group_count", "state_size")
        )
        return (conv - 1) * (inner + 2 * groups * state) + state * inner

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """See Runtime. Logits before `start` are not computed; that changes no bit of the others (a test).

        But a micro-batch with one row of logits takes another kernel and differs in the last bits: it is given two.
        """
        self._clear()
        alone = start % MICRO_BATCH == MICRO_BATCH - 1 or (start == len(ids) - 1 and start % MICRO_BATCH > 0)
        first = start - 1 if alone else start
        for begin in range(0, len(ids), BATCH):
            part = ids[begin : begin + BATCH]
            wanted = np.arange(begin, begin + len(part)) >= first
            self._decode(part, wanted)
            rows = int(wanted.sum())
            if rows:
                logits = np.ctypeslib.as_array(self._cpp.llama_get_logits(self._context), shape=(rows, self.vocab_size))
                yield logits[max(0, start - max(begin, first)) :]

    def prefill(self, ids: NDArray[np.int32]) -> float:
        """See Runtime."""
        self._clear()
        self._cpp.llama_synchronize(self._context)
        begin = time.perf_counter()
        self._take_in(ids)
        self._cpp.llama_synchronize(self._context)
        return time.perf_counter() - begin

    def decode(self, n: int) -> float:
        """See Runtime. The tokens are arbitrary: their values do not change the work."""
        one, wanted = np.empty(1, np.int32), np.ones(1, np.bool_)
        begin = time.perf_counter()
        for i in range(n):
            one[0] = i % self.vocab_size
            self._decode(one, wanted)
            self._cpp.llama_synchronize(self._context)
        return time.perf_counter() - begin

    def peak_memory(self) -> None:
        """See Runtime: the weights are mapped, so they are resident as they are used."""

    def placement(self) -> None:
        """See Runtime: llama.cpp computes where it is told."""

    def prompt(self, messages: Messages) -> Prompt | None:
        """See Runtime. Rendered as llama-cpp-python renders it for its users.

        Raises:
            ArtifactError: the template fails.
        """
        from jinja2 import TemplateError
        from llama_cpp.llama_chat_format import Jinja2ChatFormatter

        template = self._cpp.llama_model_chat_template(self._model, None)
        if template is None:
            return None
        bos, eos = (self._text(token(self._vocab)) for token in (self._cpp.llama_vocab_bos, self._cpp.llama_vocab_eos))
        formatter = Jinja2ChatFormatter(template.decode(), eos_token=eos, bos_token=bos)
        try:
            text = formatter(messages=[*messages]).prompt
        except (TemplateError, ValueError) as error:  # a ValueError is the template's own complaint
            raise ArtifactError(f"{self.path}: its chat template fails on a plain question ({error}).") from error
        return Prompt(text, tuple(engine.token_ids(self._vocab, text, add_special=False)))

    def reply(self, ids: Sequence[int], limit: int) -> Reply:
        """See Runtime.

        Raises:
            MeasurementError: the context has no room for both; llama.cpp would end the process.
        """
        if (needed := len(ids) + limit) > (room := self._cpp.llama_n_ctx(self._context)):
            raise MeasurementError(
                f"a prompt of {len(ids)} tokens and a reply of {limit} need a context of {needed}, it has {room}."
            )
        self._clear()
        self._take_in(np.array(ids, np.int32))
        found = [self._most_likely()]
        while len(found) < limit and not self._ends(found[-1]):
            self._take_in(np.array(found[-1:], np.int32))
            found.append(self._most_likely())
        stopped = self._ends(found[-1])
        said = self._decoded(found[:-1] if stopped else found)
        return Reply(tuple(found), said, self._decoded(found[-1:]) if stopped else None)

    def _most_likely(self) -> int:
        """The token of the highest logit behind what was taken in."""
        return int(np.ctypeslib.as_array(self._cpp.llama_get_logits(self._context), shape=(self.vocab_size,)).argmax())

    def _ends(self, token: int) -> bool:
        return bool(self._cpp.llama_vocab_is_eog(self._vocab, token))

    def _text(self, token: int) -> str:
        """A special token: '' for -1, none."""
        return "" if token < 0 else str(self._cpp.llama_vocab_get_text(self._vocab, token), "utf-8")

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of ids, special tokens written out; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self._piece(token) for token in ids).decode(errors="replace")

    def _piece(self, token: int) -> bytes:
        room = len(self._cpp.llama_vocab_get_text(self._vocab, token))  # a character or more for each byte
        piece = ctypes.create_string_buffer(room)
        size = self._cpp.llama_token_to_piece(self._vocab, token, piece, room, 0, True)
        return piece.raw[:size]

    def close(self) -> None:
        self._cpp.llama_batch_free(self._batch)
        self._cpp.llama_free(self._context)
        self._cpp.llama_model_free(self._model)

    def _clear(self) -> None:
        self._cpp.llama_memory_clear(self._cpp.llama_get_memory(self._context), True)
        self._held = 0

    def _take_in(self, ids: NDArray[np.int32]) -> None:
        """Append `ids` [n] to the cache, with logits of the last."""
        for at in range(0, len(ids), BATCH):
            part = ids[at : at + BATCH]
            self._decode(part, np.arange(at, at + len(part)) == len(ids) - 1)

    def _decode(self, ids: NDArray[np.int32], wanted: NDArray[np.bool_]) -> None:
        """Append `ids` [n ≤ BATCH] to the cache, with logits where `wanted` [n]."""
        n, batch = len(ids), self._batch
        batch.n_tokens = n
        np.ctypeslib.as_array(batch.token, shape=(n,))[:] = ids
        np.ctypeslib.as_array(batch.pos, shape=(n,))[:] = np.arange(self._held, self._held + n)
        np.ctypeslib.as_array(batch.logits, shape=(n,))[:] = wanted
        code = self._cpp.llama_decode(self._context, batch)
        if code:
            raise MeasurementError(
                f"{self.path}: llama_decode of {n} tokens behind {self._held} failed with {code}:\n"
                f"{engine.last_words()}"
            )
        self._held += n
