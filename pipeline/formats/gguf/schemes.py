"""The GGUF schemes and encodings.

Block layouts: ggml/src/ggml-common.h of llama.cpp. A scheme is a llama_ftype (llama.h): a base encoding, from which
plan.py departs by the rules of llama-quantize. Block sizes are checked against the library by a test.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from pipeline.errors import ParamsError, suggestion
from pipeline.formats import refuse_sizes
from pipeline.types import PLAIN, Encoding, Options, mix_name

RUNS_ON = "llama.cpp: CPU everywhere, Metal on Apple Silicon"

F32 = Encoding("F32", 1, 4)
F16 = Encoding("F16", 1, 2)
BF16 = Encoding("BF16", 1, 2)
Q4_0 = Encoding("Q4_0", 32, 18)
Q4_1 = Encoding("Q4_1", 32, 20)
Q5_0 = Encoding("Q5_0", 32, 22)
Q5_1 = Encoding("Q5_1", 32, 24)
Q8_0 = Encoding("Q8_0", 32, 34)
Q2_K = Encoding("Q2_K", 256, 84)
Q3_K = Encoding("Q3_K", 256, 110)
Q4_K = Encoding("Q4_K", 256, 144)
Q5_K = Encoding("Q5_K", 256, 176)
Q6_K = Encoding("Q6_K", 256, 210)
IQ1_M = Encoding("IQ1_M", 256, 56)
IQ2_XXS = Encoding("IQ2_XXS", 256, 66)
IQ2_XS = Encoding("IQ2_XS", 256, 74)
IQ2_S = Encoding("IQ2_S", 256, 82)
IQ3_XXS = Encoding("IQ3_XXS", 256, 98)
IQ3_S = Encoding("IQ3_S", 256, 110)
IQ4_NL = Encoding("IQ4_NL", 32, 18)
IQ4_XS = Encoding("IQ4_XS", 256, 136)

GGML_TYPES = {
    **{F32: 0, F16: 1, BF16: 30, Q4_0: 2, Q4_1: 3, Q5_0: 6, Q5_1: 7, Q8_0: 8},
    **{Q2_K: 10, Q3_K: 11, Q4_K: 12, Q5_K: 13, Q6_K: 14, IQ4_NL: 20, IQ4_XS: 23},
    **{IQ2_XXS: 16, IQ2_XS: 17, IQ3_XXS: 18, IQ3_S: 21, IQ2_S: 22, IQ1_M: 29},
}
"""ggml_type of each encoding (ggml.h)."""

NEED_IMPORTANCE = {IQ1_M, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS}
"""What llama-quantize makes of a matrix only by an importance matrix (tensor_requires_imatrix in llama-quant.cpp)."""

ASSERT_IMPORTANCE = {IQ2_XXS, IQ2_XS}
"""What ggml makes of nothing without it (ggml_quantize_requires_imatrix in ggml.c)."""

ENCODINGS = {encoding.name.lower(): encoding for encoding in GGML_TYPES}

EMBEDDING, HEAD = "token_embd", "output"
"""Keys of a mix that are names, not patterns: llama-quantize's --token-embedding-type and --output-tensor-type."""


@dataclass(frozen=True)
class Scheme:
    """`base` is the encoding most weights get, `ftype` what the file says of itself (llama_ftype).

    `types` are a custom mix's own: (pattern, encoding), the first that matches a tensor's GGUF name decides.
    """

    name: str
    ftype: int
    base: Encoding
    types: tuple[tuple[str, Encoding], ...] = ()

    @property
    def quantized(self) -> bool:
        return self.base.block > 1

    @property
    def label(self) -> str:
        """'q4_k_m', and of a mix 'q4_k_m+attn_v=q8_0'."""
        return mix_name(self.name, {pattern: encoding.name for pattern, encoding in self.types})


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("f32", 0, F32),
        Scheme("f16", 1, F16),
        Scheme("bf16", 32, BF16),
        Scheme("q8_0", 7, Q8_0),
        Scheme("q6_k", 18, Q6_K),
        Scheme("q5_k_m", 17, Q5_K),
        Scheme("q5_k_s", 16, Q5_K),
        Scheme("q5_1", 9, Q5_1),
        Scheme("q5_0", 8, Q5_0),
        Scheme("q4_k_m", 15, Q4_K),
        Scheme("q4_k_s", 14, Q4_K),
        Scheme("q4_1", 3, Q4_1),
        Scheme("q4_0", 2, Q4_0),
        Scheme("iq4_nl", 25, IQ4_NL),
        Scheme("iq4_xs", 30, IQ4_XS),
        Scheme("q3_k_l", 13, Q3_K),
        Scheme("q3_k_m", 12, Q3_K),
        Scheme("q3_k_s", 11, Q3_K),
        Scheme("iq3_s", 26, IQ3_S),
        Scheme("iq3_xxs", 23, IQ3_XXS),
        Scheme("q2_k", 10, Q2_K),
        Scheme("iq2_s", 28, IQ2_XS),
        Scheme("iq2_xs", 20, IQ2_XS),
        Scheme("iq2_xxs", 19, IQ2_XXS),
        Scheme("iq1_m", 31, IQ1_M),
    )
}


def scheme(name: str, options: Options = PLAIN) -> Scheme:
    """A scheme by name, with the types of a custom mix over it, by pattern.

    A pattern is a regular expression searched in a tensor's GGUF name (blk.0.attn_v.weight), as llama-quantize's
    --tensor-type; `token_embd` and `output` are the embedding and the head themselves.

    Raises:
        ParamsError: no such scheme or type, a pattern that is none or is given twice, or patterns over a scheme that
            quantizes nothing; sizes, which only a Core ML package has.
    """
    refuse_sizes("gguf", options.sizes)
    if name not in SCHEMES:
        raise ParamsError(f"gguf has no scheme {name!r}; {suggestion(name, [*SCHEMES])}")
    own = tuple(_own_type(name, *item) for item in options.types.items())
    for i, (pattern, _) in enumerate(own):
        if pattern in dict(own[:i]):  # which case did not tell apart
            raise ParamsError(
                f"types: {pattern} is given twice. Patterns are read in lower case, as llama-quantize does."
            )
    return replace(SCHEMES[name], types=own)


def _own_type(scheme: str, pattern: str, kind: str) -> tuple[str, Encoding]:
    pattern, kind = pattern.lower(), kind.lower()  # as llama-quantize reads them
    try:
        re.compile(pattern)
    except re.error as error:
        raise ParamsError(f"types: {pattern!r} is not a regular expression: {error}.") from error
    if kind not in ENCODINGS:
        raise ParamsError(f"types: {pattern} asks for the type {kind!r}; {suggestion(kind, [*ENCODINGS])}")
    if not SCHEMES[scheme].quantized and pattern not in {EMBEDDING, HEAD}:
        raise ParamsError(
            f"types: llama-quantize gives {scheme} files no types by pattern ({pattern}), only {EMBEDDING} and {HEAD}. "
            "Take a quantized scheme as the base."
        )
    return pattern, ENCODINGS[kind]
