"""What a package says of itself: Manifest.json, and the metadata of its model.

Format: as coremltools' libmodelpackage 9.0 writes it. Its identifiers are random; these are made of the contents, so
that the same conversion gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from uuid import UUID

from pipeline.formats.coreml.plan import Sizes

FILE = "Manifest.json"
AUTHOR = "com.apple.CoreML"
SCHEME, SOURCE = "quantgate.scheme", "quantgate.source"
CHUNK, MAX_CONTEXT, SCORE_WINDOW = "quantgate.chunk", "quantgate.max_context", "quantgate.score_window"
"""Keys of the model's userDefined metadata."""


def text(model: str, model_sha256: str, weights: str, weight_sha256s: Iterable[str]) -> str:
    """Manifest.json of a package of the file `model` and the folder `weights`, by their names and contents."""
    root = _identifier([model_sha256])
    items = {
        root: _item(model, "CoreML Model Specification"),
        _identifier(weight_sha256s): _item(weights, "CoreML Model Weights"),
    }
    manifest = {"fileFormatVersion": "1.0.0", "itemInfoEntries": items, "rootModelIdentifier": root}
    return json.dumps(manifest, indent=4, sort_keys=True) + "\n"


def _item(name: str, description: str) -> dict[str, str]:
    return {"author": AUTHOR, "description": description, "name": name, "path": f"{AUTHOR}/{name}"}


def _identifier(digests: Iterable[str]) -> str:
    digest = hashlib.sha256(" ".join(digests).encode()).digest()
    return str(UUID(bytes=digest[:16], version=5))


def metadata(scheme: str, sizes: Sizes, source: str) -> dict[str, str]:
    """Of a scheme by its label, and the checkpoint by its name."""
    return {
        SCHEME: scheme,
        SOURCE: source,
        CHUNK: str(sizes.chunk),
        MAX_CONTEXT: str(sizes.max_context),
        SCORE_WINDOW: str(sizes.score_window),
    }
