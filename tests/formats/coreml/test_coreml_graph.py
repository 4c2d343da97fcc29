"""What a package computes, by the executor: transformers' logits, whichever function they are asked of."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import Shape, stored, write_checkpoint

from pipeline.formats.coreml import codec, engine, graph, layers, names
from pipeline.formats.coreml.executor import Executor
from pipeline.formats.coreml.mil import Body, builder
from pipeline.formats.coreml.package import PACKAGE, Constant, Package
from pipeline.formats.coreml.schemes import SCHEMES
from pipeline.formats.coreml.write import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Options

TOLERANCE: dict[Any, float] = {"fp32": 1e-4, "declared": 1e-2}
SIZES = {"chunk": 64, "max_context": 200, "score_window": 150}

QWEN2 = Shape("qwen2", heads=4, kv_heads=2)
QWEN3 = Shape("qwen3", heads=2, kv_heads=2, head_dim=32)
MODELS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "qwen2": (QWEN2, {}),
    "qwen2-untied-one-kv-head": (Shape("qwen2", heads=4, kv_heads=1, tied=False), {"rope_theta": 5000.0}),
    "qwen2-linear": (QWEN2, {"rope_scaling": {"rope_type": "linear", "factor": 2.5}}),
    "qwen3": (QWEN3, {}),
    "qwen3-untied": (Shape("qwen3", heads=8, kv_heads=2, head_dim=16, tied=False), {"rope_theta": 10_000.0}),
    "qwen3-yarn": (
        QWEN3,
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """What is run is small: torch's threads would wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(3).integers(0, 272, 200).astype(np.int32)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """A checkpoint of float16 weights by its name, and its fp16 package; each made once."""
    known: dict[str, tuple[Path, Path]] = {}

    def make(name: str) -> tuple[Path, Path]:
        if name not in known:
            shape, config = MODELS[name]
            source = write_checkpoint(tmp_path_factory.mktemp("coreml") / "source", shape, "F16", config=config)
            known[name] = (source, converted(source, "fp16", source.parent / "out"))
        return known[name]

    return make


def converted(source: Path, scheme: str, out: Path, sizes: dict[str, int] | None = None) -> Path:
    out.mkdir()
    with Checkpoint(source) as checkpoint:
        write(checkpoint, scheme, out, options=Options(sizes=sizes or SIZES))
    return out


def expected(source: Path, ids: np.ndarray, change: Callable[[Any], None] = lambda model: None) -> np.ndarray:
    """Logits of transformers in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    with torch.inference_mode():
        change(model)
        found: np.ndarray = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0].numpy()
    return found


@cache
def executor(out: Path, function: str, rounding: Any) -> Executor:
    return Executor(package(out), function, rounding)


@cache
def package(out: Path) -> Package:
    return Package(out / PACKAGE)


def score(out: Path, ids: np.ndarray, rounding: Any) -> np.ndarray:
    run = executor(out, graph.SCORE, rounding)
    (tensor,) = run.function.inputs
    window = np.zeros(tensor.shape, np.int32)
    window[0, : len(ids)] = ids
    return run({graph.INPUT_IDS: window})[graph.LOGITS][0, : len(ids)]


class Session:
    """A conversation with a package: `read` takes a turn in chunks, `step` one token; both give the last's logits."""

    def __init__(self, out: Path, rounding: Any, padding: int = 0) -> None:
        self.prefill, self.decode = (executor(out, name, rounding) for name in (graph.PREFILL, graph.DECODE))
        self.state = self.prefill.new_state()
        self.padding = padding
        self.position = 0

    def read(self, ids: np.ndarray) -> np.ndarray:
        for at in range(0, len(ids), SIZES["chunk"]):
            part = ids[at : at + SIZES["chunk"]]
            chunk = np.full((1, SIZES["chunk"]), self.padding, np.int32)
            chunk[0, : len(part)] = part
            given = {graph.INPUT_IDS: chunk, graph.POSITION: self.here(), graph.LENGTH: np.array([len(part)], np.int32)}
            logits = self.prefill(given, self.state)[graph.LOGITS]
            self.position += len(part)
        return logits[0, 0]

    def step(self, token: int) -> np.ndarray:
        given = {graph.INPUT_IDS: np.array([[token]], np.int32), graph.POSITION: self.here()}
        logits: np.ndarray = self.decode(given, self.state)[graph.LOGITS][0, 0]
        self.position += 1
        return logits

    def here(self) -> np.ndarray:
        return np.array([self.position], np.int32)


def walked(session: Session, ids: np.ndarray, *turns: tuple[int, int]) -> Iterator[tuple[int, np.ndarray]]:
    """Positions and their logits, of turns of so many tokens read and then decoded."""
    for length, decoded in turns:
        at = session.position
        logits = session.read(ids[at : at + length])
        yield session.position - 1, logits
        for _ in range(decoded):
            yield session.position, session.step(int(ids[session.position]))


# Logits are transformers'


