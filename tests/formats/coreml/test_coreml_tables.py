"""Rotary tables as transformers computes them, and the other constants that no checkpoint holds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support import Shape, config_of

from pipeline.formats.coreml import names
from pipeline.formats.coreml.plan import plan, sizes_of
from pipeline.formats.coreml.schemes import scheme
from pipeline.formats.coreml.tables import inverse_frequencies, tables
from pipeline.models import spec_of
from pipeline.types import Options

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}},
    "yarn-beta": {
        "rope_scaling": {
            **{"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048},
            **{"attention_factor": 1.3, "beta_fast": 16.0, "beta_slow": 2.0},
        }
    },
    "yarn-steep": {
        "rope_scaling": {"rope_type": "yarn", "factor": 1.0, "original_max_position_embeddings": 3},
        "rope_theta": 1e30,
    },
}


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_rotary_tables_are_transformers(name: str, head_dim: int) -> None:
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
    from transformers.models.qwen3.modeling_qwen3 import Qwen3Config, Qwen3RotaryEmbedding

    config = config_of(Shape("qwen3", head_dim=head_dim)) | ROPES[name]
    rope = spec_of(config).rope
    theirs = Qwen3Config(**config)
    kind = theirs.rope_parameters["rope_type"]
    init = Qwen3RotaryEmbedding.compute_default_rope_parameters if kind == "default" else ROPE_INIT_FUNCTIONS[kind]
    frequencies, factor = init(theirs)
    ours, our_factor = inverse_frequencies(rope, head_dim)
    assert ours.dtype == np.float64
    np.testing.assert_allclose(ours, frequencies.numpy(), rtol=2e-6)
    assert our_factor == factor
    if kind != "default":
        assert (ours != inverse_frequencies(spec_of(config_of(Shape("qwen3"))).rope, head_dim)[0]).any()
    spec = spec_of(config)
    made = {blob.name: (blob, array) for blob, array in tables(spec, *planned_of(spec)).items()}
    cos, sin = Qwen3RotaryEmbedding(theirs)(torch.zeros(1), torch.arange(512)[None])  # (1, 512, D)
    for table, expected in (("rope_cos", cos), ("rope_sin", sin)):
        blob, array = made[table]
        assert (blob.dtype, blob.shape) == ("F32", (2048 + 128, head_dim // 2))
        assert array.dtype == np.float32
        # float32 angles of up to 512 radians are off by 3e-5
        np.testing.assert_allclose(array[:512], expected[0, :, : head_dim // 2].numpy(), atol=1e-4)
        exact = {"rope_cos": np.cos, "rope_sin": np.sin}[table](np.arange(len(array))[:, None] * ours) * factor
        assert np.abs(array - exact).max() < 1e-7


def planned_of(spec: Any, name: str = "fp16", **sizes: int) -> Any:
    made = scheme(name, Options(sizes=sizes))
    return plan(spec, made), sizes_of(spec, made)


def table_names(shape: Shape, name: str, **sizes: int) -> list[str]:
    spec = spec_of(config_of(shape))
    return [blob.name for blob in tables(spec, *planned_of(spec, name, **sizes))]


def test_positions_reach_as_far_as_the_cache_or_the_window() -> None:
    spec = spec_of(config_of(Shape()))
    for sizes, count in (({"max_context": 100, "chunk": 64}, 512), ({"max_context": 1000, "chunk": 64}, 1088)):
        found = {blob.name: (blob, array) for blob, array in tables(spec, *planned_of(spec, **sizes)).items()}
        blob, array = found["positions"]
        assert (blob.dtype, blob.shape) == ("INT32", (count,))
        np.testing.assert_array_equal(array, np.arange(count, dtype=np.int32))
        assert found["rope_cos"][0].shape == (count, 8)


def test_zeros_stand_for_the_biases_that_a_linear_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    three = ["rope_cos", "rope_sin", "positions"]
    qwen2 = Shape("qwen2", hidden=64, ff=128, heads=4, kv_heads=2)  # q, k, v have biases; o 64, gate and up 128
    assert table_names(qwen2, "fp16") == [*three, "zeros_64", "zeros_128", "zeros_272"]
    qwen3 = Shape("qwen3", hidden=64, ff=128, heads=4, kv_heads=2, head_dim=16)  # k, v 32
    assert table_names(qwen3, "int8") == [*three, "zeros_32", "zeros_64", "zeros_128", "zeros_272"]
    assert table_names(qwen3, "int16") == three  # a matmul takes none
    monkeypatch.setattr(names, "MOST_ROWS", 100)
    assert table_names(qwen2, "fp16") == [*three, "zeros_64", "zeros_80", "zeros_96", "zeros_128"]
    spec = spec_of(config_of(qwen2))
    for blob, array in tables(spec, *planned_of(spec)).items():
        if blob.name.startswith("zeros"):
            assert (blob.dtype, array.dtype, array.shape, array.any()) == ("F16", np.float16, blob.shape, False)
