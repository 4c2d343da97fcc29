"""What sets a variant apart, and what its format ships, in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

from pipeline.report import parts
from pipeline.report.text import escaped

SHIPS = {
    "gguf": "a GGUF file holds its tokenizer",
    "mlx": "an MLX folder has tokenizer, config and index beside the weights",
    "coreml": "a Core ML folder has the package, tokenizer files, config and a Swift file that runs it",
}
IMATRIX = "+imatrix"  # how mix_name ends where there is one
INT16_IS = (
    "real INT16 constants with a float32 scale for each row, dequantized in the graph: as large as fp16, and not what "
    "coremltools calls quantization"
)


def is_int16(variant: Mapping[str, Any]) -> bool:
    """Whether it is of the type that Core ML has no name for."""
    return bool(variant["format"] == "coreml" and "int16" in variant["effective_types"])


def notes(variants: Mapping[str, Any]) -> dict[str, list[str]]:
    """What sets a variant apart beside its types: its maker, mix or sizes, the same bytes elsewhere, engine settings.

    Bytes and settings are compared within a format: another one has another engine and other tensors.
    """
    settings = {name: _settings(v["engine"]) for name, v in variants.items()}
    alike = {
        name: [n for n, other in variants.items() if other["format"] == v["format"]] for name, v in variants.items()
    }
    found: dict[str, list[str]] = {}
    for name, v in variants.items():
        usual = Counter(settings[n] for n in alike[name]).most_common(1)[0][0]
        twins = [n for n in alike[name] if n != name and variants[n]["tensors_sha256"] == v["tensors_sha256"]]
        found[name] = [f"made elsewhere, says {v['scheme']}"] if v["path"] else []
        found[name] += [_own(v)] if "+" in v["scheme"].removesuffix(IMATRIX) else []
        found[name] += parts.noted(v)
        found[name] += [INT16_IS] if is_int16(v) else []
        found[name] += [f"same bytes as {', '.join(twins)}"] if twins else []
        found[name] += [settings[name]] if settings[name] != usual else []
    return found


def _own(variant: Mapping[str, Any]) -> str:
    """The types of a GGUF mix, or the sizes of a Core ML package: 'mix q4_0+attn_v=q8_0', 'chunk 256 tokens'."""
    if variant["format"] != "coreml":
        return f"mix {escaped(variant['scheme'].removesuffix(IMATRIX))}"
    sizes = variant["scheme"].partition("+")[2]
    return f"{sizes.replace('=', ' ').replace('_', ' ').replace(',', ', ')} tokens"


def _settings(engine: Mapping[str, Any]) -> str:
    """What a variant may set of its own."""
    return f"KV cache {engine['kv_type']}, flash attention {engine['flash_attention']}"
