"""MLX folders are read as mlx-lm loads them, and refused where it would not load them."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from folders import GONE, Change, Tensors, converted, loads, rewritten, tensors_of, write_tensors
from mutations import FEW, changed, outcome
from support import Shape, config_of, random_tensors, write_checkpoint

from pipeline.errors import ArtifactError
from pipeline.formats.mlx import reader
from pipeline.formats.mlx.arguments import read_spec
from pipeline.formats.mlx.reader import MlxFolder

SHAPE = Shape("qwen3", hidden=128)
DOWN, UP = "model.layers.0.mlp.down_proj", "model.layers.1.mlp.up_proj"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("mlx-reader") / "source", SHAPE)


@pytest.fixture(scope="module")
def int4(source: Path) -> Path:
    return converted(source, source.parent / "int4")


def encodings(found: MlxFolder) -> dict[str, int]:
    return dict(Counter(tensor.planned.encoding.name for tensor in found.tensors.values()))


def refusal(path: Path) -> str:
    with pytest.raises(ArtifactError) as caught:
        reader.read(path)
    return str(caught.value)


# every packing


@pytest.mark.parametrize(
    ("settings", "counts"),
    [
        ({}, {"int4-g64": 16, "BF16": 9}),
        ({"q_bits": 3, "q_group_size": 32}, {"int3-g32": 16, "BF16": 9}),
        ({"q_bits": 8, "q_group_size": 32, "dtype": "float16"}, {"int8-g32-F16": 16, "F16": 9}),
        ({"q_bits": 6, "dtype": "float32"}, {"int6-g64-F32": 16, "F32": 9}),
        ({"quant_predicate": "mixed_2_6"}, {"int2-g64": 13, "int6-g64": 3, "BF16": 9}),
        ({"quantize": False}, {"BF16": 25}),
    ],
)
@pytest.mark.parametrize("model_type", ["qwen2", "qwen3"])
def test_weights_are_what_mlx_makes_of_them_in_float32(
    model_type: str, settings: dict[str, Any], counts: dict[str, int], tmp_path: Path
) -> None:
    import mlx.core as mx

    source = write_checkpoint(tmp_path / "source", Shape(model_type, hidden=128, tied=False))
    found = reader.read(converted(source, tmp_path / "out", **settings))
    vectors = next(name for name in ("BF16", "F16", "F32") if name in counts)
    assert encodings(found) == counts | ({vectors: counts[vectors] + 2} if model_type == "qwen2" else {})
    stored = {name: array for file in found.files for name, array in mx.load(str(file)).items()}
    for name, tensor in found.tensors.items():
        stem = name.removesuffix(".weight")
        expected = stored[name]
        if f"{stem}.scales" in stored:
            expected = mx.dequantize(
                expected,
                *(stored[f"{stem}.{part}"].astype(mx.float32) for part in ("scales", "biases")),
                group_size=found.config["quantization"]["group_size"] if "int2-g64" not in counts else 64,
                bits=int(tensor.planned.encoding.name[3]),
            )
        weights = reader.whole(tensor)
        assert (weights.dtype, weights.shape) == (np.float32, tensor.planned.tensor.shape)
        np.testing.assert_array_equal(weights, np.array(expected.astype(mx.float32)))
        if len(weights.shape) == 2:
            np.testing.assert_array_equal(reader.rows(tensor, 5, 7), weights[5:12])


@pytest.mark.parametrize(("mode", "bits", "group"), [("mxfp4", 4, 32), ("mxfp8", 8, 32), ("nvfp4", 4, 16)])
def test_modes_with_scales_of_one_byte(mode: str, bits: int, group: int, source: Path, tmp_path: Path) -> None:
    folder = converted(source, tmp_path / "out", q_mode=mode, q_bits=bits, q_group_size=group)
    found = reader.read(folder)
    assert encodings(found) == {mode: 15, "BF16": 9}
    weight, scales = reader.arrays(found.tensors[f"{DOWN}.weight"], 3, 5)
    stored = tensors_of(folder)
    for part, name in ((weight, "weight"), (scales, "scales")):
        whole = np.frombuffer(stored[f"{DOWN}.{name}"][2], part.dtype).reshape(128, -1)
        np.testing.assert_array_equal(part, whole[3:8])
    assert (weight.dtype, scales.dtype) == (np.uint32, np.uint8)


def test_a_checkpoint_itself_is_a_folder_that_mlx_lm_loads(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", SHAPE, dtype="F32", shards=3)
    found = reader.read(folder)
    assert loads(folder)
    assert [file.name for file in found.files] == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    for name, weights in random_tensors(SHAPE).items():
        np.testing.assert_array_equal(reader.whole(found.tensors[name]), weights)


# how a packing is found


def paths(bits: dict[str, int]) -> dict[str, Any]:
    return {f"quantization/{path}": {"group_size": 64, "bits": n} for path, n in bits.items()}


@pytest.mark.parametrize(
    "config",
    [
        {"quantization/bits": 8},  # what config.json says of all is not what decides
        {"quantization/group_size": 32, "quantization/mode": "mxfp4"},
        {"quantization_config": GONE},
        {"quantization_config": {"quant_method": "awq"}},  # MLX's own key comes first
        {f"quantization/{DOWN}": True},
        {f"quantization/{DOWN}": {"bits": 4, "mode": "affine"}},
        {f"quantization/{DOWN}": {"bits": None, "group_size": None}},
        {"quantization/other.path": {"bits": 3}},
        paths({DOWN: 4, UP: 4}),
    ],
)
def test_settings_under_which_mlx_lm_loads_the_same(config: dict[str, Any], int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a", config)
    assert loads(folder)
    assert encodings(reader.read(folder)) == {"int4-g64": 15, "BF16": 9}


def of(name: str, dtype: str | None = None, shape: list[int] | None = None, data: bytes | None = None) -> Change:
    """A tensor of another dtype, shape or content; without any of them, it is taken out."""

    def change(tensors: Tensors) -> None:
        if dtype is None and shape is None and data is None:
            del tensors[name]
            return
        old = tensors.get(name, ("", [], b""))
        tensors[name] = dtype or old[0], old[1] if shape is None else shape, old[2] if data is None else data

    return change


def u8(shape: list[int]) -> tuple[str, list[int], bytes]:
    return "U8", shape, bytes(int(np.prod(shape)))


def no_head(tensors: Tensors) -> None:
    for part in ("weight", "scales", "biases"):
        tensors[f"lm_head.{part}"] = tensors[f"model.embed_tokens.{part}"]


@pytest.mark.parametrize(
    ("config", "change", "problem"),
    [
        ({f"quantization/{DOWN}": False}, None, f"{DOWN}.weight: U32 [128, 16] is not F32, F16, BF16, and config.json"),
        ({f"quantization/{DOWN}": {}}, None, f"{DOWN}.weight: U32 [128, 16] is not F32, F16, BF16, and config.json"),
        (paths({DOWN: 8}), None, f"{DOWN}.weight: expected [128, 32] U32, found [128, 16] U32"),
        (
            {f"quantization/{DOWN}": {"bits": 4, "group_size": 32}},
            None,
            f"{DOWN}.weight: expected [128, 4] BF16 for {DOWN}.scales, found [128, 2] BF16",
        ),
        ({f"quantization/{DOWN}": {"bits": 4, "mode": "mxfp4"}}, None, "expected [128, 4] U8 for"),
        ({f"quantization/{DOWN}": {"bits": 4, "mode": "fp4"}}, None, "quantization says {'bits': 4, 'mode': 'fp4'}"),
        ({f"quantization/{DOWN}": {"bits": "4"}}, None, "expected whole numbers"),
        ({f"quantization/{DOWN}": {"bits": 7}}, None, "7 bits in groups of 64, affine, with BF16 scales is not read"),
        ({f"quantization/{DOWN}": "yes"}, None, "quantization says yes of it"),
        (
            {},
            of(f"{DOWN}.scales"),
            f"{DOWN}.weight: U32 [128, 16] is not F32, F16, BF16, and config.json says that it is not quantized",
        ),
        (paths({DOWN: 4}), of(f"{DOWN}.scales"), f"config.json says that it is quantized, but {DOWN}.scales is miss"),
        ({}, of(f"{DOWN}.biases"), f"{DOWN}.weight: {DOWN}.biases is missing, expected [128, 2] BF16"),
        ({}, of(f"{DOWN}.weight"), f"{DOWN}.weight: missing, expected [128, 128]"),
        ({}, of("model.norm.weight"), "model.norm.weight: missing, expected [128]"),
        ({}, of(f"{DOWN}.weight", shape=[128, 8, 2]), "0 bits in groups of 64, affine"),
        ({}, of(f"{DOWN}.scales", "U8", [128, 2], bytes(256)), "4 bits in groups of 64 with scales of one byte is no"),
        ({}, of(f"{DOWN}.scales", "U8", [128, 4], bytes(512)), f"{DOWN}.biases beside it, which mxfp4 does not have"),
        ({}, of("visual.proj.weight", "BF16", [1, 2], bytes(4)), "visual.proj.weight: not a tensor of qwen3"),
        ({}, of("model.norm.scales", "BF16", [2], bytes(4)), "model.norm.scales beside it, which BF16 does not have"),
        ({}, no_head, "lm_head.biases: not a tensor of qwen3"),
        ({"tie_word_embeddings": False}, None, "lm_head.weight: missing, expected [272, 128]"),
        ({"num_hidden_layers": 1}, None, "model.layers.1.input_layernorm.weight: not a tensor of qwen3"),
        ({"intermediate_size": 64}, None, "expected [64, 16] U32, found [128, 16] U32"),
    ],
)  # fmt: skip
def test_what_mlx_lm_would_not_load_is_refused_by_name(
    config: dict[str, Any], change: Change | None, problem: str, int4: Path, tmp_path: Path
) -> None:
    folder = rewritten(int4, tmp_path / "a", config, change)
    assert not loads(folder)
    said = refusal(folder)
    assert said.startswith(f"{folder} does not hold what its config.json says:\n  - ")
    assert problem in said
    assert said.endswith("mlx-lm would not load it. Fetch it again, or convert it again.")


def test_a_group_of_no_weights_is_refused(int4: Path, tmp_path: Path) -> None:
    """MLX would divide by it, and end the process."""
    for i, own in enumerate(({"group_size": 0}, {"bits": 0}, {"group_size": -64})):
        folder = rewritten(int4, tmp_path / str(i), {f"quantization/{DOWN}": own})
        assert f"config.json: quantization says {own} of it: expected whole numbers above 0" in refusal(folder)


def test_of_many_problems_some_are_shown(int4: Path, tmp_path: Path) -> None:
    _, *problems, more, _ = refusal(rewritten(int4, tmp_path / "a", {"hidden_size": 64})).splitlines()
    assert problems[0] == "  - model.layers.0.self_attn.o_proj.weight: expected [64, 8] U32, found [128, 8] U32"
    assert (len(problems), more) == (5, "  - … and 4 more tensors")


@pytest.mark.parametrize(
    ("name", "dtype", "size"), [(f"{DOWN}.weight", "F32", 4), ("model.norm.weight", "I32", 4), (UP, "F8_E4M3", 1)]
)
def test_dtypes_that_no_tensor_of_its_kind_has(name: str, dtype: str, size: int, int4: Path, tmp_path: Path) -> None:
    """mlx-lm looks at shapes alone, and would compute nonsense."""
    name = name if name.endswith("weight") else f"{name}.weight"

    def change(tensors: Tensors) -> None:
        _, shape, _ = tensors[name]
        tensors[name] = dtype, shape, bytes(size * int(np.prod(shape)))

    said = refusal(rewritten(int4, tmp_path / "a", change=change))
    assert f"{name}: " in said
    assert dtype in said


# what is left out


def test_what_mlx_lm_drops_is_not_looked_at(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "source", Shape("qwen2"))
    int4 = converted(source, tmp_path / "int4")

    def change(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = "I64", [1], bytes(8)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = "F32", [8], bytes(32)

    folder = rewritten(int4, tmp_path / "a", change=change)
    assert loads(folder)
    found = reader.read(folder)
    assert found.tensors.keys() == reader.read(int4).tensors.keys()
    assert not any("lm_head" in name or "inv_freq" in name for name in found.stored)


# files


def test_an_index_that_names_an_absent_file_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "source", SHAPE, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    assert refusal(folder) == (
        f"{folder} is incomplete:\n  - model-00002-of-00003.safetensors\n"
        "model.safetensors.index.json names these, and they are absent. Fetch them again."
    )


def test_an_index_is_not_needed_and_otherwise_not_believed(int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a", shards=3)
    assert reader.read(folder).stored.keys() == reader.read(int4).stored.keys()
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    assert loads(folder)
    assert encodings(reader.read(folder)) == {"int4-g64": 15, "BF16": 9}
    for text in ("[]", "{}", '{"weight_map": 3}', "no"):
        (folder / "model.safetensors.index.json").write_text(text)
        assert "model.safetensors.index.json" in refusal(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"x": ["a"]}}')
    assert "  - ['a']\n" in refusal(folder)


def test_two_sets_of_weights_are_refused(int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a")
    (folder / "model-q.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    assert "is in model-q.safetensors and in model.safetensors: two sets of weights" in refusal(folder)


def test_what_is_no_folder_of_weights_is_refused(int4: Path, tmp_path: Path) -> None:
    said = "is no MLX folder: config.json and model*.safetensors are expected. Check the path."
    assert refusal(tmp_path / "absent") == f"{tmp_path / 'absent'} {said}"
    for name in ("config.json", "model.safetensors"):
        folder = rewritten(int4, tmp_path / f"no-{name}")
        assert refusal(folder / name) == f"{folder / name} {said}"
        (folder / name).unlink()
        assert refusal(folder) == f"{folder} {said}"


# what is not quantized by MLX


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"model_file": "model.py"}, "names code of its own (model_file: 'model.py'), which is never run"),
        ({"quantize_activations": True}, "quantize_activations: what is measured here are quantized weights alone"),
        ({"quantization": GONE, "quantization_config": {"quant_method": "awq"}}, "is quantized by awq, not by MLX"),
        ({"quantization": GONE, "quantization_config": {"quant_method": "gptq"}}, "is quantized by gptq, not by MLX"),
        ({"quantization": GONE, "quantization_config": {"bits": 4}}, "is quantized by ModelOpt, not by MLX"),
        ({"quantization": GONE, "quantization_config": "x"}, "is quantized by x, not by MLX"),
        ({"quantization": GONE, "quantization_config": GONE}, "U32 [272, 16] is not F32, F16, BF16, and config.json"),
        ({"quantization": {}}, "quantization must hold group_size, bits and a mode"),
        ({"quantization": 4}, "quantization must hold group_size, bits and a mode"),
        ({"quantization/mode": "int"}, "a mode (affine, mxfp4, mxfp8, nvfp4), found {'group_size': 64, 'bits': 4"),
        ({"quantization/bits": GONE}, "quantization must hold group_size, bits and a mode"),
        ({"model_type": "llama"}, "as mlx-lm reads it, config.json: model_type 'llama' is not supported"),
    ],
)  # fmt: skip
def test_another_quantization_or_code_is_refused(config: dict[str, Any], said: str, int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a", config)
    assert said in refusal(folder)


def test_settings_of_modelopt_are_refused(source: Path, tmp_path: Path) -> None:
    folder = rewritten(source, tmp_path / "a")
    assert reader.read(folder).config["model_type"] == "qwen3"
    (folder / "hf_quant_config.json").write_text('{"quantization": {"quant_algo": "NVFP4"}}')
    assert "is quantized by ModelOpt, not by MLX" in refusal(folder)


# config.json as mlx-lm reads it

YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}


@pytest.mark.parametrize(
    ("model_type", "config"),
    [
        ("qwen2", {"rope_theta": 500_000.0}),
        ("qwen2", {"rope_theta": GONE}),
        ("qwen2", {"rope_theta": GONE, "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}),
        ("qwen2", {"tie_word_embeddings": GONE}),
        ("qwen2", {"tie_word_embeddings": None}),
        ("qwen2", {"max_position_embeddings": GONE}),
        ("qwen2", {"head_dim": 32}),
        ("qwen3", {"rope_theta": GONE, "rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}),
        ("qwen3", {"rope_parameters": {"rope_theta": 500_000.0, "rope_type": "default"}}),
        ("qwen3", {"head_dim": 32}),
    ],
)
def test_settings_are_those_that_mlx_lm_takes(model_type: str, config: dict[str, Any]) -> None:
    from mlx_lm.models import qwen2, qwen3

    whole = {key: value for key, value in (config_of(Shape(model_type)) | config).items() if value is not GONE}
    spec = read_spec(whole)
    args = {"qwen2": qwen2, "qwen3": qwen3}[model_type].ModelArgs.from_dict(whole)
    dim = args.head_dim if model_type == "qwen3" else args.hidden_size // args.num_attention_heads
    theirs = (args.rope_theta, bool(args.tie_word_embeddings), args.max_position_embeddings, dim, args.rms_norm_eps)
    assert (spec.rope.theta, spec.tied, spec.context_length, spec.head_dim, spec.norm_eps) == theirs


@pytest.mark.parametrize("missing", ["rope_theta", "head_dim", "tie_word_embeddings", "rms_norm_eps"])
def test_what_mlx_lm_needs_and_transformers_does_not_is_refused(missing: str) -> None:
    config = config_of(Shape("qwen3"))
    del config[missing]
    with pytest.raises(ArtifactError, match=f"as mlx-lm reads it:\n  - {missing} is missing"):
        read_spec(config)


@pytest.mark.parametrize(
    ("model_type", "key", "scaling", "expected"),
    [
        ("qwen2", "rope_scaling", YARN, ("yarn", 4.0, 512, 1 + 0.1 * np.log(4), 32, 1)),
        ("qwen2", "rope_scaling", YARN | {"rope_type": "linear"}, ("yarn", 4.0, 512, 1 + 0.1 * np.log(4), 32, 1)),
        ("qwen2", "rope_parameters", YARN, (None, 1.0, None, None, None, None)),  # it does not look there
        ("qwen2", "rope_scaling", {"rope_type": "yarn", "factor": 2}, ("yarn", 2, 4096, 1 + 0.1 * np.log(2), 32, 1)),
        ("qwen2", "rope_scaling", YARN | {"attention_factor": 1.5}, ("yarn", 4.0, 512, 1 + 0.1 * np.log(4), 32, 1)),
        ("qwen3", "rope_scaling", YARN | {"mscale": 2, "beta_fast": 16}, ("yarn", 4, 512, 1 + 0.2 * np.log(4), 16, 1)),
        ("qwen3", "rope_parameters", YARN | {"mscale_all_dim": 1}, ("yarn", 4.0, 512, 1.0, 32, 1)),
        ("qwen3", "rope_scaling", {"type": "linear", "factor": 3.0}, ("linear", 3.0, 2048, None, None, None)),
        ("qwen3", "rope_scaling", {"type": "default", "factor": 3.0}, (None, 1.0, None, None, None, None)),
    ],
)
def test_scalings_are_those_that_mlx_lm_computes(
    model_type: str, key: str, scaling: dict[str, Any], expected: tuple[Any, ...]
) -> None:
    from mlx_lm.models import qwen2, qwen3
    from mlx_lm.models.rope_utils import initialize_rope

    config = config_of(Shape(model_type)) | {key: scaling}
    rope = read_spec(config).rope
    found = (rope.scaling, rope.factor, rope.original_context, rope.attention_factor, rope.beta_fast, rope.beta_slow)
    for ours, wanted in zip(found, expected, strict=True):
        assert ours == (pytest.approx(wanted, rel=1e-12) if isinstance(wanted, float) else wanted)
    args = {"qwen2": qwen2, "qwen3": qwen3}[model_type].ModelArgs.from_dict(config)
    theirs = initialize_rope(16, args.rope_theta, False, args.rope_scaling, args.max_position_embeddings)
    assert type(theirs).__name__ == {"yarn": "YarnRoPE"}.get(rope.scaling or "", "RoPE")
    if rope.scaling == "yarn":
        assert theirs.mscale == pytest.approx(rope.attention_factor, rel=1e-12)
    else:
        assert theirs.scale == 1 / rope.factor


# spoilt


def read_all(folder: Path) -> None:
    """The table, and of one layer's tensors the weights."""
    for name, tensor in reader.read(folder).tensors.items():
        if "layers.1" not in name:
            reader.whole(tensor)


