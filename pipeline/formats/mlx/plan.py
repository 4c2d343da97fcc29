"""Which encoding each tensor gets: the policy of mlx_lm.convert, except that no matrix is left out unseen.

Source: the behaviour of mlx-lm 0.32.2 (convert.py: mixed_quant_predicate_builder; utils.py: quantize_model), which
quantizes every matrix whose rows divide into groups and skips the others without a word.
"""

from __future__ import annotations

from pipeline.errors import QuantizationError, listed
from pipeline.formats.mlx.schemes import FLOATS, GROUPS, PACKINGS, SCHEMES, Scheme, affine
from pipeline.types import Encoding, ModelSpec, Planned, TensorSpec

STORED = {encoding.name: encoding for encoding in FLOATS.values()}
SHOWN = 3  # tensors of one row length


def plan(spec: ModelSpec, scheme: Scheme) -> list[Planned]:
    """The encoding of every tensor, in file order, each with its reason.

    Raises:
        QuantizationError: rows that do not divide into the groups of their encoding, with a group that would.
    """
    planned = [_planned(tensor, spec, scheme) for tensor in spec.tensors]
    _check_rows(planned, scheme)
    return planned


def float_of(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme) -> Encoding:
    """The float type that a tensor is cast to before anything else, and the one of its scales.

    What the scheme says, else config.json, else what the checkpoint stores; bfloat16 where none was looked at.
    """
    if not scheme.quantized:
        return scheme.base
    return FLOATS[spec.dtype] if spec.dtype else STORED.get(tensor.dtype, STORED["BF16"])


def _planned(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme) -> Planned:
    own = float_of(tensor, spec, scheme)
    if not scheme.quantized:
        return Planned(tensor, own, "the scheme's own")
    if len(tensor.shape) < 2:
        return Planned(tensor, own, "vectors stay as they are")
    if scheme.high is not None and _more_bits(tensor, spec.n_layers):
        what = "the head" if tensor.role == "head" else f"{tensor.role} of some layers"
        encoding = _with_scales(scheme.high, own)
        return Planned(tensor, encoding, f"{what} gets more bits: {encoding.name}")
    return Planned(tensor, _with_scales(scheme.base, own), "the scheme's own")


def _more_bits(tensor: TensorSpec, n: int) -> bool:
    """The head, and attn_v and ffn_down of the first and last eighth of the layers and every third between."""
    if tensor.layer is None:
        return tensor.role == "head"
    i = tensor.layer
    return tensor.role in {"attn_v", "ffn_down"} and (i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2)


def _with_scales(encoding: Encoding, scale: Encoding) -> Encoding:
    packing = PACKINGS[encoding]
    return encoding if packing.scale is None else affine(packing.bits, packing.group, scale)


def _check_rows(planned: list[Planned], scheme: Scheme) -> None:
    """mlx-lm would leave these matrices as they are: 49 of 57 of a model with rows of 96, at group 64."""
    lengths: dict[tuple[int, int], list[str]] = {}
    for p in planned:
        if p.tensor.shape[-1] % p.encoding.block:
            lengths.setdefault((p.tensor.shape[-1], p.encoding.block), []).append(p.tensor.name)
    if not lengths:
        return
    problems = [
        f"rows of {columns} weights do not divide into groups of {block}: {_some(names)}"
        for (columns, block), names in lengths.items()
    ]
    matrices = [p.tensor.shape[-1] for p in planned if p.encoding in PACKINGS]
    raise QuantizationError(f"{scheme.name} cannot hold every matrix:\n{listed(problems)}\n{_next_step(matrices)}")


def _some(names: list[str]) -> str:
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return ", ".join(names[:SHOWN]) + more


def _next_step(columns: list[int]) -> str:
    """A group that divides all rows, and the schemes that have it."""
    for group in sorted({*GROUPS, *(e.block for e in PACKINGS)}, reverse=True):
        fitting = [s.name for s in SCHEMES.values() if s.quantized and s.base.block == group]
        if fitting and all(n % group == 0 for n in columns):
            return f"Groups of {group} would divide them all: take {', '.join(fitting)}."
    return "No group of MLX divides them all: take bf16 or fp16, or another format."
