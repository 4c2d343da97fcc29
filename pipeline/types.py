"""The nouns of the pipeline: frozen dataclasses without I/O. The JSON files are these (docs/json.md)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Span:
    """Rows [start, start + count) of a stored tensor of `shape`: all but the last dimension count as rows, and a vector
    is one row.
    """

    name: str
    shape: tuple[int, ...]
    start: int
    count: int


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model_type must have. `name` is that of transformers' parameter, `shape` is [out, in], [n], or
    [experts, out, in].

    `spans` are where its rows are stored, in their order: several where a checkpoint holds each expert alone, part of a
    larger tensor where it is fused; without any, it is stored under its own name. `dtype` is what a checkpoint stores
    it as, by safetensors' name: '' where none was looked at.
    """

    name: str
    role: str  # embed, attn_q, attn_q_bias, attn_q_norm, …, ffn_down, attn_norm, ffn_norm, output_norm, head
    layer: int | None
    shape: tuple[int, ...]
    dtype: str = ""
    spans: tuple[Span, ...] = ()

    @property
    def weights(self) -> int:
        return prod(self.shape)

    @property
    def is_offset_norm(self) -> bool:
        """Whether it is stored less 1 where the architecture stores norms so: all but the DeltaNet's own."""
        return self.role.endswith("_norm") and self.role != "delta_norm"

    @property
    def rows(self) -> int:
        """Of its last dimension; a vector is one."""
        return prod(self.shape[:-1])

    @property
    def stored(self) -> tuple[Span, ...]:
        """`spans`, or the whole tensor of its name."""
        return self.spans or (Span(self.name, self.shape, 0, self.rows),)

    def taken(self, runs: Iterable[tuple[int, int]]) -> tuple[Span, ...]:
        """The spans of runs of its rows, each given by its start and count."""
        stored = self.stored
        ends = [*accumulate(span.count for span in stored)]
        return tuple(span for start, count in runs for span in _taken(stored, ends, start, start + count))


def _taken(stored: Sequence[Span], ends: Sequence[int], start: int, stop: int) -> Iterator[Span]:
    """Of spans that end at rows `ends`, what holds rows [start, stop): a layer's experts are a thousand spans."""
    for i in range(bisect_right(ends, start), len(stored)):
        span, begin = stored[i], ends[i] - stored[i].count
        if begin >= stop:
            return
        low, high = max(start, begin), min(stop, ends[i])
        yield Span(span.name, span.shape, span.start + low - begin, high - low)


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in each layer: `used` of `count` per token, each of width `d_ff`; shared_d_ff: that of the
    expert which all tokens take, 0 where there is none.
    """

    count: int
    used: int
    d_ff: int
    shared_d_ff: int
    norm_topk: bool  # the used experts' probabilities are scaled to a sum of 1


@dataclass(frozen=True)
class DeltaNet:
    """Gated DeltaNet, the linear attention of hybrids: a causal convolution over `conv` tokens, and a state of k_dim x
    v_dim for each of v_heads, which share k_heads.
    """

    conv: int
    k_heads: int
    v_heads: int
    k_dim: int
    v_dim: int

    @property
    def keys(self) -> int:
        return self.k_heads * self.k_dim

    @property
    def values(self) -> int:
        return self.v_heads * self.v_dim

    @property
    def channels(self) -> int:
        """Of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def held_inputs(self) -> int:
        """Values that the convolution needs of the tokens before."""
        return (self.conv - 1) * self.channels

    @property
    def state(self) -> int:
        """Values of the state."""
        return self.v_heads * self.k_dim * self.v_dim


