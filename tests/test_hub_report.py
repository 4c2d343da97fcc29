"""The same checkpoint and text by name from the Hub, and from this disk: the same report, but for the names."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from datasets_folder import rows_of, write_dataset
from figures import MACHINE, NO_COSTS, TIMING, TIMING_ENGINE, drift, figure
from hub_server import COMMIT, Hub, files_of, serving, turn_to

from pipeline import paths
from pipeline.files import write_json
from pipeline.source.wikitext import wikitext_2
from stages import convert, corpus, evaluate, fetch, gate, reference, report

pytestmark = [pytest.mark.shared, pytest.mark.slow]

ROOT = Path(__file__).parent.parent
NAME = "some-org/qwen3-tiny"
VARIANTS = ("gguf-q8_0", "gguf-q4_0")


def run_stages(project: Path, checkpoint: str, text: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every stage but the timing one, whose speed.json is the same made-up one each time."""
    project.mkdir()
    monkeypatch.chdir(project)
    params = yaml.safe_load((ROOT / "params.yaml").read_text()) | {
        "checkpoint": checkpoint,
        "corpus": text | {"windows": 3, "context": 128},
        "variants": {name: {"format": "gguf", "scheme": name.removeprefix("gguf-")} for name in VARIANTS},
    }
    paths.PARAMS.write_text(yaml.safe_dump(params))
    steps = [(fetch,), (corpus,), (reference,), *((s, name) for s in (convert, evaluate) for name in VARIANTS)]
    for stage, *arguments in steps:
        done(stage, *arguments)
    write_json(paths.SPEED, speed())
    done(report)
    done(gate)


def done(stage: Any, *arguments: str) -> None:
    result = CliRunner().invoke(stage.main, arguments)
    assert result.exit_code == 0, result.output


def speed() -> dict[str, Any]:
    """Of the artifacts that lie here."""
    task = {"seconds": [0.5] * 7, "warm_up_seconds": [0.5, 0.5], "disturbed_rounds": [], "drift": drift()}
    tasks = {
        "prefill": {"128": task | {"tokens_per_second": figure(256.0, 1.0)}},
        "decode": {"64": task | {"tokens_per_second": figure(128.0, 1.0)}},
    }
    files = {name: json.loads((paths.variant(name) / "artifact.json").read_text())["files"] for name in VARIANTS}
    other = {"unrepresentative": None, "not_measured": {}, "placement": None, **NO_COSTS}
    timed = {name: {"artifact": files[name], "engine": TIMING_ENGINE, **tasks, **other} for name in VARIANTS}
    settings = {"prompt_lengths": [128], **TIMING}
    return {
        "machine": MACHINE,
        "power_source": "mains",
        "settings": settings,
        "order": "interleaved",
        "variants": timed,
    }


def test_hub_and_disk_end_in_the_same_report(
    tiny: Path, wikitext: Path, hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "datasets")
    dataset = write_dataset(tmp_path / "dataset", rows_of(wikitext.read_bytes().decode()))
    monkeypatch.setattr("pipeline.corpus.wikitext_2", partial(wikitext_2, str(dataset)))
    disk, online = tmp_path / "disk", tmp_path / "online"

    run_stages(disk, str(tiny), {"name": "file", "path": str(wikitext)}, monkeypatch)
    with serving(Hub(repos={NAME: {COMMIT: files_of(tiny)}})) as hub:
        turn_to(hub.endpoint, monkeypatch)
        run_stages(online, NAME, {"name": "wikitext-2", "path": None}, monkeypatch)
    resolved = [path for _, path, _ in hub.asked if path.startswith("/api/") and "/tree/" not in path]
    assert resolved == [f"/api/models/{NAME}/revision/main"]  # by `fetch`, and no stage after it
    assert json.loads((online / paths.SOURCE).read_text())["revision"] == COMMIT

    renamed = {
        paths.PARETO_MD: {
            f"`{NAME}` at revision `{COMMIT}`": "`qwen3-tiny`",
            NAME: "qwen3-tiny",
            "corpus `wikitext-2`": "corpus `file`",
        },
        paths.MEASUREMENTS: {
            f'"name": "{NAME}"': '"name": "qwen3-tiny"',
            f'"revision": "{COMMIT}"': '"revision": null',
            '"corpus": "wikitext-2"': '"corpus": "file"',
        },
        paths.GATE: {},
    }
    for path, names in renamed.items():
        text = (online / path).read_text()
        for theirs, ours in names.items():
            assert theirs in text
            text = text.replace(theirs, ours)
        assert text == (disk / path).read_text()
    for name in VARIANTS:
        ours, theirs = (project / paths.variant(name) / "model.gguf" for project in (disk, online))
        assert ours.read_bytes() == theirs.read_bytes()
