"""Hidden states -> logits -> log-probabilities, always by the same steps, so that equal inputs give equal bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

HEAD_ROWS = 64


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Over the last axis of [rows, vocab], its sum in float64."""
    shifted: NDArray[np.float32] = logits - logits.max(axis=1, keepdims=True)
    log_sum = np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))
    shifted -= log_sum.astype(np.float32)
    return shifted


class Head:
    """The last matrix product, by which hidden states become logits: always in the same blocks, so always the same
    bits.

    weight: float32 [vocab, d_model].
    """

    def __init__(self, weight: NDArray[np.float32]) -> None:
        from threadpoolctl import ThreadpoolController

        self.weight = weight
        self._pools = ThreadpoolController()
        self._threads = ThreadPoolExecutor()

    def logits(self, hidden: NDArray[np.float32]) -> NDArray[np.float32]:
        """float32 [rows, vocab] of hidden states float32 [rows, d_model].

        Our threads, not OpenBLAS's: those spin for 30 ms after a product and take the cores from llama.cpp (it ran
        1.6 times slower).
        """
        out = np.empty((len(hidden), len(self.weight)), np.float32)

        def block(start: int) -> None:
            part = slice(start, start + HEAD_ROWS)
            np.matmul(hidden[part], self.weight.T, out=out[part])

        with self._pools.limit(limits=1, user_api="blas"):
            list(self._threads.map(block, range(0, len(hidden), HEAD_ROWS)))
        return out
