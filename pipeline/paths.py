"""Where the stages leave their files, below the project's root. The one place that knows."""

from __future__ import annotations

from pathlib import Path

PARAMS = Path("params.yaml")
ARTIFACTS = Path("artifacts")
SOURCE = ARTIFACTS / "source.json"
TEXT = ARTIFACTS / "text.json"
ACCEPTED = ARTIFACTS / "accepted.json"
BUILDS = ARTIFACTS / "builds.json"
CALIBRATION = ARTIFACTS / "calibration.json"
CORPUS = ARTIFACTS / "corpus"
IMATRIX = ARTIFACTS / "imatrix"
IMATRIX_FILE = "imatrix.gguf"
MATRICES = ARTIFACTS / "imatrix.json"
REFERENCE = ARTIFACTS / "reference"
MACHINE = ARTIFACTS / "machine.json"
SPEED = ARTIFACTS / "speed.json"
REPORTS = Path("reports")
PARETO_MD = REPORTS / "pareto.md"
PARETO_PNG = REPORTS / "pareto.png"
PARETO_CSV = REPORTS / "pareto.csv"
MEASUREMENTS = REPORTS / "measurements.json"
GATE = REPORTS / "gate.json"
BASELINE = REPORTS / "baseline.json"
SAMPLE_TEXT = Path(__file__).parent.parent / "assets" / "sample-corpus" / "sample.txt"


def variant(name: str) -> Path:
    """The folder of an artifact."""
    return ARTIFACTS / "variants" / name


def imatrix(asked: bool | str) -> Path | None:
    """The importance matrix that a variant asks for: the pipeline's own, a file's, or none."""
    return Path(asked) if isinstance(asked, str) else IMATRIX / IMATRIX_FILE if asked else None


def quality(name: str) -> Path:
    return ARTIFACTS / "quality" / f"{name}.json"


def scores(name: str) -> Path:
    return ARTIFACTS / "scores" / f"{name}.npz"
