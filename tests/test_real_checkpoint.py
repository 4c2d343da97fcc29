"""The one real model at hand, SmolLM2-135M as Qwen2, on WikiText-2: 16 windows of 512, flash attention off.

Expected perplexities were measured with llama-perplexity of the same llama.cpp with AVX-512, and with transformers in
float32 on what mx.dequantize gave; other instruction sets move the last digits. `make bench` measures the other schemes
too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch

from pipeline import artifact, corpus, torch_forward
from pipeline.evaluation import evaluate
from pipeline.formats.gguf import run as gguf_run
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.formats.mlx import run
from pipeline.logits import logprob_of, shifted_logits
from pipeline.metrics import parity
from pipeline.metrics.quality import compare, score, summarize
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_forward import Reference
from pipeline.torch_runtime import of_checkpoint
from pipeline.types import Windows

pytestmark = [pytest.mark.shared, pytest.mark.slow]

WINDOWS = 16
SETTINGS: dict[str, Any] = {"threads": 0, "flash_attention": False, "kv_type": "f16"}
KL_WINDOWS = 4
TEXT_SHA256 = "173c87a53759e0201f33e0ccf978e510c2042d7f2cb78229d9a50d79b9e7dd08"


@pytest.fixture(scope="module")
def windows(smollm: Path, wikitext: Path) -> Windows:
    with Checkpoint(smollm) as checkpoint:
        spec = spec_of(checkpoint.config)
    return corpus.cut("file", wikitext, Tokenizer(smollm), spec, 512, WINDOWS)


@pytest.fixture(scope="module")
def stored(smollm: Path, windows: Windows, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the reference."""
    folder = tmp_path_factory.mktemp("real") / "reference"
    with Checkpoint(smollm) as checkpoint:
        torch_forward.write_reference(checkpoint, checkpoint.identity(), windows, folder)
    return folder


@pytest.fixture(scope="module")
def reference(stored: Path, smollm: Path) -> Reference:
    with Checkpoint(smollm) as checkpoint:
        return torch_forward.load_reference(stored, checkpoint)


def test_the_corpus_is_wikitext_2(windows: Windows) -> None:
    assert windows.text_sha256 == TEXT_SHA256
    assert windows.ids.shape == (WINDOWS, 512)


def test_the_reference_perplexity(reference: Reference) -> None:
    assert math.exp(-reference.logprob.mean(dtype=np.float64)) == pytest.approx(29.2470, abs=0.005)


def test_the_stored_reference_is_small_and_gives_the_kl_of_full_logits(
    stored: Path, reference: Reference, smollm: Path, windows: Windows, tmp_path: Path
) -> None:
    """Against 16-bit logits of the same tokens; and against float32 logits by transformers' own head, whose KL is taken
    in float64. Over all 16 windows of q4_0 the means differed by 5e-9 nats, one token by 1.5e-5: two matrix products
    round logits differently, and where logits move by e, KL does by at most 2e E|ln(p/q) - KL| (its differential).
    """
    vocab = reference.head.weight.shape[0]
    size = sum(file.stat().st_size for file in stored.iterdir())
    assert WINDOWS * windows.scored * vocab * 2 > 40 * size
    made = artifact.convert(smollm, "gguf", "q4_0", tmp_path / "q4_0")
    runtime = gguf_run.open_runtime(tmp_path / "q4_0", made, context=512, flash_attention=False, kv_type="f16")
    with Checkpoint(smollm) as checkpoint:
        model = of_checkpoint(checkpoint)._model
    ours, theirs, moved = [], [], []
    for window, ids in enumerate(windows.ids[:KL_WINDOWS]):
        with torch.inference_mode():
            full = model(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, windows.start : -1]
        (found,) = runtime.score(ids, windows.start)
        targets, rebuilt = ids[windows.start + 1 :].astype(np.int64), reference.logits(window)
        ours.append(compare(found[: windows.scored], rebuilt, targets)[1])
        p, q = (torch.log_softmax(rows.double(), 1) for rows in (full, torch.from_numpy(found[: windows.scored])))
        kld = (p.exp() * (p - q)).sum(1, keepdim=True)
        spread = (p.exp() * (p - q - kld).abs()).sum(1)
        theirs.append(kld[:, 0].numpy())
        moved.append(2 * (torch.from_numpy(rebuilt) - full).abs().amax(1) * spread)
    runtime.close()
    apart = np.abs(np.subtract(ours, theirs, dtype=np.float64))
    print(
        f"{WINDOWS * windows.scored * vocab * 2 / size:.2f} times smaller; KL of {np.mean(theirs):.4f} nats differs by "
        f"{abs(np.mean(ours, dtype=np.float64) - np.mean(theirs)):.1e} in the mean, {apart.max():.1e} at most; "
        f"median {np.median(apart):.1e}, of the bound {(apart / (1e-6 + np.array(moved))).max():.2f}"
    )
    assert abs(np.mean(ours, dtype=np.float64) - np.mean(theirs)) < 1e-6
    assert (apart < 1e-6 + np.array(moved)).all()


