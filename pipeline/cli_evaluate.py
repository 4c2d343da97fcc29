"""`quantgate evaluate`: what an artifact loses against its checkpoint."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import click

from pipeline import paths
from pipeline.cli_options import FOLDER, emit, json_option, revision_option
from pipeline.console import GATE_FAILED, Command
from pipeline.types import Limits


def _finite(context: click.Context, option: click.Parameter, given: float | None) -> float | None:
    """NaN and infinity would settle nothing."""
    if given is not None and not math.isfinite(given):
        raise click.BadParameter(f"{given} is not a finite number.")
    return given


def _share(context: click.Context, option: click.Parameter, given: float | None) -> float | None:
    if given is not None and not 0 <= given <= 1:
        raise click.BadParameter(f"{given:g} is not a share from 0 to 1.")
    return given


@click.command(cls=Command)
@click.argument("artifact_folder", metavar="ARTIFACT", type=FOLDER)
@click.option("--checkpoint", required=True, help="The folder or Hub id it was made from: the reference.")
@revision_option
@click.option("--corpus", default="sample", show_default=True, help="sample, wikitext-2, or the path of a UTF-8 text.")
@click.option("--windows", type=click.IntRange(1), help="Windows to score, or to draw from.  [default: all]")
@click.option("--context", type=click.IntRange(4), default=512, show_default=True, help="Tokens per window.")
@click.option("--threads", type=click.IntRange(0), default=0, help="[default: one per physical core]")
@click.option("--flash-attention", is_flag=True, help="Another engine setting, other digits.")
@click.option("--kv-type", default="f16", show_default=True, help="Type of the KV cache.")
@click.option("--layer-by-layer", is_flag=True, help="Run the reference so even where it fits memory: same scores.")
@click.option("--until-decided", is_flag=True, help="Stop when the limits are settled; exit by the verdict.")
@click.option("--max-ln-ppl-ratio", type=float, callback=_finite, metavar="NATS", help="A limit, per token.")
@click.option("--max-kld-mean", type=float, callback=_finite, metavar="NATS", help="A limit, per token.")
@click.option("--min-same-top", type=float, callback=_share, metavar="SHARE", help="A limit, 0 to 1.")
@json_option
def evaluate(
    artifact_folder: Path,
    checkpoint: str,
    revision: str | None,
    corpus: str,
    windows: int | None,
    context: int,
    threads: int,
    flash_attention: bool,
    kv_type: str,
    layer_by_layer: bool,
    until_decided: bool,
    max_ln_ppl_ratio: float | None,
    max_kld_mean: float | None,
    min_same_top: float | None,
    json_file: str | None,
) -> None:
    """Perplexity, KL divergence and same-top-1 of ARTIFACT against its checkpoint in float32.

    ARTIFACT is a folder that `quantgate convert` made, or what others made: a GGUF file, or an MLX folder.

    A checkpoint whose float32 weights take more than half of the machine's memory is run layer by layer: each is read
    once and run over all windows. The scores are the same; the reply to the chat is not compared.

    With --until-decided, windows of the text are scored in a shuffled order, always the same, until every limit is
    surely kept or one surely broken: exit code 0 or 1. The limits are those given, or else those that params.yaml in
    this folder has for a variant named as ARTIFACT's folder, over its default. Undecided at the end of the text is
    exit code 1, or 0 where the limits are params.yaml's and its gate.inconclusive is warn.
    """
    from pipeline import console_tables
    from pipeline.checks.verdicts import PASS
    from pipeline.evaluation import Request, evaluate_place
    from pipeline.until_decided import evaluate_until_decided

    settings = {"threads": threads, "flash_attention": flash_attention, "kv_type": kv_type}
    request = Request(artifact_folder, checkpoint, corpus, windows, context, settings, revision, layer_by_layer)
    given = Limits(max_ln_ppl_ratio, max_kld_mean, min_same_top)
    if not until_decided:
        if given != Limits():
            raise click.UsageError(
                "A limit needs --until-decided. A full run is judged by `quantgate gate`, by the limits in params.yaml."
            )
        quality = evaluate_place(request)
        emit(json_file, quality, lambda: console_tables.quality(artifact_folder.name, quality))
        return
    limits, passing = (given, {PASS}) if given != Limits() else _project_limits(artifact_folder.resolve().name)
    quality = evaluate_until_decided(request, limits)
    emit(json_file, quality, lambda: console_tables.sequential(artifact_folder.name, quality))
    if quality["sequential"]["verdict"] not in passing:
        sys.exit(GATE_FAILED)


def _project_limits(name: str) -> tuple[Limits, set[str]]:
    """The limits of a variant in params.yaml, and the verdicts that pass there."""
    from pipeline import params
    from pipeline.checks.verdicts import INCONCLUSIVE, PASS

    if paths.PARAMS.exists():
        gate = params.load(paths.PARAMS).gate
        all_limits = gate.limits_of(name)
        limits = Limits(all_limits.max_ln_ppl_ratio, all_limits.max_kld_mean, all_limits.min_same_top)
        if limits != Limits():
            return limits, {PASS} | ({INCONCLUSIVE} if gate.inconclusive == "warn" else set())
    raise click.UsageError(
        f"--until-decided needs a limit: give --max-ln-ppl-ratio, --max-kld-mean or --min-same-top, or run it in the "
        f"folder of a params.yaml whose gate.limits has one for {name} or default."
    )
