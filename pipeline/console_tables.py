"""What commands print: tables that fit a terminal of 80 columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pipeline.gate import FAIL, INCONCLUSIVE, PASS, Result
from pipeline.report.markdown import decimals, effective, megabytes, ranged
from pipeline.report.pareto import change
from pipeline.types import Artifact

COLORS = {PASS: "green", FAIL: "red", INCONCLUSIVE: "yellow"}


def _table(*columns: str, right: Sequence[str] = ()) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left", overflow="fold")
    return table


def _print(*parts: Any) -> None:
    console = Console(highlight=False)
    for part in parts:
        console.print(part)


def inspection(found: Mapping[str, Any]) -> None:
    shape = found["architecture"]
    facts = _table("", "")
    facts.show_header = False
    facts.add_row("checkpoint", found["checkpoint"])
    facts.add_row("weights", f"{found['weights']:,} in {found['tensors']} tensors ({', '.join(found['dtypes'])})")
    for key, value in shape.items():
        facts.add_row(key, {True: "yes", False: "no"}.get(value, str(value)) if isinstance(value, bool) else str(value))
    weights = _table("scheme", "MB", "bits/weight", "effective types", right=("MB", "bits/weight"))
    for name, scheme in found["schemes"].items():
        size, types = megabytes(scheme["tensor_bytes"]), effective(scheme["effective_types"])
        weights.add_row(name, size, f"{scheme['bits_per_weight']:.2f}", types)
    _print(facts, "", weights)
    if found["plan"]:
        plan = _table("role", "layers", "shape", "type", "why")
        for row in found["plan"]:
            plan.add_row(row["role"], row["layers"], " x ".join(map(str, row["shape"])), row["type"], row["reason"])
        _print("", plan)
    for problem in found["problems"]:
        _print("", f"[red]problem[/red] {escape(problem)}")


def schemes(listed: Sequence[Mapping[str, Any]]) -> None:
    table = _table("format", "scheme", "bits/weight", "runs on", right=("bits/weight",))
    for row in listed:
        table.add_row(row["format"], row["scheme"], f"{row['bits_per_weight']:.2f}", row["runs_on"])
    _print(table, "", "Nominal bits: `quantgate inspect CHECKPOINT` shows what a checkpoint really gets.")


def artifact(made: Artifact, out: Path) -> None:
    types = effective({name: entry.weights for name, entry in made.effective_types.items()})
    _print(
        f"[bold]{escape(str(out))}[/bold]: {made.format} {made.scheme}, {megabytes(made.size_bytes)} MB, "
        f"{made.bits_per_weight:.2f} bits per weight\n{types}"
    )


def quality(name: str, found: Mapping[str, Any]) -> None:
    table = _table("", "")
    table.show_header = False
    table.add_row("perplexity", ranged({"value": found["ppl"], **found["ppl_interval"]}, 4))
    table.add_row("reference", f"{found['reference_ppl']:.4f}")
    table.add_row("change", change(found).removeprefix("perplexity "))
    kld = found["kld"]
    table.add_row(
        "KL, nats/token", ranged({"value": kld["mean"], **found["kld_interval"]["mean"]}, decimals(kld["mean"]))
    )
    table.add_row("  median, p99, max", f"{kld['median']:.5f}, {kld['p99']:.5f}, {kld['max']:.5f}")
    same = {"value": found["same_top"], **found["same_top_interval"]}
    table.add_row("same top-1", ranged({key: share and share * 100 for key, share in same.items()}, 2) + " %")
    table.add_row("bits per byte", f"{found['bits_per_byte']:.4f}")
    table.add_row("scored", f"{found['scored_tokens']} tokens in {found['windows']} windows")
    _print(f"[bold]{escape(name)}[/bold] (brackets: 95 % intervals over windows)", table)


def speed(found: Mapping[str, Any]) -> None:
    table = _table("artifact", "task", "tokens/s", "rounds", right=("tokens/s", "rounds"))
    for name, variant in found["variants"].items():
        for kind in ("prefill", "decode"):
            for n, task in variant[kind].items():
                disturbed = len(task["disturbed_rounds"])
                rounds = f"{len(task['seconds'])}" + (f" ({disturbed} disturbed)" if disturbed else "")
                table.add_row(name, f"{kind} {n}", ranged(task["tokens_per_second"], 1), rounds)
    _print(table, "", f"{found['machine']['cpu']}, medians with 95 % intervals")


def gate(result: Result) -> None:
    table = _table("variant", "limit", "found", "verdict")
    for check in result.checks:
        limit = check.name if check.limit is None else f"{check.name} {check.limit:g}"
        found = "-" if check.value is None else ranged({"value": check.value, "low": check.low, "high": check.high}, 4)
        table.add_row(check.variant, limit, found, f"[{COLORS[check.verdict]}]{check.verdict}[/]")
    _print(table)
    for check in result.checks:
        if check.verdict != PASS:
            _print(f"[{COLORS[check.verdict]}]{check.verdict}[/] {check.variant}, {check.name}: {escape(check.reason)}")
    passes = "passes" if result.passes else "fails"
    _print("", f"The gate {passes}." if result.verdict in {PASS, FAIL} else f"The gate {passes}: {result.verdict}.")
