"""ModelSpec -> MIL program: `prefill` and `decode`, which share a state, and `score`, which has none.

Weights are placeholders by their blobs' names (mil.py): no checkpoint is read here, and what is made from the program
must not look at their values. Ops of iOS 18. Shapes as in layers.py, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.formats.coreml import engine, tables
from pipeline.formats.coreml.layers import BLOCKS, STATES, Caches, Model, Pieces, norm, product, scaled
from pipeline.formats.coreml.mil import Body, Var, builder, unknown
from pipeline.formats.coreml.names import Blob, Piece, pieces
from pipeline.formats.coreml.plan import Sizes
from pipeline.types import ModelSpec, Planned

PREFILL, DECODE, SCORE = "prefill", "decode", "score"
INPUT_IDS, POSITION, LENGTH, LOGITS = "input_ids", "position", "length", "logits"

UNSEEN = np.float16(-30_000)
"""Added to the score of a key that a query does not see: float16 holds the sum with any score down to -35,000."""


def program(spec: ModelSpec, planned: Sequence[Planned], sizes: Sizes) -> Any:
    """The coremltools Program of a model. Its functions:

    prefill: input_ids int32 [1, chunk], position int32 [1], where the chunk begins, and length int32 [1], how many of
    its tokens count -> logits float16 [1, 1, V] of the last that counts. The others may be any ids.
    decode: input_ids int32 [1, 1], position int32 [1] -> logits float16 [1, 1, V].
    score: input_ids int32 [1, score_window] -> logits float16 [1, score_window, V].
    States of the first two: k_cache, v_cache float16 [layers, K, sizes.cache, D].
    """
    engine.tools()
    from coremltools.converters.mil.mil import Program

    made = Program()
    made.default_function_name = PREFILL
    made.export_as_multifunction = True
    parts = {(p.tensor.role, p.tensor.layer): pieces(p) for p in planned}
    for name, inputs in (
        (PREFILL, {INPUT_IDS: (1, sizes.chunk), POSITION: (1,), LENGTH: (1,)}),
        (DECODE, {INPUT_IDS: (1, 1), POSITION: (1,)}),
        (SCORE, {INPUT_IDS: (1, sizes.score_window)}),
    ):
        made.add_function(name, _function(spec, parts, sizes, inputs))
    return made


def _function(spec: ModelSpec, parts: Pieces, sizes: Sizes, shapes: Mapping[str, tuple[int, ...]]) -> Any:
    """A function of int32 inputs; it has the states where it is told of a position."""
    from coremltools.converters.mil.mil import Function, types

    mb = builder()
    given = {name: mb.placeholder(shape, types.int32) for name, shape in shapes.items()}
    if POSITION in shapes:
        shape = (spec.n_layers, spec.n_kv_heads, sizes.cache, spec.head_dim)
        given |= {name: mb.state_tensor_placeholder(shape, types.fp16) for name in STATES}
    with Function(given, opset_version=engine.tools().target.iOS18) as function:
        inputs = function.inputs
        model = _model(spec, parts, sizes, inputs)
        x = _embedded(model, inputs[INPUT_IDS])  # (1, Q, C)
        for layer in range(spec.n_layers):
            x = BLOCKS[spec.model_type](model, x, layer)
        if LENGTH in inputs:
            last = model.body.op("sub", "last", x=inputs[LENGTH], y=[1])
            x = _gathered(model.body, "last_hidden", x, last, axis=1)  # (1, 1, C)
        function.set_outputs([_logits(model, norm(model, x, "output_norm", None))])
    return function


def _model(spec: ModelSpec, parts: Pieces, sizes: Sizes, inputs: Mapping[str, Var]) -> Model:
    """Rotary tables and mask of a call, by its positions: a query sees the keys up to its own. What padding leaves in
    the caches lies behind all of them, and is overwritten before a token gets so far.
    """
    body, tokens = Body(), inputs[INPUT_IDS].shape[1]
    op, caches, group = body.op, _caches(body, sizes, inputs), spec.n_heads // spec.n_kv_heads
    positions = body.constant(Blob(tables.POSITIONS, "data", "INT32", (sizes.positions,)))
    with unknown(positions):
        start, attended = ([0], tokens) if caches is None else (caches.start, caches.length)
        queries = op("slice_by_size", "queries", x=positions, begin=start, size=[tokens])  # (Q,)
        keys = op("slice_by_size", "keys", x=positions, begin=[0], size=[attended])  # (S,)
    cos, sin = (_rotary(body, spec, sizes, name, queries) for name in (tables.ROPE_COS, tables.ROPE_SIN))  # (Q, D / 2)
    minus = op("mul", "minus_sin", x=sin, y=np.float16(-1))
    rows = op("tile", "group_queries", x=queries, reps=[group]) if group > 1 else queries  # (G·Q,)
    rows = op("expand_dims", "mask_rows", x=rows, axes=[0, 1, 3])  # (1, 1, G·Q, 1)
    later = op("cast", "mask_later", x=op("greater", "mask_unseen", x=keys, y=rows), dtype="fp16")
    return Model(
        spec=spec,
        pieces=parts,
        body=body,
        tokens=tokens,
        cos=op("concat", "cos", values=[cos, cos], axis=-1, interleave=False),
        sin=op("concat", "sin", values=[minus, sin], axis=-1, interleave=False),
        mask=op("mul", "mask", x=later, y=UNSEEN),  # (1, 1, G·Q, S)
        caches=caches,
    )


def _caches(body: Body, sizes: Sizes, inputs: Mapping[str, Var]) -> Caches | None:
    """The states of a function, each read once."""
    if POSITION not in inputs:
        return None
    states = {name: inputs[name] for name in STATES}
    return Caches(
        states=states,
        current={name: body.op("read_state", f"{name}_before", input=state) for name, state in states.items()},
        start=inputs[POSITION],
        end=body.op("add", "end", x=inputs[POSITION], y=[inputs[INPUT_IDS].shape[1]]),
        length=sizes.cache,
    )


def _rotary(body: Body, spec: ModelSpec, sizes: Sizes, name: str, positions: Var) -> Var:
    """float16 rows [Q, D / 2] of a rotary table: rounded here, so that the table is as exact as what reads it."""
    table = body.constant(Blob(name, "data", "F32", (sizes.positions, spec.head_dim // 2)))
    return body.op("cast", f"{name}_half", x=_gathered(body, f"{name}_rows", table, positions, axis=0), dtype="fp16")


def _embedded(model: Model, ids: Var) -> Var:
    """Rows [1, Q, C] of the embedding. Each piece gives the row of an id, or its nearest one; that of the last piece
    which begins at or before the id is taken.
    """
    op = model.body.op
    first, *others = model.pieces["embed", None]
    if not others:
        return _rows(model.body, first, ids, "embed")
    column = op("expand_dims", "embed_ids", x=ids, axes=[2])  # (1, Q, 1)
    at = op("minimum", "embed_0_at", x=ids, y=np.int32(first.count - 1))
    x = _rows(model.body, first, at, "embed_0")
    for i, piece in enumerate(others, 1):
        name = f"embed_{i}"
        at = op("sub", f"{name}_from", x=ids, y=np.int32(piece.start))
        at = op("minimum", f"{name}_to", x=at, y=np.int32(piece.count - 1))
        at = op("maximum", f"{name}_at", x=at, y=np.int32(0))
        here = op("greater_equal", f"{name}_here", x=column, y=np.int32(piece.start))
        x = op("select", f"{name}_or_before", cond=here, a=_rows(model.body, piece, at, name), b=x)
    return x


def _rows(body: Body, piece: Piece, ids: Var, name: str) -> Var:
    """Rows float16 [1, Q, C] of a piece."""
    if tables.is_linear(piece):
        return _gathered(body, name, body.weight(piece), ids, axis=0)
    codes, scales = (
        _gathered(body, f"{name}_{blob.kind}", body.constant(blob), ids, axis=0) for blob in piece.blobs
    )  # (1, Q, C), (1, Q, 1)
    return scaled(body, name, codes, scales)


def _logits(model: Model, x: Var) -> Var:
    """[1, Q, C] -> [1, Q, V]: by the head, or the embedding where it is tied, piece by piece."""
    parts = model.pieces["embed" if model.spec.tied else "head", None]
    if len(parts) == 1:
        return product(model, x, parts[0], LOGITS)
    found = [product(model, x, piece, f"{LOGITS}_{i}") for i, piece in enumerate(parts)]
    return model.body.op("concat", LOGITS, values=found, axis=-1, interleave=False)


def _gathered(body: Body, name: str, x: Var, indices: Var, axis: int) -> Var:
    return body.op("gather", name, x=x, indices=indices, axis=axis, batch_dims=0, validate_indices=False)
