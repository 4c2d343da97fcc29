"""What the report says of a checkpoint's parts: numbers of the model, what was dropped, calibration, routers."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from figures import MODEL, rendered, row_of
from left import edit, leave

from pipeline import paths
from pipeline.report.measurements import gather
from pipeline.report.parts import checkpoint, dropped, imatrices
from pipeline.types import UsedImatrix

VISION = {
    "part": "vision tower",
    "reason": "only the text part is converted",
    "tensors": ["model.visual.a", "model.visual.b"],
    "weights": 1234,
}
MTP = {"part": "MTP layers", "reason": "mlx-lm has none of them", "tensors": ["mtp.fc.weight"], "weights": 8192}
IMATRIX = {
    "sha256": "ab" * 32,
    "datasets": ["english.txt"],
    "chunks": 32,
    "chunk_size": 512,
    "text_sha256": "cd" * 32,
    "tokenizer_sha256": "ef" * 32,
    "matrices": 42,
    "without": ["token_embd.weight"],
    "experts": [
        {"layer": 0, "experts": 8, "activated": 8, "fewest": 12},
        {"layer": 1, "experts": 8, "activated": 6, "fewest": 0},
    ],
}
LARGE = MODEL | {
    "weights": 79_674_391_296,
    "active_weights": 3_874_929_408,
    "mtp_weights": 1_500_000_000,
    "layers": 48,
    "attention_layers": 12,
    "kv_bytes_per_token": 24 * 1024,
    "state_bytes": 79_036_416,
}


def left(root: Path, overlap: str = "none") -> dict[str, Any]:
    """Two variants, the second of which was made by an importance matrix of a model with experts."""
    leave(root, ["plain", "plain-imat"])
    own = {
        "plain": {"dropped": [VISION, MTP], "imatrix": None, "routers": ["int8-g64"]},
        "plain-imat": {"scheme": "q4_0+imatrix", "dropped": [VISION], "imatrix": IMATRIX, "routers": ["F32"]},
    }
    for name, keys in own.items():
        edit(root / paths.variant(name) / "artifact.json", lambda found, keys=keys: found.update(keys))
    edit(root / paths.quality("plain-imat"), lambda found: found.update(calibration_overlap=overlap))
    return gather(["plain", "plain-imat"], root)


def lists_in(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return [found for item in value.values() for found in lists_in(item)]
    return [value] if isinstance(value, list | tuple) else []


def test_measurements_have_the_parts_without_lists(tmp_path: Path) -> None:
    found = left(tmp_path)
    plain, made = found["variants"]["plain"], found["variants"]["plain-imat"]
    assert lists_in(found) == []
    assert json.loads(json.dumps(found)) == found
    assert plain["dropped"] == {
        "vision tower": {"tensors": 2, "weights": 1234, "reason": "only the text part is converted"},
        "MTP layers": {"tensors": 1, "weights": 8192, "reason": "mlx-lm has none of them"},
    }
    assert (plain["imatrix"], plain["routers"], made["routers"]) == (None, "int8-g64", "F32")
    imatrix = made["imatrix"]
    assert (imatrix["datasets"], imatrix["chunks"], imatrix["without"]) == ("english.txt", 32, 1)
    assert imatrix["overlap"] == "none"
    assert imatrix["experts"] == {
        "0": {"experts": 8, "activated": 8, "fewest": 12},
        "1": {"experts": 8, "activated": 6, "fewest": 0},
    }


def test_what_was_dropped_is_named_and_counted(tmp_path: Path) -> None:
    found = left(tmp_path)
    rows = dropped(found["variants"])
    assert rows == [
        {
            "part": "vision tower",
            "tensors": "2",
            "weights": "1,234",
            "reason": "only the text part is converted",
            "variants": "all",
        },
        {
            "part": "MTP layers",
            "tensors": "1",
            "weights": "8,192",
            "reason": r"mlx\-lm has none of them",
            "variants": "plain",
        },
    ]
    text = rendered(found, [*found["variants"]])
    assert "| vision tower | 2 | 1,234 | all | only the text part is converted |" in text
    assert r"| MTP layers | 1 | 8,192 | plain | mlx\-lm has none of them |" in text


def test_calibration_and_the_experts_it_reaches_are_named(tmp_path: Path) -> None:
    found = left(tmp_path)
    ((made),) = imatrices(found["variants"])
    assert made["variants"] == "plain-imat"
    text = rendered(found, [*found["variants"]]).replace("\\", "")
    assert (
        "- **plain-imat**: importance matrix of english.txt, 32 chunks of 512 tokens, for 42 matrices; 1 went without: "
        "token_embd.weight. Experts without any token, whose inputs count alike: layer 1: 2 of 8. A longer calibration "
        "text would reach more.\n"
    ) in text
    kinds = [line for line in text.splitlines() if line.startswith(("| **plain", "| plain")) and "Q4_0" in line]
    assert [line.split("|")[3].strip() for line in kinds] == [  # the larger first
        "Q4_0 90 %, F32 10 %; routers F32; with an importance matrix",
        "Q4_0 90 %, F32 10 %; routers int8-g64",
    ]
    assert "- **routers** choose a token's experts" in text


def test_an_overlap_that_is_not_known_is_told(tmp_path: Path) -> None:
    """Of files of ours too, made with another tokenizer."""
    found = left(tmp_path, "not known")
    assert found["variants"]["plain-imat"]["imatrix"]["overlap"] == "not known"
    text = rendered(found, [*found["variants"]]).replace("\\", "")
    assert "1 went without: token_embd.weight; overlap with the scored text: not known. Experts" in text


@pytest.mark.parametrize(
    ("said", "note"),
    [
        (
            {"file": "theirs.imatrix", "datasets": ["wiki.txt"], "chunks": 125},
            "importance matrix theirs.imatrix of wiki.txt, 125 chunks; overlap with the scored text: not known.",
        ),
        ({}, "importance matrix of an unknown text; overlap with the scored text: not known."),
    ],
)
def test_of_a_file_of_others_is_told_what_it_says_of_its_importance_matrix(
    said: dict[str, Any], note: str, tmp_path: Path
) -> None:
    left(tmp_path, "not known")
    given = {"path": "files/theirs.gguf", "scheme": "q4_k_m", "imatrix": asdict(UsedImatrix()) | said}
    edit(tmp_path / paths.variant("plain-imat") / "artifact.json", lambda found: found.update(given))
    found = gather(["plain", "plain-imat"], tmp_path)
    assert json.loads(json.dumps(found)) == found
    text = rendered(found, [*found["variants"]]).replace("\\", "")
    assert f"- **plain-imat**: {note}\n" in text
    assert "made elsewhere, says q4_k_m; routers F32; with an importance matrix" in text


def test_a_mix_with_an_importance_matrix_is_called_by_its_types(tmp_path: Path) -> None:
    left(tmp_path)
    artifact = tmp_path / paths.variant("plain-imat") / "artifact.json"
    edit(artifact, lambda found: found.update({"scheme": "q4_0+attn_v=q8_0+imatrix"}))
    found = gather(["plain", "plain-imat"], tmp_path)
    text = rendered(found, [*found["variants"]]).replace("\\", "")
    assert "mix q4_0+attn_v=q8_0; routers F32; with an importance matrix" in text


def test_a_report_of_whole_dense_models_says_nothing_of_parts(measurements: dict[str, Any]) -> None:
    text = rendered(measurements, [*measurements["variants"]])
    for said in ("Of the checkpoint,", "importance matrix", "routers"):
        assert said not in text
    assert row_of(text, "small")[0] == "**small**"
    assert "\nThe checkpoint: 6.82 M parameters; a token's keys and values take 3 KiB in f16.\n\n## Picks\n" in text


def test_the_checkpoint_is_told_by_what_a_token_takes_and_keeps() -> None:
    assert checkpoint(LARGE) == (
        "79.67 B parameters, of which 3.87 B take part in a token; a token's keys and values take 24 KiB in f16, in 12 "
        "of 48 layers; the others keep a state of 75.4 MiB in float32, however long the text. Beside them, 1.50 B of "
        "MTP layers, which guess further tokens."
    )
    assert checkpoint(None) == ""
