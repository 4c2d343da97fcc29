"""MTP layers see no calibration text: what the lowest schemes make of them by an importance matrix of all else."""

from __future__ import annotations

import pytest
from family import tiny

from pipeline.formats.gguf import arrange
from pipeline.formats.gguf.names import gguf_name
from pipeline.formats.gguf.plan import plan
from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import ModelSpec


@pytest.fixture(scope="module")
def spec(tmp_path_factory: pytest.TempPathFactory) -> ModelSpec:
    """A hybrid of four layers and one that guesses the token after next, in rows of 256."""
    path = tmp_path_factory.mktemp("mtp") / "tiny"
    with Checkpoint(tiny("qwen3_5", path, mtp=1, hidden_size=256, intermediate_size=256)) as checkpoint:
        return spec_of(checkpoint.config, checkpoint.shapes)


def seen(spec: ModelSpec) -> set[str]:
    """What any calibration text gives data for."""
    return {gguf_name(t) for t in arrange.tensors(spec) if t.layer is not None and t.layer < spec.n_layers}


@pytest.mark.parametrize("scheme", ["iq1_m", "iq2_xxs", "iq2_xs", "iq2_s", "iq3_xxs"])
def test_they_get_more_bits_and_the_plan_says_why(spec: ModelSpec, scheme: str) -> None:
    planned = plan(spec, SCHEMES[scheme], seen(spec))
    own = {p.encoding.name for p in planned if p.tensor.layer == 4 and p.encoding.block > 1}
    assert "Q4_K" in own
    assert not own & {"IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}
    reasons = {p.reason for p in planned if p.encoding.name == "Q4_K" and p.tensor.layer == 4}
    assert any(reason.startswith("MTP layers have no importance data: Q4_K for IQ") for reason in reasons)
    others = {p.encoding.name for p in planned if p.tensor.layer == 0}
    assert others & {"IQ1_M", "IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS"}


def test_data_of_others_for_them_is_used(spec: ModelSpec) -> None:
    every = {gguf_name(tensor) for tensor in arrange.tensors(spec)}
    planned = plan(spec, SCHEMES["iq2_xs"], every)
    assert any(p.encoding.name == "IQ2_XS" for p in planned if p.tensor.layer == 4)
    assert not any("importance data" in p.reason for p in planned)