@dataclass(frozen=True)
class Dropped:
    """A part of a checkpoint that an artifact does not have: the tensors' stored names, and their weights."""

    part: str  # vision tower, MTP layers
    reason: str
    tensors: tuple[str, ...]
    weights: int


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base theta, and its scaling where there is one ("yarn" or "linear").

    dims: of each head, how many are rotated; None is all of them. sections: pairs of dims by the position they turn
    with (time, height, width), empty where there is one position; in a text all three are the same.
    """

    theta: float
    scaling: str | None = None
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    dims: int | None = None
    sections: tuple[int, ...] = ()


@dataclass(frozen=True)
class ModelSpec:
    """An architecture with its sizes and every tensor it needs, in file order.

    `dtype` is what config.json says the weights are of (bfloat16, float16, float32), None where it says nothing.
    `linear` are the layers that have a DeltaNet instead of attention. `mtp` are the tensors of layers that guess
    further tokens, beside `tensors`: numbered behind the others, and no part of a forward pass. `dropped` is what the
    checkpoint holds beside all these.
    """

    model_type: str
    n_layers: int
    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int  # from config, never d_model / n_heads where config says otherwise
    d_ff: int
    vocab_size: int
    context_length: int
    rope: Rope
    norm_eps: float
    tied: bool
    qkv_bias: bool
    qk_norm: bool
    tensors: tuple[TensorSpec, ...]
    dtype: str | None = None
    experts: Experts | None = None
    delta: DeltaNet | None = None
    linear: tuple[int, ...] = ()
    gated: bool = False  # attention's output is scaled by sigmoid of a gate, whose rows follow each head's in attn_q
    offset_norms: bool = False  # norms are stored less 1: TensorSpec.is_offset_norm
    mtp: tuple[TensorSpec, ...] = ()
    dropped: tuple[Dropped, ...] = ()

    @property
    def weights(self) -> int:
        return sum(tensor.weights for tensor in self.tensors)

    def dropped_mtp(self, reason: str) -> Dropped:
        """All MTP layers, as what a format drops."""
        names = sorted({span.name for tensor in self.mtp for span in tensor.stored})
        return Dropped("MTP layers", reason, tuple(names), sum(tensor.weights for tensor in self.mtp))

    @property
    def mtp_layers(self) -> int:
        return len({tensor.layer for tensor in self.mtp})

    @cached_property
    def memo(self) -> dict[str, Any]:
        """What formats work out of it, by their own keys: once for many schemes."""
        return {}


@dataclass(frozen=True)
class Encoding:
    """How a run of weights is stored: `block` weights in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int

    @property
    def bits_per_weight(self) -> float:
        return self.block_bytes * 8 / self.block

    def row_bytes(self, weights: int) -> int:
        return weights // self.block * self.block_bytes


@dataclass(frozen=True)
class Planned:
    """A tensor, the encoding it gets and why."""

    tensor: TensorSpec
    encoding: Encoding
    reason: str

    @property
    def bytes(self) -> int:
        return self.tensor.rows * self.encoding.row_bytes(self.tensor.shape[-1])


@dataclass(frozen=True)
class Options:
    """What an artifact is made with beside its scheme, of which each format refuses what it does not take.

    `types` are GGUF's: names of encodings by a pattern of tensor names, over those of the scheme. `sizes` are Core
    ML's, in tokens: chunk, max_context, score_window. `imatrix` is GGUF's: the file of an importance matrix.
    """

    types: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, int] = field(default_factory=dict)
    imatrix: Path | None = None


PLAIN = Options()
"""Of a scheme as it is."""


def mix_name(scheme: str, own: Mapping[str, object], imatrix: bool = False) -> str:
    """What a scheme with types or sizes of its own is called: 'q4_k_m+attn_v=q8_0,output=q6_k', 'int8+chunk=256'; and
    by an importance matrix 'q4_k_m+imatrix'.
    """
    text = ",".join(f"{key}={value}".lower() for key, value in own.items())
    return "+".join([scheme, *filter(None, [text, "imatrix" if imatrix else ""])])


@dataclass(frozen=True)
class SourceIdentity:
    """A checkpoint without machine paths: its name, a revision for a Hub id, sha256 by file name."""

    name: str
    revision: str | None
    files: dict[str, str]


@dataclass(frozen=True)
class EffectiveType:
    """How many tensors and weights got one encoding."""

    tensors: int
    weights: int


@dataclass(frozen=True)
class ExpertUse:
    """Of a layer's experts in an importance matrix: how many any token was routed to, and the fewest tokens that one of
    all experts has.
    """

    layer: int
    experts: int
    activated: int
    fewest: int


@dataclass(frozen=True)
class UsedImatrix:
    """The importance matrix that an artifact was made with, and how far it reaches.

    `datasets` are what it says it was computed from, over `chunks` of `chunk_size` tokens. `text_sha256` and
    `tokenizer_sha256` are None where others made it: whether its text is the scored one is not known. `matrices` counts
    the quantized ones that it has, `without` names those that it has not, which were quantized as without it. `experts`
    are the layers that have some.

    Of an artifact that others made all is None or empty but what its file says: that one was used, its `file`'s name,
    `datasets` and `chunks`.
    """

    sha256: str | None = None
    datasets: tuple[str, ...] = ()
    chunks: int | None = None
    chunk_size: int | None = None
    text_sha256: str | None = None
    tokenizer_sha256: str | None = None
    matrices: int | None = None
    without: tuple[str, ...] = ()
    experts: tuple[ExpertUse, ...] = ()
    file: str | None = None


