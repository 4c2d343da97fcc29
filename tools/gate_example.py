"""Prints the worked example of docs/gate.md from the committed reports; --write puts it there.

Run from the project's folder: python -m tools.gate_example --write
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from pipeline import gate, paths
from pipeline.checks.verdicts import INCONCLUSIVE, Check
from pipeline.files import read_object, write_text
from pipeline.gate_output import words
from pipeline.params import Gate, Params, load
from pipeline.report.text import ranged

PAGE = Path("docs/gate.md")
BEGIN, END = "<!-- python -m tools.gate_example: begin -->", "<!-- end -->"
SHOWN = "gguf-q4_k_m"
COMPARED = ("gguf-q8_0", "gguf-q4_k_m", "gguf-q4_0")
NAME = "max_ln_ppl_ratio"


def example(root: Path) -> str:
    """The text between BEGIN and END, from the params.yaml and reports/ below `root`."""
    params, measurements = load(root / paths.PARAMS), read_object(root / paths.MEASUREMENTS)
    verdicts = read_object(root / paths.GATE)["variants"]
    variants = measurements["variants"]
    one = _check(SHOWN, verdicts[SHOWN][NAME])
    strict = params.gate.limits["default"].max_ln_ppl_ratio
    other = {check.variant: check for check in _under_the_default(params, measurements)}
    shown, best, worst = variants[SHOWN], COMPARED[0], COMPARED[-1]
    return "\n".join(
        [
            f"`{SHOWN}` may lose at most {one.limit:g} nats per token more than the float32 original, which is "
            f"{_percent(one.limit)} perplexity. Over {shown['windows']} windows ({shown['scored_tokens']:,} tokens) it "
            f"lost {_nats(one)} more: {words.found(one)} perplexity. The verdict is **{one.verdict}**: {one.reason}.",
            "",
            f"Now suppose that the default's limit of {strict:g} ({_percent(strict)}) held for every variant:",
            "",
            "| variant | lost, nats per token | as perplexity | verdict | why |",
            "|---|---|---|---|---|",
            *(_row(other[name]) for name in COMPARED),
            "",
            f"Why paired: the perplexity of `{best}` is {ranged(variants[best]['ppl'], 1)}, that of `{worst}` "
            f"{ranged(variants[worst]['ppl'], 1)}. Such brackets are wide because some windows are hard text for every "
            "model. The differences, window by window, do not have that noise in them.",
        ]
    )


def _under_the_default(params: Params, measurements: Mapping[str, Any]) -> list[Check]:
    """The perplexity checks of all variants by the default's limits."""
    default = params.gate.limits["default"]
    result = gate.judge(measurements, replace(params, gate=Gate("fail", {"default": default})))
    return [check for check in result.checks if check.name == NAME]


def _check(variant: str, found: Mapping[str, Any]) -> Check:
    return Check(variant, NAME, *(found[key] for key in ("limit", "value", "low", "high", "verdict", "reason")))


def _row(check: Check) -> str:
    why = check.reason
    if check.verdict != INCONCLUSIVE and check.p_value is not None:
        why += f"; p after Holm {check.p_value:.1g}"
    return f"| `{check.variant}` | {_nats(check)} | {words.found(check)} | **{check.verdict}** | {why} |"


def _nats(check: Check) -> str:
    return ranged({"value": check.value, "low": check.low, "high": check.high}, 4)


def _percent(nats: float | None) -> str:
    return f"{math.expm1(nats or 0.0) * 100:+.1f} %"


@click.command()
@click.option("--write", is_flag=True, help="Into docs/gate.md.")
def main(write: bool) -> None:
    """The worked example of docs/gate.md."""
    text = example(Path())
    if not write:
        click.echo(text)
        return
    page = PAGE.read_text(encoding="utf-8")
    before, after = page.split(BEGIN)[0], page.split(END)[1]
    write_text(PAGE, f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


if __name__ == "__main__":
    main()
