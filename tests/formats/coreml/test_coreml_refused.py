"""Models whose layers no function of a package computes: refused before any work, with what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from family import COMMON, FAMILY, MODEL_TYPES, OWN
from support import Shape, tokenizer_json, write_safetensors

from pipeline.errors import QuantizationError
from pipeline.formats.coreml.plan import plan
from pipeline.formats.coreml.schemes import SCHEMES, scheme
from pipeline.formats.coreml.write import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint

EXPERTS = (
    "  - experts: no function here gathers the 2 of 6 quantized matrices that a router chooses, and without that every "
    "token would be multiplied by all"
)
DELTA = (
    "  - Gated DeltaNet in 3 of 4 layers: no function here carries its recurrent state and the inputs of its "
    "convolution from chunk to chunk, nor runs through a window token by token"
)
MISSING = {
    "qwen2_moe": [EXPERTS],
    "qwen3_moe": [EXPERTS],
    "qwen3_next": [EXPERTS, DELTA],
    "qwen3_5": [DELTA],
    "qwen3_5_moe": [EXPERTS, DELTA],
}


def config_of(model_type: str) -> dict[str, Any]:
    experts = {"num_experts": 6} if "num_experts_per_tok" in OWN[model_type] else {}
    return {"model_type": model_type, "hidden_act": "silu"} | COMMON | OWN[model_type] | experts


@pytest.mark.parametrize("model_type", FAMILY)
def test_every_scheme_is_refused_with_what_is_missing(model_type: str) -> None:
    spec = spec_of(config_of(model_type))
    for name in SCHEMES:
        with pytest.raises(QuantizationError) as caught:
            plan(spec, scheme(name))
        lines = str(caught.value).splitlines()
        assert lines == [f"Core ML cannot hold a {model_type} yet:", *MISSING[model_type], "Take gguf or mlx."]
        assert caught.value.weights == spec.weights


@pytest.mark.parametrize("model_type", MODEL_TYPES[:2])
def test_dense_models_are_not(model_type: str) -> None:
    assert len(plan(spec_of(config_of(model_type)), scheme("fp16"))) > 40


def test_nothing_is_written_and_nothing_else_is_said_first(tmp_path: Path) -> None:
    """The checkpoint has none of its tensors: what can never be converted need not be whole."""
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    out.mkdir()
    (source / "config.json").write_text(json.dumps(config_of("qwen3_5")))
    (source / "tokenizer.json").write_text(json.dumps(tokenizer_json(Shape().vocab)))
    write_safetensors(source / "model.safetensors", {})
    with Checkpoint(source) as checkpoint, pytest.raises(QuantizationError, match="Gated DeltaNet in 3 of 4 layers"):
        write(checkpoint, "int8", out)
    assert [*out.iterdir()] == []
