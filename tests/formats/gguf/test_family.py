"""Models with experts and hybrids in llama.cpp: the logits are transformers', prefill and token by token."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from family import FAMILY, OWN, reference_logits
from family_files import convert, importance, maker, write_importance
from fp8_blocks import as_fp8
from numpy.typing import NDArray
from rewriting import rewrite
from safetensors.torch import load_file, save_file

from pipeline.errors import ArtifactError, CheckpointError, ParamsError, QuantizationError
from pipeline.formats.gguf.architecture import pairs
from pipeline.formats.gguf.engine import llama, load_model
from pipeline.formats.gguf.run import GgufRuntime
from pipeline.formats.gguf.write import write
from pipeline.models import spec_of
from pipeline.source.checkpoint import Checkpoint

IDS = np.random.default_rng(0).integers(0, 263, 40).astype(np.int32)
PREFIX = 24

HYBRIDS = FAMILY[2:]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    return maker(tmp_path_factory.mktemp("family"))


def prefilled(file: Path, kv_type: str = "f32") -> NDArray[np.float32]:
    """Logits of IDS [40, vocab] in one go."""
    with closing(GgufRuntime(file, context=64, threads=1, kv_type=kv_type)) as runtime:
        return np.concatenate([part.copy() for part in runtime.score(IDS, 0)])


def stepped(file: Path) -> NDArray[np.float32]:
    """Logits of IDS from PREFIX - 1 on, one token at a time behind the prefix."""
    with closing(GgufRuntime(file, context=64, threads=1, kv_type="f32")) as runtime:

        def last() -> NDArray[np.float32]:
            logits = runtime._cpp.llama_get_logits(runtime._context)
            return np.ctypeslib.as_array(logits, shape=(runtime.vocab_size,)).copy()

        runtime.prefill(IDS[:PREFIX])
        found = [last()]
        for i in range(PREFIX, len(IDS)):
            runtime._take_in(IDS[i : i + 1])
            found.append(last())
        return np.stack(found)


# Of each model_type its usual form; then what could be read in another order: three K heads with two V heads each, as
# many K heads as V heads, one V head, layers without an interval, tied heads, 8 experts, a source in bfloat16, YaRN.
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((model_type, {}) for model_type in FAMILY),
    *((model_type, {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "mtp": 1}) for model_type in HYBRIDS),
    ("qwen3_5", {"linear_num_value_heads": 2}),
    ("qwen3_5", {"linear_num_key_heads": 1, "linear_num_value_heads": 1, "tie_word_embeddings": True}),
    ("qwen3_5", {"layer_types": ["full_attention", "linear_attention", "linear_attention", "full_attention"]}),
    ("qwen3_next", {"linear_num_value_heads": 8, "layer_types": ["linear_attention", "full_attention"] * 2}),
    ("qwen3_5_moe", {"wrapped": True, "mtp": 1, "layout": "fused", "experts": 8, "dtype": "bfloat16"}),
    ("qwen2_moe", {"tie_word_embeddings": True, "experts": 8, "layout": "fused"}),
    ("qwen3_moe", {"dtype": "bfloat16", "tie_word_embeddings": True}),
    ("qwen3_5", {"rope_parameters": OWN["qwen3_5"]["rope_parameters"] | YARN}),
]


@pytest.mark.parametrize(("model_type", "settings"), VARIANTS)
def test_logits_are_transformers(model_type: str, settings: dict[str, Any], make: Callable[..., Path]) -> None:
    source = make(model_type, **settings)
    expected = reference_logits(source, IDS)
    file, _ = convert(source, "f32")
    assert expected.std() > 0.5
    np.testing.assert_allclose(prefilled(file), expected, atol=1e-3, rtol=0)
    np.testing.assert_allclose(stepped(file), expected[PREFIX - 1 :], atol=1e-3, rtol=0)


@pytest.mark.parametrize("scheme", ["q8_0", "q4_k_m", "q4_0", "iq4_xs", "q2_k"])
@pytest.mark.parametrize("model_type", FAMILY)
def test_quantized_files_load_and_say_something(model_type: str, scheme: str, make: Callable[..., Path]) -> None:
    """Random experts and states make much of a little: far less is kept of the logits than of a trained one's."""
    source = make(model_type)
    logits = prefilled(convert(source, scheme)[0], "f16")
    expected = prefilled(convert(source, "f32")[0])
    assert np.isfinite(logits).all()
    assert logits.std(1).min() > 0.5
    assert np.corrcoef(logits.ravel(), expected.ravel())[0, 1] > (0.85 if scheme == "q8_0" else 0.35)


