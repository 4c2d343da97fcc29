"""Palettes: each group of rows has a table of float16 values, the best there is, and its weights are codes into it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.coreml.kmeans import centroids

Floats = NDArray[np.float32]


def palettize(weights: Floats, bits: int, group: int) -> tuple[NDArray[np.uint8], NDArray[np.float16]]:
    """Codes [rows, columns] and tables [groups, 1, 2^bits, 1] of weights [rows, columns] that float16 can hold.

    A table has the means of the clusters with the least squared error of the weights as float16 stores them, rounded
    to float16, in ascending order. Where a group has no more values than that, it has these, and its last repeated.
    Each weight takes the nearest entry, the lower of two.
    """
    groups = weights.reshape(-1, group * weights.shape[1])
    ordered = np.sort(groups.astype(np.float16).astype(np.float32), axis=1)
    tables = (centroids(ordered, 2**bits) + 0.0).astype(np.float16)  # + 0.0: no negative zero
    wide = tables.astype(np.float64)
    halfway = (wide[:, 1:] + wide[:, :-1]) / 2
    codes = np.empty(groups.shape, np.uint8)
    for i, row in enumerate(groups):
        codes[i] = np.searchsorted(halfway[i], row)
    return codes.reshape(weights.shape), tables.reshape(-1, 1, 2**bits, 1)
