"""Whether figures are of what params.yaml asks for, on the reference's windows."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from pipeline.checks.verdicts import Check, failed

IDENTITY = ("source", "corpus", "text_sha256", "tokenizer_sha256", "ids_sha256", "context", "windows")
"""What must be the reference's for figures to be comparable."""


def mapping(value: Any, key: str) -> Mapping[str, Any]:
    """A nested mapping, empty where a file does not hold it: what is missing then fails by name."""
    found = value.get(key) if isinstance(value, Mapping) else None
    return found if isinstance(found, Mapping) else {}


def checks(
    variant: str, figures: Mapping[str, Any], reference: Mapping[str, Any], asked: Mapping[str, str]
) -> list[Check]:
    """What differs, as fails; nothing where all is well. `asked` is the format, and the scheme or path."""
    found = []
    for key, wanted in asked.items():
        if figures.get(key) != wanted:
            reason = f"it was measured as {figures.get(key)}, params.yaml says {wanted}: run dvc repro"
            found.append(failed(variant, f"same_{key}", reason))
    return found + _differences(variant, mapping(figures, "identity"), reference)


def _differences(variant: str, found: Mapping[str, Any], expected: Mapping[str, Any]) -> list[Check]:
    checks = []
    for key in IDENTITY:
        if key not in expected:
            checks.append(failed(variant, f"same_{key}", f"the reference's {key} is missing: run dvc repro"))
        elif found.get(key) != expected[key]:
            wanted, is_now = shown(expected[key]), shown(found.get(key))
            reason = f"its {key} is not the reference's: expected {wanted}, found {is_now}; run dvc repro"
            checks.append(failed(variant, f"same_{key}", reason))
    return checks


def shown(value: Any) -> str:
    """A figure whole, a hash by its start, a source by its name and a hash of its files."""
    if isinstance(value, Mapping):
        digest = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
        return f"{value.get('name')} ({digest[:12]}…)"
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}…"
