"""The nouns of the pipeline: frozen dataclasses without I/O. The JSON files are these (docs/json.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

Messages = Sequence[Mapping[str, str]]
"""A conversation: role and content of each message."""

Placement = Mapping[str, Mapping[str, float]]
"""Of prefill and decode, by name: the share of operations that each compute unit takes."""


@dataclass(frozen=True)
class TensorSpec:
    """A tensor that a model_type must have. `name` is Hugging Face's, `shape` is [out, in] or [n].

    `dtype` is what a checkpoint stores it as, by safetensors' name: '' where none was looked at.
    """

    name: str
    role: str  # embed, attn_q, attn_q_bias, attn_q_norm, …, ffn_down, attn_norm, ffn_norm, output_norm, head
    layer: int | None
    shape: tuple[int, ...]
    dtype: str = ""

    @property
    def weights(self) -> int:
        return int(np.prod(self.shape))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: base theta, and its scaling where there is one ("yarn" or "linear")."""

    theta: float
    scaling: str | None = None
    factor: float = 1.0
    original_context: int | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None


@dataclass(frozen=True)
class ModelSpec:
    """An architecture with its sizes and every tensor it needs, in file order.

    `dtype` is what config.json says the weights are of (bfloat16, float16, float32), None where it says nothing.
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

    @property
    def weights(self) -> int:
        return sum(tensor.weights for tensor in self.tensors)


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
        *rows, columns = self.tensor.shape
        return int(np.prod(rows, initial=1)) * self.encoding.row_bytes(columns)


def mix_name(scheme: str, own: Mapping[str, object]) -> str:
    """What a scheme with types or sizes of its own is called: 'q4_k_m+attn_v=q8_0,output=q6_k', 'int8+chunk=256'."""
    text = ",".join(f"{key}={value}".lower() for key, value in own.items())
    return f"{scheme}+{text}" if text else scheme


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
class Artifact:
    """Weights in a runtime's format, made by quantgate or, where `path` says from where, by others.

    `size_bytes` are the weight files, `folder_bytes` all `files`: what has to be shipped to run it. `bits_per_weight`
    is tensor data over weights. `tensors_sha256` is equal where two artifacts hold the same bytes in every tensor;
    `tensors` tells which differ where it is not: by the name each is stored under its type and the first 16 hex digits
    of the sha256 of its bytes. `source` is the checkpoint it was made from, or is compared with; None where it was
    compared with none.
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


@dataclass(frozen=True)
class Prompt:
    """A conversation as a chat template renders it, and its ids."""

    text: str
    ids: tuple[int, ...]


@dataclass(frozen=True)
class Reply:
    """What a model says to a prompt when each token is the most likely one.

    ids: the tokens, the one that ended the reply last. stopped: the text of that one, None where the limit came first.
    text: of the others.
    """

    ids: tuple[int, ...]
    text: str
    stopped: str | None


REFERENCE_EXECUTOR = "reference executor"
"""As the name of an Engine: what runs a Core ML package where Core ML does not."""


class Scorer(Protocol):
    """Whatever gives logits."""

    @property
    def engine(self) -> Engine: ...

    @property
    def vocab_size(self) -> int: ...

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """Logits [rows, vocab] float32 of positions `start` to the last of `ids` [context], in chunks of rows.

        A chunk is valid until the next one is asked for.
        """
        ...


class Runtime(Scorer, Protocol):
    """A loaded artifact, which can be timed and spoken to as well. `kv_bytes`: its KV cache, for its whole context.

    `native` is the artifact's own runtime where `score` is another one, for a check that both agree; else None. Its
    `score` may be called from several threads at once. `prefill` and `decode` are always of the artifact's own runtime.
    """

    @property
    def kv_bytes(self) -> int: ...

    @property
    def native(self) -> Scorer | None: ...

    def prefill(self, ids: NDArray[np.int32]) -> float:
        """Seconds of wall clock to take in `ids` into an empty cache, up to the logits of the last."""
        ...

    def decode(self, n: int) -> float:
        """Seconds of wall clock for n tokens, one at a time, behind what the cache holds."""
        ...

    def peak_memory(self) -> tuple[int, str] | None:
        """Bytes that the engine says it held at most, and the function that says it; None where what the process had
        resident tells.
        """
        ...

    def placement(self) -> Placement | None:
        """Which compute units the engine means to use; None where it has no choice of its own."""
        ...

    def prompt(self, messages: Messages) -> Prompt | None:
        """The prompt that asks for a reply to `messages`, by the artifact's own chat template and tokenizer; None where
        it has no template.
        """
        ...

    def reply(self, ids: Sequence[int], limit: int) -> Reply:
        """The reply to a prompt of `ids`: at most `limit` tokens, fewer where the artifact's own stop token comes."""
        ...

    def close(self) -> None: ...
