"""The report's files, from what the stages left."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipeline import paths
from pipeline.files import json_text, new_file, write_text
from pipeline.report import others
from pipeline.report.fronts import fronts_of
from pipeline.report.markdown import render
from pipeline.report.measurements import as_written, gather
from pipeline.report.pareto import prompt_length
from pipeline.report.plots import draw


def build(names: Sequence[str], root: Path = Path(), also: Sequence[Path] = ()) -> dict[str, Any]:
    """Write measurements.json, pareto.md, pareto.png and pareto.csv below `root`; returns the measurements.

    `also` are files of `quantgate benchmark --json` of other machines.

    Raises:
        MeasurementError: figures that do not belong together, or are not as this version writes them; no file of the
            report is touched then.
    """
    with as_written("what the stages left in artifacts/"):
        measurements = gather(names, root)
        markdown, table = render(measurements, names), _csv(measurements)
    for file in also:
        with as_written(str(file), others.NEXT_STEP):
            measurements["also"] = others.taken(file, measurements, root)
            markdown = render(measurements, names)
            json_text(measurements)
    with as_written("what the stages left in artifacts/"):
        texts = {paths.MEASUREMENTS: json_text(measurements), paths.PARETO_MD: markdown, paths.PARETO_CSV: table}
        with new_file(root / paths.PARETO_PNG) as partial:
            draw(measurements, partial)
    for path, text in texts.items():
        write_text(root / path, text)
    return measurements


def _csv(measurements: Mapping[str, Any]) -> str:
    """A line per variant, for `dvc plots`, with the fronts that it is on; a speed that is not representative is left
    out.
    """
    variants, fronts = measurements["variants"], measurements["fronts"]
    length = prompt_length(variants)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["variant", "size_mb", "kld_mean", "ln_ppl_ratio", "prefill_tokens_per_second", "on_fronts"])
    for name, v in variants.items():
        compared = length in v["prefill"] and v["unrepresentative"] is None
        rate = v["prefill"][length]["value"] if compared else ""
        fields = [v["size_bytes"] / 1e6, v["kld"]["mean"]["value"], v["ln_ppl_ratio"]["value"], rate]
        writer.writerow([name, *fields, " ".join(fronts_of(name, fronts))])
    return text.getvalue()