@dataclass(frozen=True)
class Artifact:
    """Weights in a runtime's format, made by quantgate or, where `path` says from where, by others.

    `size_bytes` are the weight files, `folder_bytes` all `files`: what has to be shipped to run it. `bits_per_weight`
    is tensor data over weights. `tensors_sha256` is equal where two artifacts hold the same bytes in every tensor;
    `tensors` tells which differ where it is not: by the name each is stored under its type and the first 16 hex digits
    of the sha256 of its bytes. `source` is the checkpoint it was made from, or is compared with; None where it was
    compared with none. `dropped` are the checkpoint's parts that it does not have. `routers` are the encodings of what
    chooses among experts: empty where there are none, and of others' files.
    """

    format: str
    scheme: str  # of others' files: what the file says of itself
    files: dict[str, str]  # name -> sha256
    tensors_sha256: str
    size_bytes: int
    folder_bytes: int
    weights: int
    bits_per_weight: float
    effective_types: dict[str, EffectiveType]
    source: SourceIdentity | None
    tools: dict[str, str]
    platform: str
    tensors: dict[str, str]
    path: str | None = None
    dropped: tuple[Dropped, ...] = ()
    imatrix: UsedImatrix | None = None
    routers: tuple[str, ...] = ()


@dataclass(frozen=True)
class Windows:
    """Token ids cut for scoring.

    ids: int32 [windows, context]. The logits of positions [start, stop) predict ids [start + 1, stop + 1) and are
    scored. span_bytes: int64 [windows], UTF-8 bytes of the scored tokens of each window.
    """

    name: str
    text_sha256: str
    tokenizer_sha256: str
    ids: NDArray[np.int32]
    span_bytes: NDArray[np.int64]

    @property
    def context(self) -> int:
        return int(self.ids.shape[1])

    @property
    def start(self) -> int:
        return self.context // 2

    @property
    def stop(self) -> int:
        return self.context - 1

    @property
    def scored(self) -> int:
        """Scored tokens of one window."""
        return self.stop - self.start


@dataclass(frozen=True)
class Calibration:
    """The text that an importance matrix was computed from: ids int32 [windows, context] are the windows of it."""

    name: str
    text_sha256: str
    tokenizer_sha256: str
    ids: NDArray[np.int32]


@dataclass(frozen=True)
class Sums:
    """Of what one tensor is multiplied with: sums of squares [matrices, columns] over tokens int64 [matrices], where
    an expert has the tokens that were routed to it. float64 as they are computed, float32 as they are stored.
    """

    sums: NDArray[np.floating]
    tokens: NDArray[np.int64]

    @property
    def importance(self) -> NDArray[np.float32]:
        """Mean squares [matrices, columns], and 1 for an expert that no token was routed to: as llama-quantize hands
        them to llama_model_quantize.
        """
        counts = self.tokens.astype(np.float32)[:, None]
        return np.where(counts > 0, self.sums.astype(np.float32) / np.maximum(counts, 1), np.float32(1))


@dataclass(frozen=True)
class Scores:
    """Per scored token, float32 or bool [windows, scored]: target's log-probability (nats), KL to the reference
    (nats), same top-1.
    """

    logprob: NDArray[np.float32]
    kld: NDArray[np.float32]
    same_top: NDArray[np.bool_]


@dataclass(frozen=True)
class Engine:
    """What computed a score: part of the score's identity, since each of these changes digits."""

    name: str
    version: str
    instruction_set: str
    device: str  # cpu or gpu; of Core ML the units it may use: cpu, cpu+gpu, cpu+ne or all
    kv_type: str
    flash_attention: str  # on, off or auto
    threads: int | None  # None where it has no such setting
    batch: int | None = None  # tokens given at once, and computed at once
    micro_batch: int | None = None
    mmap: bool | None = None


@dataclass(frozen=True)
class Interval:
    """A figure with its 95 % interval over n independent units."""

    value: float
    low: float
    high: float
    n: int


@dataclass(frozen=True)
class Limits:
    """The gate's limits for a variant: nats per token, nats per token, share; against its baseline the growth of the
    loss, nats per token, and of the time of a prompt or a token, a share of the baseline's.
    """

    max_ln_ppl_ratio: float | None = None
    max_kld_mean: float | None = None
    min_same_top: float | None = None
    max_regression: float | None = None
    max_slowdown: float | None = None
