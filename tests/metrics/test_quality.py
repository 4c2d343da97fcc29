"""Scores against scipy and transformers, logits that cannot be true, and a reference that scores itself."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import scipy.special
import scipy.stats
from support import Shape, write_checkpoint

from pipeline.errors import MeasurementError
from pipeline.formats.gguf.run import GgufRuntime
from pipeline.formats.gguf.write import write
from pipeline.logits import Head, logprob_of, shifted_logits
from pipeline.metrics.quality import compare, score, summarize
from pipeline.source.checkpoint import Checkpoint
from pipeline.torch_forward import Reference, load_reference, write_reference
from pipeline.torch_runtime import of_checkpoint
from pipeline.types import Engine, Scores, Windows

VOCAB, WIDTH, CONTEXT, COUNT = 50, 8, 12, 3
ENGINE = Engine("fake", "1", "none", "cpu", "f16", "off", 1)


class Fake:
    """Yields chosen logits [windows, rows, vocab], `chunk` rows at a time; its windows are told by their first id."""

    def __init__(self, logits: np.ndarray, chunk: int = 100) -> None:
        self.logits, self.chunk, self.vocab_size, self.engine = logits, chunk, logits.shape[2], ENGINE
        self.starts: list[int] = []

    def score(self, ids: np.ndarray, start: int) -> Iterator[np.ndarray]:
        self.starts.append(start)
        rows = self.logits[ids[0]]
        buffer = np.empty((self.chunk, rows.shape[1]), np.float32)
        for at in range(0, len(rows), self.chunk):
            part = rows[at : at + self.chunk]
            buffer[: len(part)] = part  # a chunk is valid until the next one is asked for
            yield buffer[: len(part)]


def windows_of(count: int = COUNT, context: int = CONTEXT) -> Windows:
    ids = np.random.default_rng(5).integers(0, VOCAB, (count, context)).astype(np.int32)
    ids[:, 0] = np.arange(count)
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.arange(1, count + 1) * 7)


def reference_of(windows: Windows, scale: float = 3.0) -> Reference:
    """A reference that predicts the text well where `scale` is large."""
    rng = np.random.default_rng(6)
    head = Head(rng.standard_normal((VOCAB, WIDTH)).astype(np.float32))
    targets = windows.ids[:, windows.start + 1 :]
    hidden = head.weight[targets] * np.float32(scale)
    logprob = np.stack(
        [logprob_of(*shifted_logits(head.logits(states)), of) for states, of in zip(hidden, targets, strict=True)]
    )
    meta = {"text_sha256": windows.text_sha256, "context": windows.context, "windows": len(windows.ids), "engine": {}}
    return Reference(hidden, logprob, head, meta)


@pytest.fixture
def windows() -> Windows:
    return windows_of()


@pytest.fixture
def reference(windows: Windows) -> Reference:
    return reference_of(windows)


@pytest.fixture
def logits(windows: Windows, reference: Reference) -> np.ndarray:
    """The reference's, disturbed; one row more than is scored [windows, context - start, vocab]."""
    rng = np.random.default_rng(7)
    rows = [np.pad(reference.logits(window), ((0, 1), (0, 0))) for window in range(len(windows.ids))]
    return np.stack(rows) + rng.normal(0, 0.3, (COUNT, windows.scored + 1, VOCAB)).astype(np.float32)


# compare and shifted_logits


@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
@pytest.mark.parametrize("vocab", [3, 272, 5000])
def test_figures_are_those_of_scipy_in_float64(vocab: int, scale: float) -> None:
    rng = np.random.default_rng(vocab)
    expected = (rng.standard_normal((20, vocab)) * scale).astype(np.float32)
    logits = expected + rng.normal(0, 0.2 * scale, (20, vocab)).astype(np.float32)
    targets = rng.integers(0, vocab, 20)
    logprob, kld, same_top = compare(logits, expected, targets)
    log_q, log_p = (scipy.special.log_softmax(x.astype(np.float64), axis=1) for x in (logits, expected))
    assert logprob == pytest.approx(log_q[np.arange(20), targets], rel=1e-6, abs=1e-6)
    assert kld == pytest.approx(scipy.special.rel_entr(np.exp(log_p), np.exp(log_q)).sum(axis=1), rel=1e-5, abs=1e-6)
    assert same_top.tolist() == (log_q.argmax(axis=1) == log_p.argmax(axis=1)).tolist()
    assert (logprob.dtype, kld.dtype, same_top.dtype) == (np.float32, np.float32, np.bool_)


