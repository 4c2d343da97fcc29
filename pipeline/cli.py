"""The command line. Heavy packages are imported by the command that needs them."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from pipeline import paths
from pipeline.cli_baseline import baseline
from pipeline.console import GATE_FAILED, Group
from pipeline.errors import OutputError
from pipeline.types import Limits

FOLDER = click.Path(path_type=Path)

revision_option = click.option("--revision", help="A commit, branch or tag of a Hub id.  [default: main]")


def _finite(context: click.Context, option: click.Parameter, given: float | None) -> float | None:
    """NaN and infinity would settle nothing."""
    if given is not None and not math.isfinite(given):
        raise click.BadParameter(f"{given} is not a finite number.")
    return given


def _share(context: click.Context, option: click.Parameter, given: float | None) -> float | None:
    if given is not None and not 0 <= given <= 1:
        raise click.BadParameter(f"{given:g} is not a share from 0 to 1.")
    return given


def _types(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> dict[str, str]:
    pairs = [item.rpartition("=")[::2] for item in given]
    if any("" in pair for pair in pairs):
        raise click.BadParameter("expected PATTERN=TYPE, as attn_v=q8_0.")
    for pattern, _ in pairs:
        if [other for other, _ in pairs].count(pattern) > 1:
            raise click.BadParameter(f"{pattern} is given twice.")
    return dict(pairs)


imatrix_option = click.option(
    "--imatrix", type=FOLDER, metavar="FILE", help="GGUF: an importance matrix, as `quantgate imatrix` makes."
)

types_option = click.option(
    "--type",
    "types",
    multiple=True,
    metavar="PATTERN=TYPE",
    callback=_types,
    help="Another type for the tensors of a pattern, over the scheme: attn_v, token_embd, output, … Repeatable.",
)


def _writable(context: click.Context, option: click.Parameter, given: str | None) -> str | None:
    """Refused before hours of work whose result could not be written."""
    from pipeline.files import check_writable

    if given not in {None, "-"}:
        try:
            check_writable(Path(str(given)))
        except OutputError as error:
            raise click.BadParameter(str(error)) from error
    return given


def _file(text: str) -> dict[str, Any]:
    """What an option takes that names a file to write."""
    return {"type": click.Path(dir_okay=False, allow_dash=True), "callback": _writable, "metavar": "FILE", "help": text}


json_option = click.option("--json", "json_file", **_file("Write JSON there; - is standard output."))


@click.group(cls=Group, context_settings={"max_content_width": 100})
@click.version_option(package_name="quantgate", prog_name="quantgate")
def main() -> None:
    """Convert Qwen checkpoints, measure each quantization on the same tokens, gate on what it costs."""


@main.command()
@click.argument("checkpoint")
@revision_option
@click.option("--scheme", help="Show what it does to every tensor: NAME, FORMAT/NAME, FORMAT/all or all.")
@types_option
@imatrix_option
@json_option
def inspect(
    checkpoint: str,
    revision: str | None,
    scheme: str | None,
    types: dict[str, str],
    imatrix: Path | None,
    json_file: str | None,
) -> None:
    """Architecture and problems of CHECKPOINT, and what each scheme would weigh. No weight is read.

    CHECKPOINT is a folder with config.json and safetensors, or a Hub id.
    """
    from pipeline.console_inspection import inspection
    from pipeline.inspection import formats_of
    from pipeline.inspection import inspect as inspected

    plans = formats_of(scheme)
    if types and (scheme is None or plans):
        raise click.UsageError("--type needs --scheme: the types go over those of a scheme.")
    found = inspected(checkpoint, None if plans else scheme, revision, types, imatrix)
    _emit(json_file, found, lambda: inspection(found, plans))
    if found["problems"]:
        sys.exit(2)


@main.command()
@json_option
def schemes(json_file: str | None) -> None:
    """Formats and schemes: nominal bits per weight, and where they run."""
    from pipeline import console_tables
    from pipeline.formats import FORMATS, room

    rooms = {name: room(name, "schemes") for name in FORMATS}
    listed = [
        {"format": name, "scheme": s.name, "bits_per_weight": s.base.bits_per_weight, "runs_on": rooms[name].RUNS_ON}
        for name in FORMATS
        for s in rooms[name].SCHEMES.values()
    ]
    _emit(json_file, listed, lambda: console_tables.schemes(listed))


@main.command()
@click.argument("checkpoint")
@revision_option
@click.option("--format", "format_name", required=True, help="gguf, mlx or coreml")
@click.option("--scheme", required=True, help="See `quantgate schemes`.")
@types_option
@click.option("--chunk", type=int, help="Core ML: tokens that prefill takes at once, 64 to 512.  [default: 128]")
@click.option("--max-context", type=int, help="Core ML: tokens of a conversation.  [default: 2112]")
@click.option("--score-window", type=int, help="Core ML: tokens that score takes.  [default: 512]")
@imatrix_option
@click.option("--out", required=True, type=FOLDER, help="A new folder.")
def convert(
    checkpoint: str,
    revision: str | None,
    format_name: str,
    scheme: str,
    types: dict[str, str],
    chunk: int | None,
    max_context: int | None,
    score_window: int | None,
    imatrix: Path | None,
    out: Path,
) -> None:
    """Make the artifact of one scheme of CHECKPOINT in a new folder.

    CHECKPOINT is a folder with config.json and safetensors, or a Hub id.
    """
    from pipeline import artifact
    from pipeline.report.text import effective, importance, megabytes

    asked = {"chunk": chunk, "max_context": max_context, "score_window": score_window}
    sizes = {key: tokens for key, tokens in asked.items() if tokens is not None}
    made = artifact.convert(checkpoint, format_name, scheme, out, revision, types, sizes, imatrix)
    size, bits = megabytes(made.size_bytes), made.bits_per_weight
    click.echo(f"{out}: {made.format} {made.scheme}, {size} MB, {bits:.2f} bits per weight")
    click.echo(effective({name: entry.weights for name, entry in made.effective_types.items()}))
    for part in made.dropped:
        told = f"{len(part.tensors)} tensors, {part.weights:,} weights"
        click.echo(f"dropped {part.part}: {told}, since {part.reason}")
    if made.imatrix is not None:
        click.echo(importance(made.imatrix, known=made.imatrix.text_sha256 is not None))


@main.command()
@click.argument("checkpoint")
@revision_option
@click.option("--corpus", required=True, type=FOLDER, metavar="FILE", help="The calibration text, UTF-8.")
@click.option("--windows", type=click.IntRange(1), default=32, show_default=True, help="Of the text's beginning.")
@click.option("--context", type=click.IntRange(4), default=512, show_default=True, help="Tokens per window.")
@click.option("--scored", multiple=True, help="What it must not overlap, as --corpus of evaluate. Repeatable.")
@click.option("--out", required=True, type=FOLDER, metavar="FILE", help="A new file, which ends in .gguf.")
def imatrix(
    checkpoint: str,
    revision: str | None,
    corpus: Path,
    windows: int,
    context: int,
    scored: tuple[str, ...],
    out: Path,
) -> None:
    """Compute an importance matrix of CHECKPOINT over a calibration text: how large the inputs of each matrix are.

    The calibration text may be no part of a text that artifacts are scored on: that of --scored, or of params.yaml in
    this folder.
    """
    from pipeline import calibration
    from pipeline.report.text import experts
    from pipeline.source.hub import open_checkpoint

    texts = [calibration.scored_text(given) for given in scored] or _project_texts()
    with open_checkpoint(checkpoint, revision) as source:
        made = calibration.make(source, corpus, windows, context, texts, out)
    click.echo(f"{out}: {made.matrices} matrices, over {windows} windows of {context} tokens of {corpus.name}")
    names = " and ".join(text.path or text.name for text in texts)
    click.echo(f"no overlap with {names}" if texts else "compared with no scored text: name it by --scored")
    if made.experts:
        click.echo(experts(made.experts))


def _project_texts() -> list[Any]:
    """The scored text of params.yaml in this folder, if there is one."""
    from pipeline import calibration, params

    if not paths.PARAMS.exists():
        return []
    corpus = params.load(paths.PARAMS).corpus
    return [calibration.Text(corpus.name, corpus.path, corpus.windows, corpus.context)]


@main.command()
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
    from pipeline.evaluation import evaluate_place
    from pipeline.until_decided import evaluate_until_decided

    settings = {"threads": threads, "flash_attention": flash_attention, "kv_type": kv_type}
    asked = (artifact_folder, checkpoint, corpus, windows, context, settings)
    given = Limits(max_ln_ppl_ratio, max_kld_mean, min_same_top)
    if not until_decided:
        if given != Limits():
            raise click.UsageError(
                "A limit needs --until-decided. A full run is judged by `quantgate gate`, by the limits in params.yaml."
            )
        quality = evaluate_place(*asked, revision, layer_by_layer)
        _emit(json_file, quality, lambda: console_tables.quality(artifact_folder.name, quality))
        return
    limits, passing = (given, {PASS}) if given != Limits() else _project_limits(artifact_folder.resolve().name)
    quality = evaluate_until_decided(*asked, limits, revision, layer_by_layer)
    _emit(json_file, quality, lambda: console_tables.sequential(artifact_folder.name, quality))
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


@main.command()
@click.argument("artifacts", metavar="ARTIFACT...", nargs=-1, required=True, type=FOLDER)
@click.option("--prompt-length", "prompt_lengths", multiple=True, type=click.IntRange(1), default=(128, 512, 2048))
@click.option("--decode", type=click.IntRange(1), default=64, show_default=True, help="Tokens to decode.")
@click.option("--rounds", type=click.IntRange(1), default=7, show_default=True, help="Below 6 there is no interval.")
@click.option("--device", default="auto", show_default=True, help="auto or cpu; of Core ML also gpu, ne, all.")
@click.option("--threads", type=click.IntRange(0), default=0, help="[default: one per physical core]")
@json_option
def benchmark(
    artifacts: tuple[Path, ...],
    prompt_lengths: tuple[int, ...],
    decode: int,
    rounds: int,
    device: str,
    threads: int,
    json_file: str | None,
) -> None:
    """Speed and memory of each ARTIFACT: prefill, decode and cold start.

    ARTIFACT is as of `quantgate evaluate`. They are loaded side by side and timed in turns; beyond half of memory, each
    has a process of its own.
    """
    from pipeline import console_tables
    from pipeline.benchmarking import benchmark_folders, named

    settings = {"device": device, "threads": threads, "flash_attention": "auto", "kv_type": "f16"}
    speed = benchmark_folders(named(artifacts), prompt_lengths, decode, rounds, settings)
    _emit(json_file, speed, lambda: console_tables.speed(speed))


@main.command()
@click.option(
    "--also",
    multiple=True,
    type=click.Path(dir_okay=False, path_type=Path),
    help="What `quantgate benchmark --json` wrote on another machine. Repeatable.",
)
def report(also: tuple[Path, ...]) -> None:
    """Write reports/ from what the stages left.

    Figures of other machines stand in a section of their own, by the hashes of the artifacts that were measured there.
    """
    from pipeline import params
    from pipeline.report.build import build

    build([*params.load(paths.PARAMS).variants], also=also)
    click.echo(f"wrote {paths.PARETO_MD}, {paths.PARETO_PNG} and {paths.MEASUREMENTS}")


@main.command()
@click.option("--markdown", **_file("Write the checks as Markdown there, as for a comment; - is standard output."))
@click.option("--junit", **_file("Write the checks as JUnit XML there, as CI systems read it; - is standard output."))
def gate(markdown: str | None, junit: str | None) -> None:
    """Judge reports/measurements.json by params.yaml and reports/baseline.json.

    Exit code 1 where the gate fails, 0 where it passes. In GitHub Actions it annotates the run and adds to the summary
    of the job too.
    """
    from pipeline import gate as gates
    from pipeline import params as parameters
    from pipeline.files import write_json
    from pipeline.gate_output import tell

    if markdown == junit == "-":
        raise click.UsageError("--markdown and --junit cannot both go to standard output: give one of them a file.")
    params = parameters.load(paths.PARAMS)
    result = gates.of_project(params)
    write_json(paths.GATE, result.as_json())
    tell.all_of(result, markdown, junit, os.environ)
    for name in params.gate.limits.keys() - params.variants.keys() - {"default"}:
        click.echo(f"note: gate.limits names {name}, which is no variant.", err=True)
    if not result.passes:
        sys.exit(GATE_FAILED)


main.add_command(baseline)


def _emit(json_file: str | None, value: Any, show: Callable[[], None]) -> None:
    """JSON to standard output instead of the table, or to a file beside it."""
    from pipeline.files import json_text, write_json

    if json_file == "-":
        click.echo(json_text(value).encode(), nl=False)  # UTF-8 whatever the terminal has
        return
    show()
    if json_file:
        write_json(Path(json_file), value)
