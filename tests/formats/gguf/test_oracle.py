"""Our one-pass writer against llama.cpp's quantizer: every tensor's name, type and bytes."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import oracle
import pytest
from support import Shape, write_checkpoint

from pipeline.formats.gguf.schemes import SCHEMES
from pipeline.formats.gguf.write import write
from pipeline.source.checkpoint import Checkpoint
from pipeline.types import Options

# Together: both architectures; heads per KV head 1, 2, 4, 7, 8; 1 to 80 layers; rows of 256, 576, 896, 4864 and of
# lengths that fall back to blocks of 32 (64, 128, 288) or to F16 (40, 48); tied or not; sources of both dtypes.
SOURCES = {
    "qwen2-rows-256-4864": (Shape("qwen2", 2, 256, 4864, heads=4, kv_heads=4), "F32"),
    "qwen2-rows-896": (Shape("qwen2", 2, 896, 512, heads=14, kv_heads=2), "F32"),
    "qwen2-rows-896-untied": (Shape("qwen2", 2, 896, 64, heads=8, kv_heads=1, tied=False), "BF16"),
    "qwen3-rows-576-1536": (Shape("qwen3", 2, 576, 1536, heads=8, kv_heads=4, head_dim=32), "BF16"),
    "qwen3-rows-576-untied": (Shape("qwen3", 8, 576, 64, heads=8, kv_heads=2, head_dim=32, tied=False), "F32"),
    "qwen3-rows-64-4864": (Shape("qwen3", 2, 64, 4864, heads=4, kv_heads=4, head_dim=16, tied=False), "BF16"),
    "qwen2-8-layers": (Shape("qwen2", 8, 128, 896, heads=8, kv_heads=1, tied=False), "F32"),
    "qwen3-8-layers": (Shape("qwen3", 8, 256, 256, heads=8, kv_heads=1, head_dim=16), "BF16"),
    "qwen2-13-layers": (Shape("qwen2", 13, 256, 256, heads=4, kv_heads=2, tied=False), "BF16"),
    "qwen3-24-layers": (Shape("qwen3", 24, 64, 256, heads=4, kv_heads=1, head_dim=16), "BF16"),
    "qwen2-80-layers": (Shape("qwen2", 80, 256, 32, heads=8, kv_heads=1), "BF16"),
    "qwen2-80-layers-rows-64": (Shape("qwen2", 80, 64, 256, heads=4, kv_heads=4, tied=False), "F32"),
    "qwen3-80-layers": (Shape("qwen3", 80, 256, 32, heads=8, kv_heads=4, head_dim=8), "F32"),
    "qwen2-1-layer-rows-288": (Shape("qwen2", 1, 288, 256, heads=6, kv_heads=3), "BF16"),
    "qwen2-rows-40": (Shape("qwen2", 2, 40, 256, heads=4, kv_heads=2), "F32"),
    "qwen3-head-dim-128-rows-48": (
        Shape("qwen3", 2, 256, 48, heads=16, kv_heads=8, head_dim=128, tied=False),
        "BF16",
    ),
}


@dataclass(frozen=True)
class Source:
    """A checkpoint, and our GGUF file of it in its own dtype: what llama-quantize would be given."""

    checkpoint: Path
    base: Path
    tensors: int


@pytest.fixture(scope="module")
def source_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Source]:
    """Each checkpoint and its base file are made once, by the first test that asks."""

    @cache
    def source(name: str) -> Source:
        shape, dtype = SOURCES[name]
        folder = tmp_path_factory.mktemp(name)
        with Checkpoint(write_checkpoint(folder / "checkpoint", shape, dtype)) as checkpoint:
            (folder / "base").mkdir()
            artifact = write(checkpoint, dtype.lower(), folder / "base")
            (file,) = artifact.files
            return Source(checkpoint.path, folder / "base" / file, len(checkpoint.tensors))

    return source


@pytest.fixture
def scratch(tmp_path: Path) -> Iterator[Path]:
    """A folder emptied after each test: the files of the whole matrix are not kept."""
    yield tmp_path
    shutil.rmtree(tmp_path)


WITHOUT_IMATRIX = [name for name in SCHEMES if not name.startswith(("iq1", "iq2", "iq3"))]
"""test_family_oracle.py has the others."""


@pytest.mark.parametrize("scheme", WITHOUT_IMATRIX)
@pytest.mark.parametrize("name", SOURCES)
def test_every_tensor_equals_llama_quantize(
    name: str, scheme: str, source_of: Callable[[str], Source], scratch: Path
) -> None:
    source = source_of(name)
    check(source, scheme, {}, scratch)


def check(source: Source, scheme: str, types: Mapping[str, str], scratch: Path) -> dict[str, str]:
    """Both files hold the same tensors, types and bytes; returns the type of each tensor."""
    with Checkpoint(source.checkpoint) as checkpoint, ThreadPoolExecutor(1) as beside:
        ftype, target = SCHEMES[scheme].ftype, scratch / "oracle.gguf"
        quantized = beside.submit(oracle.quantize, source.base, ftype, target, types)  # both let go of the interpreter
        artifact = write(checkpoint, scheme, scratch, options=Options(types))
        theirs = quantized.result()
    (file,) = artifact.files

    expected, found = oracle.tensors(theirs), oracle.tensors(scratch / file)
    kinds = {n: kind for n, (kind, _) in found.items()}
    assert len(expected) == source.tensors
    assert kinds == {n: kind for n, (kind, _) in expected.items()}
    assert [n for n in expected if found[n] != expected[n]] == []
    assert oracle.field(scratch / file, "general.file_type") == oracle.field(theirs, "general.file_type")
    return kinds


# One mix for each rule of llama-quantize: by role, by layer (layers without a type of their own are counted
# anew), the first pattern that matches, head and embedding tied or not, fallbacks, a base that is not quantized.
MIXES = {
    "role": ("qwen2-13-layers", "q4_k_m", {"attn_v": "q8_0"}),
    "half of the layers": ("qwen2-13-layers", "q4_k_m", {r"blk\.[0-5]\.(attn_v|ffn_down)": "iq4_xs"}),
    "some layers, counted anew": ("qwen3-8-layers", "q3_k_m", {r"\.[024]\.": "Q5_1"}),
    "some layers of q4_k_s": ("qwen2-13-layers", "q4_k_s", {r"blk\.1\.": "q2_k"}),
    "the first pattern": ("qwen2-13-layers", "q4_0", {"blk.1.ffn": "q6_k", "ffn_(up|down)": "q5_0", "ffn": "q4_1"}),
    "head": ("qwen2-13-layers", "q4_k_m", {"output": "q8_0"}),
    "head and attn_output": ("qwen2-13-layers", "q4_k_m", {"output": "f16", "attn_output": "q3_k"}),
    "embedding": ("qwen2-13-layers", "q5_k_m", {"token_embd": "iq4_nl", "ATTN_K": "Q4_1"}),
    "tied head": ("qwen3-8-layers", "q4_k_m", {"output": "q5_k"}),
    "tied head that falls back": ("qwen2-rows-896", "q4_0", {"output": "q5_k"}),
    "tied embedding": ("qwen3-8-layers", "q4_k_m", {"token_embd": "q3_k"}),
    "tied embedding by pattern": ("qwen2-rows-896", "q4_k_m", {"token_emb": "q5_k"}),
    "falls back": ("qwen2-rows-896", "q8_0", {"attn": "q4_k", "ffn_gate": "iq4_xs", "ffn_up": "q2_k"}),
    "falls to f16": ("qwen2-rows-40", "q4_0", {"attn_q": "q5_1", "ffn_down": "q4_k"}),
    "70B": ("qwen2-80-layers-rows-64", "q2_k", {r"blk\.7\d\.ffn_down": "bf16"}),
    "not quantized": ("qwen2-13-layers", "bf16", {"token_embd": "q8_0", "output": "q6_k"}),
}


@pytest.mark.parametrize("mix", MIXES)
def test_a_mix_equals_llama_quantize_with_types(mix: str, source_of: Callable[[str], Source], scratch: Path) -> None:
    name, scheme, types = MIXES[mix]
    with_types = check(source_of(name), scheme, types, scratch)
    (scratch / "plain").mkdir()
    assert with_types != check(source_of(name), scheme, {}, scratch / "plain"), "the mix changes nothing"


@pytest.mark.parametrize(
    ("scheme", "rows_of_256"),
    [
        ("q8_0", "Q8_0"),
        ("q6_k", "Q6_K"),
        ("q5_k_m", "Q5_K"),
        ("q5_0", "Q5_0"),
        ("q4_k_m", "Q4_K"),
        ("q4_0", "Q4_0"),
    ],
)
def test_rows_of_40_fall_to_f16(
    scheme: str, rows_of_256: str, source_of: Callable[[str], Source], scratch: Path
) -> None:
    """What the test above compares is what these names say, in the oracle's file."""
    base = source_of("qwen2-rows-40").base
    theirs = oracle.tensors(oracle.quantize(base, SCHEMES[scheme].ftype, scratch / "oracle.gguf"))
    kinds = {name: kind for name, (kind, _) in theirs.items() if name.startswith("blk.0.") and "norm" not in name}
    assert kinds.pop("blk.0.ffn_down.weight") == rows_of_256
    assert {kind for name, kind in kinds.items() if name.endswith(".weight")} == {"F16"}
    assert theirs["token_embd.weight"][0] == "F16"
