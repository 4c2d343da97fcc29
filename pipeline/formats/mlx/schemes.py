"""The MLX schemes and how each packs weights.

Layouts: mlx.core.quantize (https://ml-explore.github.io/mlx/build/html/python/_autosummary/mlx.core.quantize.html).
Groups lie along a row. Affine groups have a scale and a bias of the weights' own float type; mxfp4, mxfp8 and nvfp4
groups have a scale of one byte and no bias.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pipeline.errors import ParamsError, suggestion
from pipeline.formats import refuse_imatrix, refuse_sizes
from pipeline.types import PLAIN, Encoding, Options

RUNS_ON = "MLX: Apple Silicon; scored on any machine"

F32 = Encoding("F32", 1, 4)
F16 = Encoding("F16", 1, 2)
BF16 = Encoding("BF16", 1, 2)
FLOATS = {"float32": F32, "float16": F16, "bfloat16": BF16}
"""By the names that config.json gives them."""

BITS, GROUPS = (2, 3, 4, 5, 6, 8), (32, 64, 128)
"""What mlx.core.quantize takes in affine mode."""


@dataclass(frozen=True)
class Packing:
    """How groups of weights are packed: mlx.core.quantize's mode, bits and group_size.

    `scale` is the float type of affine scales and biases; None is one byte a scale, without bias.
    """

    mode: str
    bits: int
    group: int
    scale: Encoding | None = None


def affine(bits: int, group: int, scale: Encoding = BF16) -> Encoding:
    """'int4-g64': scales and biases of bfloat16, as most checkpoints have; others are named, 'int4-g64-F32'."""
    suffix = "" if scale is BF16 else f"-{scale.name}"
    return Encoding(f"int{bits}-g{group}{suffix}", group, group * bits // 8 + 2 * scale.block_bytes)


MXFP4 = Encoding("mxfp4", 32, 17)
MXFP8 = Encoding("mxfp8", 32, 33)
NVFP4 = Encoding("nvfp4", 16, 9)

PACKINGS: Mapping[Encoding, Packing] = {
    **{
        affine(bits, group, scale): Packing("affine", bits, group, scale)
        for bits in BITS
        for group in GROUPS
        for scale in FLOATS.values()
    },
    MXFP4: Packing("mxfp4", 4, 32),
    MXFP8: Packing("mxfp8", 8, 32),
    NVFP4: Packing("nvfp4", 4, 16),
}
"""Of every encoding that packs; the float types do not."""


AFFINE_DEFAULT = Packing("affine", 4, 64)
"""mlx-lm's own, which the config.json of a mixed recipe names for all that it does not name."""


@dataclass(frozen=True)
class Scheme:
    """`base` is the encoding of most weights, in bfloat16's terms; `high` what a mixed recipe gives some of them."""

    name: str
    base: Encoding
    high: Encoding | None = None

    @property
    def quantized(self) -> bool:
        return self.base in PACKINGS

    @property
    def label(self) -> str:
        return self.name


SCHEMES = {
    scheme.name: scheme
    for scheme in (
        Scheme("bf16", BF16),
        Scheme("fp16", F16),
        *(
            Scheme(f"int{bits}{'' if group == 64 else f'-g{group}'}", affine(bits, group))
            for bits in (8, 6, 4, 3)
            for group in (64, 32, 128)
        ),
        Scheme("mxfp8", MXFP8),
        Scheme("mxfp4", MXFP4),
        Scheme("nvfp4", NVFP4),
        Scheme("mixed_4_6", affine(4, 64), affine(6, 64)),
        Scheme("mixed_3_6", affine(3, 64), affine(6, 64)),
        Scheme("mixed_3_4", affine(3, 64), affine(4, 64)),
        Scheme("mixed_2_6", affine(2, 64), affine(6, 64)),
    )
}


def scheme(name: str, options: Options = PLAIN) -> Scheme:
    """A scheme by name.

    Raises:
        ParamsError: no such scheme, or any options: MLX schemes take none.
    """
    refuse_sizes("mlx", options.sizes)
    if name not in SCHEMES:
        raise ParamsError(f"mlx has no scheme {name!r}; {suggestion(name, [*SCHEMES])}")
    if options.types:
        raise ParamsError(
            f"types: mlx schemes take none ({', '.join(options.types)}). The mixed recipes give some tensors more "
            f"bits: {', '.join(s.name for s in SCHEMES.values() if s.high)}."
        )
    refuse_imatrix("mlx", options.imatrix)
    return SCHEMES[name]
