"""mlx.core's quantization of blocks of rows where MLX is installed, the same bytes by our codec where it is not.

Always on the CPU device: a Mac's GPU may round otherwise, and an artifact has the same bytes on every machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline.formats.mlx import codec
from pipeline.formats.mlx.schemes import BF16, Packing
from pipeline.source.safetensors import widened
from pipeline.types import Encoding

SPARE = 1
"""Callers beyond one for each core that are worth having: while some wait for a stream, one more reads and writes."""

_idle: deque[Any] = deque()
"""Streams that no thread works with. A stream computes in a thread of its own, which stays until the process ends."""


def quantize(stored: NDArray[Any], packing: Packing, source: Encoding) -> codec.Arrays:
    """codec.quantize of weights [rows, columns] as codec.narrow makes them of the float type `source`; may be called
    from several threads at once, which then keep as many cores busy.

    Affine packings are MLX's. It computes the others on the CPU array by array, mxfp4 ten times slower than the codec.
    """
    if packing.scale is None or not installed():
        return codec.quantize(widened(stored), packing, source)
    import mlx.core as mx

    with _stream() as stream:  # its arithmetic is float32 whatever the source: only scales and biases are narrowed
        weights = mx.array(stored)
        if source == BF16:
            weights = mx.view(weights, mx.bfloat16, stream=stream)
        arrays = mx.quantize(weights.astype(mx.float32, stream=stream), packing.group, packing.bits, stream=stream)
        mx.eval(arrays)
    weight, scales, biases = (np.array(x) for x in arrays)
    return weight, codec.narrow(scales, packing.scale), codec.narrow(biases, packing.scale)


def tools() -> dict[str, str]:
    """What quantizes here, with versions."""
    return {name: version(name) for name in (("mlx", "numpy") if installed() else ("numpy",))}


@cache
def installed() -> bool:
    return find_spec("mlx") is not None and find_spec("mlx.core") is not None  # any folder of that name is a mlx


@contextmanager
def _stream() -> Iterator[Any]:
    """A stream of the CPU device that no other thread uses meanwhile: work on one stream is done in sequence."""
    import mlx.core as mx

    try:
        stream = _idle.pop()
    except IndexError:
        stream = mx.new_thread_unsafe_stream(mx.cpu)
    try:
        yield stream
    finally:
        _idle.append(stream)
