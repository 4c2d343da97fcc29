"""Which encoding each tensor gets: the policy of mlx_lm.convert, except that no matrix is left out unseen, and that
routers are kept in high precision whatever the model and the scheme.

Source: the behaviour of mlx-lm 0.32.2 (convert.py: mixed_quant_predicate_builder; utils.py: quantize_model; the models'
quant_predicate and cast_predicate), which quantizes every matrix whose rows divide into groups and skips the others
without a word. Its mixed recipes take the place of a model's own predicate, so that routers lose bits in them.
"""

from __future__ import annotations

from pipeline.errors import QuantizationError, listed
from pipeline.formats.mlx.arrange import DECAY, ROUTERS, arranged, is_packable
from pipeline.formats.mlx.schemes import FLOATS, GROUPS, PACKINGS, SCHEMES, Scheme, affine
from pipeline.types import Encoding, ModelSpec, Planned, TensorSpec

STORED = {encoding.name: encoding for encoding in FLOATS.values()}
SHOWN = 3  # tensors of one row length

ROUTER = PACKINGS[affine(8, 64)]
"""What mlx-lm packs routers in, where a model file of its says so."""

MORE_BITS = ("attn_v", "ffn_down", "expert_down", "shared_down")
"""Roles that a mixed recipe gives more bits in some layers."""


def plan(spec: ModelSpec, scheme: Scheme) -> list[Planned]:
    """The encoding of every tensor of an MLX folder (arrange.arranged), in file order, each with its reason.

    Raises:
        QuantizationError: rows that do not divide into the groups of their encoding, with a group that would.
    """
    planned = [_planned(tensor, spec, scheme) for tensor in arranged(spec)]
    _check_rows(planned, scheme)
    return planned


def float_of(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme) -> Encoding:
    """The float type that a tensor is cast to before anything else, and the one of its scales.

    What the scheme says, else config.json, else what the checkpoint stores; bfloat16 where none was looked at. The
    decay of a DeltaNet stays as it is stored.
    """
    if tensor.role == DECAY and tensor.dtype in STORED:
        return STORED[tensor.dtype]
    if not scheme.quantized:
        return scheme.base
    return FLOATS[spec.dtype] if spec.dtype else STORED.get(tensor.dtype, STORED["BF16"])


def _planned(tensor: TensorSpec, spec: ModelSpec, scheme: Scheme) -> Planned:
    own = float_of(tensor, spec, scheme)
    if tensor.role == DECAY:
        return Planned(tensor, own, "decays are never cast")
    if not scheme.quantized:
        return Planned(tensor, own, "the scheme's own")
    if not is_packable(tensor):
        what = "vectors" if len(tensor.shape) < 2 else "convolutions"
        return Planned(tensor, own, f"{what} stay as they are")
    if tensor.role in ROUTERS:
        return _router(tensor, own)
    if scheme.high is not None and _more_bits(tensor, spec.n_layers):
        what = "the head" if tensor.role == "head" else f"{tensor.role} of some layers"
        encoding = _with_scales(scheme.high, own)
        return Planned(tensor, encoding, f"{what} gets more bits: {encoding.name}")
    return Planned(tensor, _with_scales(scheme.base, own), "the scheme's own")


def _router(tensor: TensorSpec, own: Encoding) -> Planned:
    columns = tensor.shape[-1]
    if columns % ROUTER.group:
        why = f"rows of {columns} do not divide into groups of {ROUTER.group}"
        return Planned(tensor, own, f"routers are kept in high precision: {own.name}, since {why}")
    encoding = affine(ROUTER.bits, ROUTER.group, own)
    return Planned(tensor, encoding, f"routers are kept in high precision: {encoding.name}")


def _more_bits(tensor: TensorSpec, n: int) -> bool:
    """The head, and attn_v and the downs of the first and last eighth of the layers and every third between."""
    if tensor.layer is None:
        return tensor.role == "head"
    i = tensor.layer
    return tensor.role in MORE_BITS and (i < n // 8 or i >= 7 * n // 8 or (i - n // 8) % 3 == 2)


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