@pytest.mark.parametrize(("scheme", "expected"), [("q8_0", 29.3973), ("q4_0", 36.4258)])
def test_perplexity_is_that_of_llama_perplexity(
    scheme: str, expected: float, smollm: Path, windows: Windows, reference: Reference, tmp_path: Path
) -> None:
    artifact.convert(smollm, "gguf", scheme, tmp_path / scheme)
    quality, scores = evaluate(tmp_path / scheme, artifact.load(tmp_path / scheme), windows, reference, SETTINGS)
    assert quality["ppl"] == pytest.approx(expected, rel=0.005)
    assert quality["scored_tokens"] == scores.logprob.size == WINDOWS * 255
    assert quality["reference_ppl"] == pytest.approx(29.2470, abs=0.005)
    assert quality["identity"]["ids_sha256"] == reference.meta["ids_sha256"]


@pytest.mark.parametrize(("scheme", "expected"), [("int4-g32", 38.9281), ("int4", 40.7727)])
def test_perplexity_is_that_of_mlx_weights_in_float32(
    scheme: str, expected: float, smollm: Path, windows: Windows, reference: Reference, tmp_path: Path
) -> None:
    """Without the check by MLX itself, which takes minutes on two windows of 512: the next test makes it on shorter."""
    made = artifact.convert(smollm, "mlx", scheme, tmp_path / scheme)
    runtime = run.open_runtime(tmp_path / scheme, made, context=512)
    quality = summarize(score(runtime, windows, reference), reference, windows, runtime.engine)
    runtime.close()
    assert quality["ppl"] == pytest.approx(expected, rel=0.0005)
    assert quality["scored_tokens"] == WINDOWS * 255


def test_mlx_itself_computes_what_torch_scored(smollm: Path, windows: Windows, tmp_path: Path) -> None:
    few = replace(windows, ids=windows.ids[:2, :64], span_bytes=windows.span_bytes[:2])
    made = artifact.convert(smollm, "mlx", "int4", tmp_path / "int4")
    runtime = run.open_runtime(tmp_path / "int4", made, context=64)
    logits = [next(runtime.score(ids, few.start))[: few.scored] for ids in few.ids]
    targets = few.ids[:, few.start + 1 :]
    logprob = np.stack(
        [logprob_of(*shifted_logits(rows), wanted) for rows, wanted in zip(logits, targets, strict=True)]
    )
    found = parity.check(runtime.native, few, logprob, runtime.engine.name)
    runtime.close()
    assert 0 < found["max_difference"] < parity.LIMIT / 3


def test_a_file_of_llama_quantize_scores_as_ours(
    smollm: Path, windows: Windows, reference: Reference, tmp_path: Path
) -> None:
    """Two of the windows: that the scores are the same shows in each token."""
    few = replace(windows, ids=windows.ids[:2], span_bytes=windows.span_bytes[:2])
    with Checkpoint(smollm) as checkpoint:
        meta = reference.meta | torch_forward.reference_meta(checkpoint.identity(), few)
    kept = replace(reference, hidden=reference.hidden[:2], logprob=reference.logprob[:2], meta=meta)
    for scheme in ("bf16", "q4_k_m"):
        artifact.convert(smollm, "gguf", scheme, tmp_path / scheme)
    theirs = oracle.quantize(tmp_path / "bf16" / "model.gguf", SCHEMES["q4_k_m"].ftype, tmp_path / "theirs.gguf")
    with Checkpoint(smollm) as checkpoint:
        given, ours = artifact.load(theirs, checkpoint), artifact.load(tmp_path / "q4_k_m")
    found, scores = evaluate(theirs, given, few, kept, SETTINGS)
    expected, ours_scores = evaluate(tmp_path / "q4_k_m", ours, few, kept, SETTINGS)
    assert found.pop("artifact") != expected.pop("artifact")
    assert found == expected
    assert scores.kld.tobytes() == ours_scores.kld.tobytes()
    assert given.tensors_sha256 == ours.tensors_sha256