def test_headers_with_random_bytes(int4: Path, tmp_path: Path) -> None:
    folder = rewritten(int4, tmp_path / "a")
    file, rng, counts = folder / "model.safetensors", random.Random(0), Counter[str]()
    whole = file.read_bytes()
    length = 8 + int.from_bytes(whole[:8], "little")
    for case in range(300):
        broken = bytearray(whole)
        for _ in range(rng.choice([1, 1, 2, 5, 20])):
            broken[rng.randrange(8 if rng.random() < 0.1 else length)] = rng.choice(
                [rng.randrange(256), *b'"[]{},:01-e.']
            )
        file.write_bytes(broken[: rng.randrange(len(broken)) if rng.random() < 0.2 else len(broken)])
        counts[outcome(f"case {case}", lambda: read_all(folder), ArtifactError)] += 1
    assert counts["refused"] > 280


@pytest.mark.parametrize("part", [f"{DOWN}.weight", f"{DOWN}.scales", f"{DOWN}.biases", "model.norm.weight"])
def test_entries_of_other_dtypes_and_shapes(part: str, int4: Path, tmp_path: Path) -> None:
    folder, counts = rewritten(int4, tmp_path / "a"), Counter[str]()
    (folder / "model.safetensors").unlink()
    shapes = ([], [0], [1], [128], [128, 0], [0, 2], [1, 128, 2], [128, 1], [128, 3], [64, 32], [128, 16], [128, 128])
    for dtype, size in {"U32": 4, "U8": 1, "BF16": 2, "F32": 4, "F64": 8, "BOOL": 1, "": 1}.items():
        for shape in shapes:
            tensors = tensors_of(int4)
            tensors[part] = dtype, shape, bytes(size * int(np.prod(shape)))
            write_tensors(folder / "model.safetensors", tensors)
            counts[outcome(f"{dtype} {shape}", lambda: read_all(folder), ArtifactError)] += 1
    assert counts["refused"] >= 81


def test_every_key_of_the_config_with_wrong_values(int4: Path, tmp_path: Path) -> None:
    folder, counts = rewritten(int4, tmp_path / "a"), Counter[str]()
    config = json.loads((folder / "config.json").read_text())
    own = {"group_size": 64, "bits": 4, "mode": "affine"}
    config |= {"quantization": {**own, DOWN: own}, "rope_scaling": {**YARN, "mscale": 1, "mscale_all_dim": 0}}
    config |= {"model_file": None, "quantize_activations": False, "rope_parameters": {"rope_theta": 1e6}}
    for label, broken in changed(config, (*FEW, 0, 1.5, 10**30, float("nan"))):
        (folder / "config.json").write_text(json.dumps(broken))
        counts[outcome(label, lambda: read_all(folder), ArtifactError)] += 1
    assert counts["refused"] > 100
    assert counts["works"] > 50