@pytest.mark.parametrize("scheme", ["bf16", "q4_0"])
@pytest.mark.parametrize("model_type", [name for name in FAMILY if name != "qwen3_5"])
def test_experts_alone_and_fused_give_the_same_file(model_type: str, scheme: str, make: Callable[..., Path]) -> None:
    alone, fused = (convert(make(model_type, layout=layout), scheme)[0] for layout in ("per-expert", "fused"))
    assert alone.parent != fused.parent
    assert alone.read_bytes() == fused.read_bytes()


@pytest.mark.parametrize("scheme", ["f16", "bf16", "q4_0", "q8_0"])
def test_the_router_stays_in_float32(scheme: str, make: Callable[..., Path]) -> None:
    source = make("qwen3_moe")
    found = oracle.tensors(convert(source, scheme)[0])
    routers = [found[f"blk.{layer}.ffn_gate_inp.weight"] for layer in range(4)]
    assert {kind for kind, _ in routers} == {"F32"}
    with Checkpoint(source) as checkpoint:
        spec = spec_of(checkpoint.config, checkpoint.shapes)
        stored = [checkpoint.tensor(tensor).tobytes() for tensor in spec.tensors if tensor.role == "router"]
    assert [data for _, data in routers] == stored


# CASES 8: MTP layers declared and absent, and the reverse; CASES 9: what is not the text model


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_mtp_layers_are_kept_and_change_no_logits(model_type: str, make: Callable[..., Path]) -> None:
    plain, with_mtp = (convert(make(model_type, mtp=count), "f32") for count in (0, 1))
    arch = model_type.replace("_", "")
    assert oracle.field(with_mtp[0], f"{arch}.block_count") == 5
    assert oracle.field(with_mtp[0], f"{arch}.nextn_predict_layers") == 1
    assert oracle.field(with_mtp[0], f"{arch}.attention.recurrent_layers") == [True, True, True, False, False]
    more = oracle.tensors(with_mtp[0]).keys() - oracle.tensors(plain[0]).keys()
    own = {"eh_proj", "enorm", "hnorm", "shared_head_norm"}
    assert more >= {f"blk.4.nextn.{name}.weight" for name in own} | {"blk.4.attn_q.weight"}
    assert all(name.startswith("blk.4.") for name in more)
    assert with_mtp[1].weights > plain[1].weights
    assert with_mtp[1].dropped == ()
    np.testing.assert_array_equal(prefilled(with_mtp[0]), prefilled(plain[0]))


@pytest.mark.parametrize("model_type", HYBRIDS)
def test_llama_cpp_loads_the_mtp_layers_where_it_is_asked(model_type: str, make: Callable[..., Path]) -> None:
    file, _ = convert(make(model_type, mtp=1), "f32")
    llama().llama_model_free(load_model(file, load_mtp=True))
    short = rewrite(
        file,
        file.with_name("short.gguf"),
        change=lambda tensors: [t for t in tensors if t.name != "blk.4.nextn.eh_proj.weight"],
    )
    with pytest.raises(ArtifactError, match=r"nextn\.eh_proj"):
        load_model(short, load_mtp=True)


