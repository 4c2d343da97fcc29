"""Hidden states -> logits -> log-probabilities, always by the same steps, so that equal inputs give equal bits."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from numpy.typing import NDArray

HEAD_ROWS = 64


def shifted_logits(logits: NDArray[np.float32]) -> tuple[NDArray[np.float32], NDArray[np.float64]]:
    """Logits less their maximum, float32 [rows, vocab], and ln of the sum of their exponentials, float64 [rows, 1].

    Their difference is the log-softmax. Infinite logits give NaN, for the caller to refuse.
    """
    with np.errstate(invalid="ignore"):
        shifted: NDArray[np.float32] = logits - logits.max(axis=1, keepdims=True)
        return shifted, np.log(np.exp(shifted).sum(axis=1, keepdims=True, dtype=np.float64))


def logprob_of(
    shifted: NDArray[np.float32], log_sum: NDArray[np.float64], targets: NDArray[np.integer]
) -> NDArray[np.float32]:
    """Log-probability in nats, float32 [rows], of one token per row, from what `shifted_logits` gave."""
    at = targets[:, None].astype(np.int64)
    return (np.take_along_axis(shifted, at, 1)[:, 0] - log_sum[:, 0]).astype(np.float32)


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
            rows = hidden[start : start + HEAD_ROWS]
            if len(rows) == HEAD_ROWS:
                np.matmul(rows, self.weight.T, out=out[start : start + HEAD_ROWS])
            else:  # filled up: BLAS gives fewer rows other bits
                filled = np.zeros((HEAD_ROWS, hidden.shape[1]), np.float32)
                filled[: len(rows)] = rows
                out[start:] = (filled @ self.weight.T)[: len(rows)]

        with self._pools.limit(limits=1, user_api="blas"):
            list(self._threads.map(block, range(0, len(hidden), HEAD_ROWS)))
        return out
