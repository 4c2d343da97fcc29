"""A folder in MLX itself, by mlx-lm's own model: logits of given ids, prefill and decode times."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.mlx import engine
from pipeline.formats.mlx.schemes import BF16, F16, F32
from pipeline.types import Engine

HEAD_ROWS = 128  # logits of so many positions at once
STEP = 2048  # tokens of a prompt at once: mlx_lm.generate's default
KV_TYPES = {"f32": F32, "f16": F16, "bf16": BF16}


class MlxModel:
    """A Scorer that is timed as well. On the GPU it computes in the artifact's own float type. On the CPU all floats
    are widened to float32: 16-bit products take ten times as long there, and round every sum.

    `score` may be called from several threads at once; each has a stream of its own.

    Raises:
        ArtifactError: mlx-lm does not load the folder.
    """

    def __init__(self, folder: Path, device: str) -> None:
        mx = self._mx = engine.core()
        self._stream: Any = mx.new_thread_local_stream(engine.device(device))
        self._model: Any = engine.load_model(folder)
        self._text: Any = getattr(self._model, "language_model", self._model)  # of a file that reads larger models
        self._cache: Any = None
        widened = device == "cpu"
        with mx.stream(self._stream):
            if widened:
                self._model.set_dtype(mx.float32)
            # YaRN's frequencies are no parameters, and what is not computed yet belongs to this thread
            mx.eval([array for part in self._model.modules() for array in part.values() if isinstance(array, mx.array)])
        dtype = self._text.model.norm.weight.dtype
        self.vocab_size = int(self._text.args.vocab_size)
        self.engine = Engine(
            name="mlx-lm in float32" if widened else "mlx-lm",
            version=engine.version(),
            instruction_set=str(mx.device_info(engine.device(device))["architecture"]),
            device=device,
            kv_type={mx.float32: "f32", mx.float16: "f16", mx.bfloat16: "bf16"}[dtype],
            flash_attention="auto",
            threads=1,  # quantized products take no more; on the GPU it is the one that gives it work
            batch=STEP,
        )

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """See Scorer."""
        mx = self._mx
        with mx.stream(self._stream):
            hidden = self._hidden(mx.array(ids))[start:]  # (T, C)
            mx.eval(hidden)
        for at in range(0, len(ids) - start, HEAD_ROWS):
            with mx.stream(self._stream):  # entered anew: between two chunks the stream is the caller's
                logits = self._head(hidden[at : at + HEAD_ROWS]).astype(mx.float32)
                mx.eval(logits)
            yield np.array(logits)

    def prefill(self, ids: NDArray[np.int32]) -> float:
        """See Runtime."""
        begin = time.perf_counter()
        self._clear()
        self._take_in(ids)
        self._mx.synchronize(self._stream)
        return time.perf_counter() - begin

    def decode(self, n: int) -> float:
        """See Runtime. The tokens are arbitrary: their values do not change the work."""
        begin = time.perf_counter()
        for i in range(n):
            self._take_in([i % self.vocab_size])
        self._mx.synchronize(self._stream)
        return time.perf_counter() - begin

    def greedy(self, ids: Sequence[int], limit: int, stop_ids: Collection[int]) -> list[int]:
        """The most likely tokens behind `ids`: at most `limit`, one of `stop_ids` being the last."""
        self._clear()
        found: list[int] = []
        given = ids
        while len(found) < limit and not (found and found[-1] in stop_ids):
            found.append(int(np.argmax(self._take_in(given))))
            given = found[-1:]
        return found

    def _clear(self) -> None:
        from mlx_lm.models.cache import make_prompt_cache

        self._cache = make_prompt_cache(self._model)

    def _take_in(self, ids: Sequence[int] | NDArray[np.int32]) -> NDArray[np.float32]:
        """Append `ids` [n] to the cache, as mlx_lm.generate's generate_step does: logits [vocab] behind the last."""
        mx = self._mx
        with mx.stream(self._stream):
            tokens = mx.array(ids)
            while len(tokens) > 1:
                part = tokens[: min(STEP, len(tokens) - 1)]
                self._hidden(part, self._cache)
                mx.eval([layer.state for layer in self._cache])
                mx.clear_cache()
                tokens = tokens[len(part) :]
            logits = self._head(self._hidden(tokens, self._cache))[0].astype(mx.float32)
            mx.eval(logits)
        return np.array(logits)

    def _hidden(self, ids: Any, cache: Any = None) -> Any:
        """Hidden states [n, d_model] of `ids` [n], behind the last norm. Embeddings of mxfp4, mxfp8 and nvfp4 are
        bfloat16 even where all else is float32; that type holds each of their values, so nothing is lost.
        """
        return self._text.model(ids[None], cache)[0]

    def _head(self, hidden: Any) -> Any:
        """Logits [rows, vocab] of hidden states [rows, d_model]."""
        if "lm_head" in self._text:
            return self._text.lm_head(hidden)
        return self._text.model.embed_tokens.as_linear(hidden)
