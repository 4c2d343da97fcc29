"""The report's files, from what the stages left."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import paths
from pipeline.files import new_file, write_json, write_text
from pipeline.report.markdown import render
from pipeline.report.measurements import gather
from pipeline.report.pareto import prompt_length
from pipeline.report.plots import draw


def build(names: Sequence[str], root: Path = Path()) -> dict[str, Any]:
    """Write measurements.json, pareto.md, pareto.png and pareto.csv below `root`; returns the measurements."""
    measurements = gather(names, root)
    text = render(measurements, names)
    write_json(root / paths.MEASUREMENTS, measurements)
    write_text(root / paths.PARETO_MD, text)
    with new_file(root / paths.PARETO_PNG) as partial:
        draw(measurements, partial)
    write_text(root / paths.PARETO_CSV, _csv(measurements["variants"]))
    return measurements


def _csv(variants: Mapping[str, Any]) -> str:
    """A line per variant, for `dvc plots`."""
    length = prompt_length(variants)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "size_mb", "kld_mean", "ln_ppl_ratio", "prefill_tokens_per_second"])
    for name, v in variants.items():
        rate = v["prefill"][length]["value"] if length in v["prefill"] else ""
        writer.writerow([name, v["size_bytes"] / 1e6, v["kld"]["mean"]["value"], v["ln_ppl_ratio"]["value"], rate])
    return text.getvalue()
