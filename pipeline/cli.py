"""The command line. Heavy packages are imported by the command that needs them."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import click

from pipeline import paths
from pipeline.cli_baseline import baseline
from pipeline.cli_evaluate import evaluate
from pipeline.cli_imatrix import imatrix
from pipeline.cli_options import FOLDER, emit, file_option, json_option, revision_option
from pipeline.console import GATE_FAILED, Group
from pipeline.types import Options


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
    emit(json_file, found, lambda: inspection(found, plans))
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
    emit(json_file, listed, lambda: console_tables.schemes(listed))


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
    options = Options(types, {key: tokens for key, tokens in asked.items() if tokens is not None}, imatrix)
    made = artifact.convert(checkpoint, format_name, scheme, out, options, revision)
    size, bits = megabytes(made.size_bytes), made.bits_per_weight
    click.echo(f"{out}: {made.format} {made.scheme}, {size} MB, {bits:.2f} bits per weight")
    click.echo(effective({name: entry.weights for name, entry in made.effective_types.items()}))
    for part in made.dropped:
        told = f"{len(part.tensors)} tensors, {part.weights:,} weights"
        click.echo(f"dropped {part.part}: {told}, since {part.reason}")
    if made.imatrix is not None:
        click.echo(importance(made.imatrix, known=made.imatrix.text_sha256 is not None))


@main.command()
@click.argument("artifacts", metavar="ARTIFACT...", nargs=-1, required=True, type=FOLDER)
@click.option(
    "--prompt-length",
    "prompt_lengths",
    multiple=True,
    type=click.IntRange(1),
    default=(128, 512, 2048),
    help="Tokens of a prompt. Repeatable.  [default: 128, 512, 2048]",
)
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
    emit(json_file, speed, lambda: console_tables.speed(speed))


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
    click.echo(f"wrote {paths.PARETO_MD}, {paths.PARETO_PNG}, {paths.PARETO_CSV} and {paths.MEASUREMENTS}")


@main.command()
@click.option(
    "--markdown", **file_option("Write the checks as Markdown there, as for a comment; - is standard output.")
)
@click.option(
    "--junit", **file_option("Write the checks as JUnit XML there, as CI systems read it; - is standard output.")
)
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
main.add_command(evaluate)
main.add_command(imatrix)