def test_declared_mtp_layers_that_are_absent_are_not_promised(make: Callable[..., Path]) -> None:
    """llama.cpp#24737: config.json says 1, no tensor is there."""
    source = make("qwen3_5", seed=1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    file, artifact = convert(source, "f32")
    assert oracle.field(file, "qwen35.block_count") == 4
    with pytest.raises(AssertionError, match="nextn_predict_layers"):
        oracle.field(file, "qwen35.nextn_predict_layers")
    assert artifact.dropped == ()
    assert np.isfinite(prefilled(file)).all()


def test_mtp_layers_that_are_declared_away_are_dropped_and_named(make: Callable[..., Path]) -> None:
    """llama.cpp#26916: config.json says 0, tensors are there."""
    source = make("qwen3_5_moe", seed=2, mtp=1)
    config = json.loads((source / "config.json").read_text())
    (source / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 0}))
    file, artifact = convert(source, "f32")
    (dropped,) = artifact.dropped
    assert (dropped.part, dropped.reason.split(",")[0]) == ("MTP layers", "config.json says mtp_num_hidden_layers 0")
    assert all(name.startswith("mtp.") for name in dropped.tensors)
    assert "mtp.fc.weight" in dropped.tensors
    assert dropped.weights + artifact.weights == sum(np.prod(shape) for shape in Checkpoint(source).shapes.values())
    np.testing.assert_allclose(prefilled(file), reference_logits(source, IDS), atol=1e-3, rtol=0)


def test_more_mtp_layers_than_llama_cpp_computes_with_are_dropped(make: Callable[..., Path]) -> None:
    file, artifact = convert(make("qwen3_5", mtp=2), "f32")
    (dropped,) = artifact.dropped
    assert dropped.reason == "llama.cpp computes with 1 of them, the checkpoint has 2"
    assert oracle.tensors(file).keys() == oracle.tensors(convert(make("qwen3_5"), "f32")[0]).keys()


@pytest.mark.parametrize("model_type", ["qwen3_5", "qwen3_5_moe"])
def test_the_text_part_of_a_vision_model_is_converted_and_the_rest_is_named(
    model_type: str, make: Callable[..., Path]
) -> None:
    """llama.cpp#22656."""
    alone, whole = (convert(make(model_type, wrapped=wrapped), "q8_0") for wrapped in (False, True))
    assert oracle.tensors(whole[0]) == oracle.tensors(alone[0])
    (dropped,) = whole[1].dropped
    assert (dropped.part, dropped.weights) == ("vision tower", 16 * 3 * 2 * 4 * 4 + 9 * 16 + 16)
    assert dropped.tensors == tuple(
        f"model.visual.{name}" for name in ("norm", "patch_embed.proj.weight", "pos_embed.weight")
    )
    assert whole[1].weights == alone[1].weights


# CASES 5