@pytest.mark.parametrize("name", MODELS)
def test_score_is_transformers(name: str, made: Any, ids: np.ndarray) -> None:
    source, out = made(name)
    wanted = expected(source, ids[:128])
    assert wanted.std() > 0.5
    for rounding, tolerance in TOLERANCE.items():
        found = score(out, ids[:128], rounding)
        assert found.shape == wanted.shape == (128, 272)
        assert np.abs(found - wanted).max() < tolerance, rounding


def dequantized(scheme: str) -> Callable[[Any], None]:
    """Puts into transformers' model the weights that the codec decodes to."""

    def change(model: Any) -> None:
        import torch

        packing = SCHEMES[scheme].packing
        assert packing is not None
        for _, parameter in model.named_parameters():  # a tied head once
            if parameter.ndim == 2:
                parts = codec.quantize(parameter.numpy(), packing)
                parameter.copy_(torch.from_numpy(codec.dequantize(*parts)))

    return change


PACKED = [*((scheme, True) for scheme in SCHEMES if scheme != "fp16"), ("int16", False), ("int8", False)]


@pytest.mark.parametrize(("scheme", "tied"), PACKED)
def test_packed_weights_are_those_of_the_codec(
    scheme: str, tied: bool, ids: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Embedding and head in one piece, and in three, of 96, 96 and 80 rows."""
    shape = Shape("qwen2", 1, hidden=64, ff=64, heads=2, kv_heads=1, tied=tied)
    source = write_checkpoint(tmp_path / "source", shape, "F16")
    ids = np.concatenate([ids[:100], [0, 95, 96, 191, 192, 271]]).astype(np.int32)
    wanted = expected(source, ids, dequantized(scheme))
    one = converted(source, scheme, tmp_path / "one")
    assert np.abs(score(one, ids, "fp32") - wanted).max() < TOLERANCE["fp32"]
    check_products(source, scheme, one)
    monkeypatch.setattr(names, "MOST_ROWS", 100)
    three = converted(source, scheme, tmp_path / "three")
    rows = sorted(c.shape[0] for c in codes_of(scheme, three) if c.shape[0] in (80, 96))
    assert rows == [80, 96, 96] if tied else [80, 80, 96, 96, 96, 96]
    assert np.abs(score(three, ids, "fp32") - score(one, ids, "fp32")).max() < 1e-5


def codes_of(scheme: str, out: Path, function: str = graph.DECODE) -> list[Constant]:
    """Matrices of codes that a function holds as its scheme has them."""
    packing = SCHEMES[scheme].packing
    assert packing is not None
    found = package(out).constants(function)
    return [c for c in found if c.file is not None and len(c.shape) == 2 and c.dtype == packing.data]


def check_products(source: Path, scheme: str, out: Path) -> None:
    """Each function has each matrix of the checkpoint as codes, and multiplies by `matmul` what `linear` does not take:
    nothing was computed from placeholders.
    """
    with Checkpoint(source) as checkpoint:
        shapes = [tensor.shape for tensor in spec_of(checkpoint.config).tensors if len(tensor.shape) == 2]
    for function in (graph.PREFILL, graph.DECODE, graph.SCORE):
        assert sorted(c.shape for c in codes_of(scheme, out, function)) == sorted(shapes)
        types = [op.type for op in package(out).function(function).operations]
        products = 8  # seven of the layer, and the head
        assert [types.count(kind) for kind in ("linear", "matmul")] == (
            [0, products] if scheme == "int16" else [products, 0]
        )


# A prompt in chunks, then token by token


TURNS = {
    "1": [(1, 3)],
    "63": [(63, 2)],
    "64": [(64, 1)],
    "65": [(65, 2)],
    "130": [(130, 20)],
    "three turns": [(70, 5), (3, 1), (64, 6)],
}


@pytest.mark.parametrize(
    ("name", "turns"),
    [
        *(("qwen2", turns) for turns in TURNS),
        *((name, "three turns") for name in ("qwen2-untied-one-kv-head", "qwen3-untied", "qwen3-yarn")),
    ],
)
def test_prefill_and_decode_are_score(name: str, turns: str, made: Any, ids: np.ndarray) -> None:
    _, out = made(name)
    for rounding, tolerance in TOLERANCE.items():
        wanted = score(out, ids[:150], rounding)
        found = [*walked(Session(out, rounding), ids, *TURNS[turns])]
        assert len(found) == sum(1 + decoded for _, decoded in TURNS[turns])
        assert max(np.abs(logits - wanted[at]).max() for at, logits in found) < tolerance


def test_padding_changes_nothing(made: Any, ids: np.ndarray) -> None:
    _, out = made("qwen2")
    turns = [(70, 5), (3, 2)]
    one, other = (walked(Session(out, "declared", padding), ids, *turns) for padding in (0, 271))
    for (at, logits), (same, again) in zip(one, other, strict=True):
        assert at == same
        np.testing.assert_array_equal(logits, again)


@pytest.mark.parametrize("read", [199, 137, 128])  # the last chunk begins at 192, 128 and 64
def test_a_context_is_used_to_its_last_token(read: int, made: Any, ids: np.ndarray) -> None:
    source, out = made("qwen3")
    wanted = expected(source, ids)
    session = Session(out, "fp32")
    for at, logits in walked(session, ids, (read, 199 - read), (1, 0)):  # the last token alone in a chunk
        assert np.abs(logits - wanted[at]).max() < TOLERANCE["fp32"]
    assert session.position == SIZES["max_context"] == len(ids)


# The state


def merged(program: Any) -> Any:
    """What a default pass of coremltools makes of a program."""
    engine.tools()
    from coremltools.converters.mil.mil.passes.pass_registry import PASS_REGISTRY

    PASS_REGISTRY["common::remove_redundant_ops"](program)
    return program


def read_anew(model: Any, caches: Any, *args: Any) -> Any:
    """`_cached` as it must not be: each layer reads the state anew."""
    for name in layers.STATES:
        caches.current[name] = model.body.op(
            "read_state", f"{name}_{len(model.body.constants)}", input=caches.states[name]
        )
    return CACHED(model, caches, *args)


CACHED = layers._cached


@pytest.mark.parametrize(("is_chained", "error"), [(True, (0, 1e-4)), (False, (0.1, np.inf))])
def test_a_state_survives_a_pass_that_merges_reads(
    is_chained: bool,
    error: tuple[float, float],
    made: Any,
    ids: np.ndarray,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source, _ = made("qwen2")
    build = graph.program
    monkeypatch.setattr(graph, "program", lambda *args: merged(build(*args)))
    if not is_chained:
        monkeypatch.setattr(layers, "_cached", read_anew)
    out = converted(source, "fp16", tmp_path / "out")
    wanted = score(out, ids[:75], "fp32")
    worst = max(np.abs(logits - wanted[at]).max() for at, logits in walked(Session(out, "fp32"), ids, (70, 5)))
    assert error[0] <= worst < error[1]


def test_a_state_is_read_once_and_then_written_layer_by_layer(made: Any) -> None:
    _, out = made("qwen2")
    for function, count in ((graph.PREFILL, 2), (graph.DECODE, 2), (graph.SCORE, 0)):
        states = [op for op in package(out).function(function).operations if op.type.endswith("_state")]
        for name in layers.STATES:
            own = [op.type for op in states if op.inputs["input"] == (name,)]
            assert own == (["read_state"] + ["write_state", "read_state"] * count if count else [])


# Numbers


def test_norm_holds_what_overflows_float16(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """CASES 10: activations and weights of 9e3, whose squares float16 does not hold. By a checkpoint of one token's
    embedding, and a layer whose attention and feed-forward add nothing: the head then shows the last norm.
    """
    shape = Shape("qwen2", 1, hidden=64, ff=64, heads=4, kv_heads=2, vocab=272, tied=False)
    rng = np.random.default_rng(5)

    def change(tensors: dict[str, np.ndarray]) -> None:
        embedding = (9e3 * rng.choice([-1, 1], (272, 64)) * rng.uniform(0.5, 1, (272, 64))).astype(np.float16)
        tensors["model.embed_tokens.weight"] = embedding.astype(np.float32)
        tensors["model.norm.weight"] = np.full(64, 9e3, np.float32)
        for part in ("self_attn.o_proj", "mlp.down_proj"):
            tensors[f"model.layers.0.{part}.weight"][:] = 0
        tensors["lm_head.weight"][:] = 0
        tensors["lm_head.weight"][:64] = np.eye(64)

    source = write_checkpoint(tmp_path / "source", shape, "F32", change=change)
    out = converted(source, "fp16", tmp_path / "out")
    ids = np.arange(150, dtype=np.int32)
    with Checkpoint(source) as checkpoint:
        x = checkpoint.tensor(stored(checkpoint, "model.embed_tokens.weight"))[ids].astype(np.float64)
    wanted = 9e3 * x / np.sqrt(np.square(x).mean(-1, keepdims=True) + 1e-6)
    found = score(out, ids, "declared")[:, :64]
    assert np.isfinite(found).all()
    assert np.abs(found / wanted - 1).max() < 1e-3


def test_a_tied_head_is_one_weight_of_a_function(made: Any) -> None:
    _, out = made("qwen2")
    embeddings = [c for c in package(out).constants(graph.DECODE) if c.shape == (272, 64)]
    assert [c.name for c in embeddings] == ["model_embed_tokens_weight"]


def test_literals_are_shared_and_floats_of_python_refused() -> None:
    engine.tools()
    from coremltools.converters.mil.mil import Function, types

    mb = builder()
    with Function({"x": mb.placeholder((2,), types.fp16)}, opset_version=engine.tools().target.iOS18) as function:
        body, x = Body(), function.inputs["x"]
        y = body.op("mul", "a", x=x, y=np.float16(2))
        y = body.op("add", "b", x=y, y=np.float16(2))
        y = body.op("cast", "c", x=y, dtype="fp32")
        y = body.op("mul", "d", x=y, y=np.float32(2))
        function.set_outputs([y])
        with pytest.raises(TypeError, match="float16 or float32"):
            body.op("mul", "e", x=x, y=2.0)
    consts = [op.outputs[0] for op in function.operations if op.op_type == "const"]
    assert [(var.name, var.val) for var in consts] == [("c0", 2), ("c1", "fp32"), ("c2", 2)]
