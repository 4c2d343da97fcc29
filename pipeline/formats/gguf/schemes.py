"""The GGUF schemes and encodings.

Block layouts: ggml/src/ggml-common.h of llama.cpp. A scheme is a llama_ftype (llama.h): a base encoding, from which
plan.py departs by the rules of llama-quantize. Block sizes are checked against the library by a test.
"""

from __future__ import annotations

from dataclasses import dataclass

from pipeline.errors import ParamsError, suggestion
from pipeline.types import Encoding

RUNS_ON = "llama.cpp: CPU everywhere, Metal on Apple Silicon"

F32 = Encoding("F32", 1, 4)
F16 = Encoding("F16", 1, 2)
BF16 = Encoding("BF16", 1, 2)
Q4_0 = Encoding("Q4_0", 32, 18)
Q5_0 = Encoding("Q5_0", 32, 22)
Q5_1 = Encoding("Q5_1", 32, 24)
Q8_0 = Encoding("Q8_0", 32, 34)
Q4_K = Encoding("Q4_K", 256, 144)
Q5_K = Encoding("Q5_K", 256, 176)
Q6_K = Encoding("Q6_K", 256, 210)

GGML_TYPES = {F32: 0, F16: 1, BF16: 30, Q4_0: 2, Q5_0: 6, Q5_1: 7, Q8_0: 8, Q4_K: 12, Q5_K: 13, Q6_K: 14}
"""ggml_type of each encoding (ggml.h)."""


@dataclass(frozen=True)
class Scheme:
    """`base` is the encoding most weights get, `ftype` what the file says of itself (llama_ftype)."""

    name: str
    ftype: int
    base: Encoding

    @property
    def quantized(self) -> bool:
        return self.base.block > 1


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("f32", 0, F32),
        Scheme("f16", 1, F16),
        Scheme("bf16", 32, BF16),
        Scheme("q8_0", 7, Q8_0),
        Scheme("q6_k", 18, Q6_K),
        Scheme("q5_k_m", 17, Q5_K),
        Scheme("q5_0", 8, Q5_0),
        Scheme("q4_k_m", 15, Q4_K),
        Scheme("q4_0", 2, Q4_0),
    )
}


def scheme(name: str) -> Scheme:
    """A scheme by name.

    Raises:
        ParamsError: no such scheme.
    """
    if name not in SCHEMES:
        raise ParamsError(f"gguf has no scheme {name!r}; {suggestion(name, [*SCHEMES])}")
    return SCHEMES[name]