def test_the_divergence_is_from_the_reference_to_the_variant() -> None:
    p, q = np.log(np.array([[0.9, 0.1]], np.float32)), np.log(np.array([[0.5, 0.5]], np.float32))
    _, kld, _ = compare(q, p, np.array([0]))
    assert kld[0] == pytest.approx(0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5), abs=1e-6)


def test_equal_logits_diverge_by_exactly_nothing() -> None:
    logits = np.random.default_rng(0).normal(0, 5, (30, 700)).astype(np.float32)
    _, kld, same_top = compare(logits, logits.copy(), np.zeros(30, np.int64))
    assert kld.tolist() == [0.0] * 30
    assert same_top.all()


def test_log_softmax_is_that_of_scipy_and_leaves_its_input_alone() -> None:
    logits = np.random.default_rng(0).normal(0, 10, (8, 300)).astype(np.float32)
    logits[0] += 1e4  # would overflow without the shift
    before = logits.copy()
    shifted, log_sum = shifted_logits(logits)
    assert shifted - log_sum == pytest.approx(scipy.special.log_softmax(logits.astype(np.float64), axis=1), rel=1e-6)
    assert np.array_equal(logits, before)


# score


def test_scores_are_the_comparison_row_by_row(windows: Windows, reference: Reference, logits: np.ndarray) -> None:
    told: list[float] = []
    runtime = Fake(logits)
    found = score(runtime, windows, reference, told.append)
    assert told == [1] * COUNT
    assert runtime.starts == [CONTEXT // 2] * COUNT
    assert found.logprob.shape == (COUNT, CONTEXT - 1 - CONTEXT // 2)
    for window, ids in enumerate(windows.ids):
        expected = compare(logits[window, :-1], reference.logits(window), ids[CONTEXT // 2 + 1 :].astype(np.int64))
        assert np.array_equal(found.logprob[window], expected[0])
        assert np.array_equal(found.kld[window], expected[1])
        assert np.array_equal(found.same_top[window], expected[2])


def same(a: Scores, b: Scores) -> bool:
    return all(np.array_equal(x, y) for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b), strict=True))


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_chunks_do_not_change_scores(chunk: int, windows: Windows, reference: Reference, logits: np.ndarray) -> None:
    assert same(score(Fake(logits, chunk), windows, reference), score(Fake(logits), windows, reference))


def test_the_last_position_is_not_scored(windows: Windows, reference: Reference, logits: np.ndarray) -> None:
    changed = logits.copy()
    changed[:, -1] = np.random.default_rng(0).normal(0, 50, (COUNT, VOCAB))
    assert same(score(Fake(changed), windows, reference), score(Fake(logits), windows, reference))
    changed[:, -2] += np.arange(VOCAB)
    assert not same(score(Fake(changed), windows, reference), score(Fake(logits), windows, reference))


def test_pieces_of_rows_do_not_change_scores(
    windows: Windows, reference: Reference, logits: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = score(Fake(logits), windows, reference)
    monkeypatch.setattr("pipeline.metrics.quality.BLOCK_LOGITS", 2 * VOCAB)
    assert same(score(Fake(logits), windows, reference), whole)


# What no working artifact has (llama.cpp#28879, sglang#38363, T-MAC#70)


@pytest.mark.parametrize("rows", [0, 1, 4, 5])  # 5 are scored, but the last position's are to be given too
def test_too_few_rows_are_refused(rows: int, windows: Windows, reference: Reference, logits: np.ndarray) -> None:
    with pytest.raises(MeasurementError, match=rf"window 0: the runtime gave logits of {rows} positions, expected 6\."):
        score(Fake(logits[:, :rows]), windows, reference)


@pytest.mark.parametrize("chunk", [1, 100])
def test_too_many_rows_are_refused(chunk: int, windows: Windows, reference: Reference, logits: np.ndarray) -> None:
    """Positions from `start` on are context - start: more means that they may be of other positions."""
    more = np.concatenate([logits, logits[:, -1:]], axis=1)
    with pytest.raises(MeasurementError, match=r"window 0: the runtime gave logits of 7 positions, expected 6\."):
        score(Fake(more, chunk), windows, reference)


@pytest.mark.parametrize("vocab", [VOCAB - 1, VOCAB + 14])
def test_another_vocabulary_is_refused(vocab: int, windows: Windows, reference: Reference) -> None:
    other = np.random.default_rng(0).standard_normal((COUNT, windows.scored + 1, vocab)).astype(np.float32)
    with pytest.raises(MeasurementError, match=rf"logits for {vocab} tokens, the reference for {VOCAB}"):
        score(Fake(other), windows, reference)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("everywhere", [True, False])
def test_logits_that_are_not_finite_are_refused(
    everywhere: bool, value: float, windows: Windows, reference: Reference, logits: np.ndarray
) -> None:
    if everywhere:
        logits[:] = value
    else:
        logits[1, 2, 3] = value
    with pytest.raises(MeasurementError, match="not finite"):
        score(Fake(logits), windows, reference)


@pytest.mark.parametrize("level", [0.0, -3.5])
def test_uniform_logits_are_refused(level: float, windows: Windows, reference: Reference) -> None:
    flat = np.full((COUNT, windows.scored + 1, VOCAB), level, np.float32)
    with pytest.raises(MeasurementError, match=r"logits are uniform: 3\.9120 nats per token against ln 50 = 3\.9120"):
        score(Fake(flat), windows, reference)


def test_a_reference_that_predicts_nothing_may_be_matched(windows: Windows) -> None:
    reference = reference_of(windows, scale=0.0)
    flat = np.zeros((COUNT, windows.scored + 1, VOCAB), np.float32)
    found = score(Fake(flat), windows, reference)
    assert found.logprob == pytest.approx(-math.log(VOCAB), abs=1e-6)
    assert (found.kld == 0).all()


@pytest.mark.parametrize(("scale", "nats"), [(1.0, r"49\.64\d\d"), (5.0, r"246\.9\d{3}"), (1e4, r"49379\d\.\d{4}")])
def test_a_perplexity_above_the_vocabulary_is_refused(
    scale: float, nats: str, windows: Windows, reference: Reference, logits: np.ndarray
) -> None:
    """`scale` 1e4: so wrong that exp of the loss is no float."""
    with pytest.raises(
        MeasurementError,
        match=rf"perplexity is above the vocabulary size 50: {nats} nats per token against ln 50 = 3\.9120; "
        r"the reference has 0\.9135\.",
    ):
        score(Fake(-np.float32(scale) * logits), windows, reference)


def test_a_perplexity_above_the_vocabulary_is_allowed_where_the_reference_has_one_too(windows: Windows) -> None:
    reference = reference_of(windows, scale=-1.0)
    assert -reference.logprob.mean() > math.log(VOCAB)
    logits = np.stack([np.pad(reference.logits(w), ((0, 1), (0, 0))) for w in range(COUNT)])
    assert np.array_equal(score(Fake(logits), windows, reference).logprob, reference.logprob)


@pytest.mark.parametrize(("count", "context"), [(2, CONTEXT), (COUNT, 10), (4, CONTEXT)])
def test_a_reference_of_other_windows_is_refused(
    count: int, context: int, reference: Reference, logits: np.ndarray
) -> None:
    other = windows_of(count, context)
    with pytest.raises(MeasurementError, match=rf"holds 3 windows of 5 scored tokens, the corpus {count} of"):
        score(Fake(logits), other, reference)


# summarize


def test_figures_equal_hand_computations(windows: Windows, reference: Reference, logits: np.ndarray) -> None:
    scores = score(Fake(logits), windows, reference)
    found = summarize(scores, reference, windows, ENGINE)
    q, p = scores.logprob.astype(np.float64), reference.logprob.astype(np.float64)
    assert found["ppl"] == pytest.approx(math.exp(-q.mean()), rel=1e-12)
    assert found["reference_ppl"] == pytest.approx(math.exp(-p.mean()), rel=1e-12)
    assert found["ln_ppl_ratio"]["value"] == pytest.approx((p - q).mean(), abs=1e-9)
    assert math.log(found["ppl"] / found["reference_ppl"]) == pytest.approx(found["ln_ppl_ratio"]["value"], abs=1e-7)
    assert found["bits_per_byte"] == pytest.approx(-q.sum() / math.log(2) / (7 + 14 + 21), rel=1e-12)
    assert found["target_probability_rms"] == pytest.approx(math.sqrt(((np.exp(q) - np.exp(p)) ** 2).mean()), rel=1e-12)
    assert found["kld"]["mean"] == pytest.approx(scores.kld.astype(np.float64).mean(), rel=1e-9)
    assert found["kld"]["max"] == scores.kld.max()
    assert found["kld"]["median"] == pytest.approx(np.median(scores.kld), rel=1e-6)
    assert found["kld"]["p99"] == pytest.approx(np.quantile(scores.kld, 0.99), rel=1e-6)
    assert found["kld"]["p99_9"] == pytest.approx(np.quantile(scores.kld, 0.999), rel=1e-6)
    assert found["same_top"] == scores.same_top.mean()
    assert (found["windows"], found["scored_tokens"]) == (COUNT, COUNT * 5)
    assert found["engine"] == dataclasses.asdict(ENGINE)
    assert "identity" not in found  # that is the artifact's, not the reference's
    json.dumps(found, allow_nan=False)


def test_intervals_are_over_windows(windows: Windows, reference: Reference, logits: np.ndarray) -> None:
    scores = score(Fake(logits), windows, reference)
    found = summarize(scores, reference, windows, ENGINE)
    for values, interval in (
        ((reference.logprob - scores.logprob).mean(axis=1), found["ln_ppl_ratio"]),
        (scores.kld.mean(axis=1), found["kld_interval"]["mean"]),
        (scores.same_top.mean(axis=1), found["same_top_interval"]),
    ):
        half = scipy.stats.t.ppf(0.975, COUNT - 1) * values.std(ddof=1) / math.sqrt(COUNT)
        ends = (values.mean() - half, values.mean() + half)
        assert (interval["low"], interval["high"]) == pytest.approx(ends, rel=1e-4, abs=1e-6)
    low, high = found["ppl_interval"]["low"], found["ppl_interval"]["high"]
    assert low < found["ppl"] < high
    assert math.sqrt(low * high) == pytest.approx(found["ppl"], rel=1e-9)


def test_an_interval_ends_where_the_figure_does(windows: Windows, reference: Reference) -> None:
    """Student's t knows no bounds: it would reach beyond a share of 1, and below a divergence of 0."""
    shape = reference.logprob.shape
    same_top, kld = np.ones(shape, np.bool_), np.zeros(shape, np.float32)
    same_top[0, 0], kld[0] = False, 0.5
    found = summarize(Scores(reference.logprob, kld, same_top), reference, windows, ENGINE)
    shares, divergences = same_top.mean(axis=1), kld.mean(axis=1)
    t = scipy.stats.t.ppf(0.975, COUNT - 1) / math.sqrt(COUNT)
    assert shares.mean() + t * shares.std(ddof=1) > 1
    assert divergences.mean() - t * divergences.std(ddof=1) < 0
    assert found["same_top_interval"]["high"] == 1.0
    assert found["same_top_interval"]["low"] == pytest.approx(shares.mean() - t * shares.std(ddof=1), rel=1e-6)
    assert found["kld_interval"]["mean"]["low"] == 0.0
    assert found["kld_interval"]["mean"]["high"] == pytest.approx(
        divergences.mean() + t * divergences.std(ddof=1), rel=1e-6
    )
    never = summarize(Scores(reference.logprob, kld, ~same_top), reference, windows, ENGINE)
    assert never["same_top_interval"]["low"] == 0.0


def test_one_window_has_no_intervals_but_json() -> None:
    windows = windows_of(1)
    reference = reference_of(windows)
    logits = np.pad(reference.logits(0), ((0, 1), (0, 0)))[None]
    found = summarize(score(Fake(logits), windows, reference), reference, windows, ENGINE)
    assert found["ln_ppl_ratio"] == {"value": 0.0, "low": None, "high": None}
    for key in ("ppl_interval", "same_top_interval"):
        assert found[key] == {"low": None, "high": None}
    assert found["kld_interval"]["mean"] == {"low": None, "high": None}
    json.dumps(found, allow_nan=False)


def test_one_window_bounds_no_quantile_either() -> None:
    """A bootstrap of one window has no width, which is no certainty: it is the mean's infinite interval again."""
    windows = windows_of(1)
    reference = reference_of(windows)
    logits = np.pad(reference.logits(0), ((0, 1), (0, 0)))[None] + np.float32(0.1) * np.arange(VOCAB, dtype=np.float32)
    found = summarize(score(Fake(logits), windows, reference), reference, windows, ENGINE)
    assert [found["kld_interval"][name] for name in ("median", "p99")] == [{"low": None, "high": None}] * 2


# The reference


@pytest.fixture(scope="module", params=["qwen2", "qwen3"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    shape = Shape(request.param, tied=request.param == "qwen3", head_dim=32)
    return write_checkpoint(tmp_path_factory.mktemp("source") / request.param, shape)


@pytest.fixture(scope="module")
def text() -> Windows:
    ids = np.random.default_rng(0).integers(0, 272, (3, 40)).astype(np.int32)
    return Windows("sample", "ab" * 32, "cd" * 32, ids, np.full(3, 30))


@pytest.fixture(scope="module")
def stored(source: Path, text: Windows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stored") / "reference"
    with Checkpoint(source) as checkpoint:
        write_reference(checkpoint, checkpoint.identity(), text, folder)
    return folder


def test_the_reference_scored_against_itself_differs_by_nothing(source: Path, text: Windows, stored: Path) -> None:
    with Checkpoint(source) as checkpoint:
        runtime = of_checkpoint(checkpoint)
        reference = load_reference(stored, checkpoint)
        scores = score(runtime, text, reference)
        found = summarize(scores, reference, text, runtime.engine)
    assert (scores.kld == 0).all()
    assert found["kld"] == {"mean": 0.0, "median": 0.0, "p99": 0.0, "p99_9": 0.0, "max": 0.0}
    assert found["ln_ppl_ratio"] == {"value": 0.0, "low": 0.0, "high": 0.0}
    assert found["same_top"] == 1.0
    assert found["ppl"] == found["reference_ppl"]
    assert found["target_probability_rms"] == 0.0


@pytest.mark.parametrize("vocab", [272, 5000])
@pytest.mark.parametrize("rows", [1, 19, 20, 63, 64, 65, 100])
def test_the_head_gives_a_row_the_same_bits_among_however_many(rows: int, vocab: int) -> None:
    """BLAS takes another path for few rows: the reference stores one position less than a runtime gives."""
    rng = np.random.default_rng(0)
    head = Head(rng.standard_normal((vocab, 64)).astype(np.float32))
    hidden = rng.standard_normal((130, 64)).astype(np.float32)
    assert head.logits(hidden[:rows]).tobytes() == head.logits(hidden)[:rows].tobytes()
    np.testing.assert_allclose(head.logits(hidden[:rows]), hidden[:rows] @ head.weight.T, rtol=1e-4, atol=1e-4)


def test_the_reference_is_not_timed(source: Path) -> None:
    with Checkpoint(source) as checkpoint:
        runtime = of_checkpoint(checkpoint)
    assert runtime.engine.device == "cpu"
    assert not {"prefill", "decode"} & set(dir(runtime))


def test_reference_logprobs_are_those_of_transformers(source: Path, text: Windows, stored: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32).eval()
    ids = torch.from_numpy(text.ids.astype(np.int64))
    with torch.inference_mode():
        logprob = model(ids).logits.double().log_softmax(-1)  # (B, T, V)
    expected = logprob[:, 20:39].gather(2, ids[:, 21:, None])[..., 0].numpy()
    found = np.load(stored / "logprobs.npy")
    assert found.shape == (3, 19)
    assert found == pytest.approx(expected, abs=1e-5)


def test_what_is_stored_says_what_it_belongs_to(source: Path, text: Windows, stored: Path) -> None:
    meta = json.loads((stored / "meta.json").read_text())
    assert (meta["corpus"], meta["text_sha256"], meta["tokenizer_sha256"]) == ("sample", "ab" * 32, "cd" * 32)
    assert (meta["context"], meta["windows"]) == (40, 3)
    assert meta["source"]["name"] == source.name
    assert meta["source"]["files"].keys() == {"config.json", "model.safetensors", "tokenizer.json"}
    assert meta["engine"]["name"] == "transformers"
    assert str(source.parent) not in (stored / "meta.json").read_text()


def test_hidden_states_are_smaller_than_logits(source: Path, text: Windows, stored: Path) -> None:
    """float32 of the width against 16 bits of the vocabulary: 272 / 64 / 2 = 2.1 times here, 84 at Qwen2.5-0.5B."""
    hidden = np.load(stored / "hidden.npy", mmap_mode="r")
    assert (hidden.shape, hidden.dtype) == ((3, 19, 64), np.float32)
    logits_bytes = 3 * 19 * 272 * 2
    assert logits_bytes / ((stored / "hidden.npy").stat().st_size - 128) == pytest.approx(272 / 64 / 2, rel=1e-12)


def test_a_run_repeated_in_llama_cpp_scores_the_same(source: Path, text: Windows, stored: Path, tmp_path: Path) -> None:
    with Checkpoint(source) as checkpoint:
        write(checkpoint, "q8_0", tmp_path)
        reference = load_reference(stored, checkpoint)
    runs = []
    for _ in range(2):
        with closing(GgufRuntime(tmp_path / "model.gguf", context=40, threads=2)) as runtime:
            runs += [score(runtime, text, reference), score(runtime, text, reference)]
    assert all(same(run, runs[0]) for run in runs[1:])
    assert 0 < runs[0].kld.mean() < 0.05
    assert runs[0].same_top.mean() > 0.8


def test_a_checkpoint_that_predicts_nothing_is_no_reference(text: Windows, tmp_path: Path) -> None:
    def flatten(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.embed_tokens.weight"][:] = 0

    folder = write_checkpoint(tmp_path / "flat", change=flatten)
    with Checkpoint(folder) as checkpoint, pytest.raises(MeasurementError, match="all alike"):
        write_reference(checkpoint, checkpoint.identity(), text, tmp_path / "reference")
    assert not (tmp_path / "reference").exists()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_checkpoint_with_logits_that_are_not_finite_is_no_reference(
    value: float, text: Windows, tmp_path: Path
) -> None:
    def spoil(tensors: dict[str, np.ndarray]) -> None:
        tensors["model.norm.weight"][3] = value

    folder = write_checkpoint(tmp_path / "spoiled", change=spoil)
    with Checkpoint(folder) as checkpoint, pytest.raises(MeasurementError, match="not finite"):
        write_reference(checkpoint, checkpoint.identity(), text, tmp_path / "reference")
    assert {path.name for path in tmp_path.iterdir()} == {"spoiled"}