@pytest.mark.parametrize("model_type", ["qwen3_moe", "qwen3_next", "qwen3_5"])
def test_fp8_blocks_become_the_weights_that_they_stand_for(
    model_type: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    """llama.cpp#11991, #14762: blocks that are ragged, and that no head and no expert's rows end with."""
    source = make(model_type)
    expected = as_fp8(source, tmp_path / "fp8", (24, 40))
    plain = tmp_path / "plain"
    shutil.copytree(source, plain)
    save_file({name: torch.from_numpy(weights) for name, weights in expected.items()}, plain / "model.safetensors")
    files = [convert(folder, "f32")[0] for folder in (tmp_path / "fp8", plain)]
    assert oracle.tensors(files[0]) == oracle.tensors(files[1])
    assert oracle.tensors(files[0]) != oracle.tensors(convert(source, "f32")[0])
    np.testing.assert_allclose(prefilled(files[0]), reference_logits(plain, IDS), atol=1e-3, rtol=0)


# CASES 10


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_norms_of_9e3_stay_as_they_are_in_f16(dtype: str, make: Callable[..., Path], tmp_path: Path) -> None:
    """coremltools#2585: they are vectors, of which GGUF keeps every bit; 1 is added in float32."""
    source = make("qwen3_5", dtype=dtype, seed=3)
    tensors = load_file(source / "model.safetensors")
    tensors["model.norm.weight"] = torch.full_like(tensors["model.norm.weight"], 9e3)
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    found = oracle.tensors(convert(source, "f16")[0])["output_norm.weight"]
    value = np.float32(torch.tensor(9e3, dtype=getattr(torch, dtype)).float().item()) + np.float32(1)
    assert found == ("F32", np.full(64, value, np.float32).tobytes())


# importance matrices


def test_a_scheme_that_needs_importance_says_which_tensors_and_what_to_do(make: Callable[..., Path]) -> None:
    source = make("qwen3_moe", hidden_size=256, num_hidden_layers=2)
    with pytest.raises(QuantizationError) as refused:
        convert(source, "iq2_xs")
    text = str(refused.value)
    assert "iq2_xs needs an importance matrix for 8 tensors" in text
    assert "ffn_gate_exps.weight: IQ2_XS, of 2 layers" in text
    assert "--imatrix" in text
    assert "ffn_down" not in text  # rows of 32 fall back to IQ4_NL, which needs none
    assert "token_embd" not in text  # it gets Q2_K


def test_an_importance_matrix_that_lacks_a_tensor_is_not_enough(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make("qwen3_moe", hidden_size=256, num_hidden_layers=2)
    sums = importance(source)
    del sums["blk.1.ffn_up_exps.weight"]
    file = write_importance(tmp_path / "imatrix.gguf", sums)
    with pytest.raises(QuantizationError, match=r"more than the importance matrix holds for 1 tensors:\n.*ffn_up_exps"):
        convert(source, "iq2_xxs", imatrix=file)


def test_a_scheme_that_rounds_nothing_takes_no_importance(make: Callable[..., Path], tmp_path: Path) -> None:
    source = make("qwen3_moe")
    file = write_importance(tmp_path / "imatrix.gguf", importance(source))
    with pytest.raises(ParamsError, match="bf16 quantizes nothing"):
        convert(source, "bf16", imatrix=file)


def test_experts_that_no_token_reached_are_finite_and_reported(make: Callable[..., Path], tmp_path: Path) -> None:
    """CASES 20: llama.cpp#7816, ik_llama.cpp#202."""
    source = make("qwen3_moe", hidden_size=256, num_hidden_layers=2)
    sums = importance(source)
    for name in ("ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"):
        sums[f"blk.1.{name}.weight"].tokens[2:] = 0
        sums[f"blk.1.{name}.weight"].sums[2:] = 0
    file, artifact = convert(source, "iq3_xxs", imatrix=write_importance(tmp_path / "imatrix.gguf", sums))
    assert artifact.scheme == "iq3_xxs+imatrix"
    assert artifact.imatrix is not None
    assert (artifact.imatrix.experts[1].experts, artifact.imatrix.experts[1].fewest) == (6, 0)
    assert artifact.imatrix.experts[1].activated <= 2
    assert np.isfinite(prefilled(file)).all()


# what llama.cpp would compute otherwise


@pytest.mark.parametrize(
    ("model_type", "settings", "why"),
    [
        ("qwen2_moe", {"norm_topk_prob": True}, "norm_topk_prob is True, llama.cpp takes False for qwen2moe"),
        ("qwen3_moe", {"norm_topk_prob": False}, "norm_topk_prob is False, llama.cpp takes True for qwen3moe"),
        ("qwen3_5", {"layer_types": ["full_attention"] * 4}, "every layer has full attention"),
        ("qwen3_5", {"layer_types": ["linear_attention"] * 4}, "every layer has linear attention"),
        ("qwen3_5", {"linear_value_head_dim": 32}, "linear_key_head_dim is 16 and linear_value_head_dim 32"),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [8, 0, 0]}},
            r"mrope_section \[8, 0, 0\] leaves pairs of a head unrotated",
        ),
        (
            "qwen3_5",
            {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5, "mrope_section": [11, 11, 11]}},
            "sums to more than head_dim 32",
        ),
    ],
)
def test_another_function_is_refused(
    model_type: str, settings: dict[str, Any], why: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    source = make(model_type, **{key: value for key, value in settings.items() if key == "linear_value_head_dim"})
    config = json.loads((source / "config.json").read_text()) | settings
    with Checkpoint(source) as checkpoint:
        spec = spec_of(config, checkpoint.shapes)
        with pytest.raises(CheckpointError, match=why):
            pairs(spec)
        checkpoint.config = config
        with pytest.raises(CheckpointError, match=why):
            write(checkpoint, "f32", tmp_path)
