"""Our codec of MLX's packings against mx.quantize: every packing, source type and awkward row, byte by byte."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256

import mlx.core as mx
import numpy as np
import pytest

from pipeline.formats.mlx import codec, kernels
from pipeline.formats.mlx.schemes import BF16, F16, F32, MXFP4, MXFP8, NVFP4, PACKINGS, Packing
from pipeline.source.safetensors import widened
from pipeline.types import Encoding

TYPES = {F32: mx.float32, F16: mx.float16, BF16: mx.bfloat16}
LARGEST = {F32: np.finfo(np.float32).max, F16: np.float32(65504), BF16: np.float32(2.0**127 * (2 - 2.0**-7))}
SMALLEST = {F32: 2.0**-149, F16: 2.0**-24, BF16: 2.0**-133}
COLUMNS, ROWS = 512, 8  # of each kind

CASES = [
    pytest.param(packing, source, id=f"{encoding.name}-of-{source.name}")
    for encoding, packing in PACKINGS.items()
    for source in TYPES
    if packing.scale in (None, source)
]


def kinds(source: Encoding) -> Iterator[np.ndarray]:
    """Rows of every kind, not yet rounded to the source type."""
    random = np.random.default_rng(7)
    shape = (ROWS, COLUMNS)
    normal = random.standard_normal(shape, np.float32)
    signs = random.choice(np.array([-1, 1], np.float32), shape)
    yield 0.02 * normal
    yield 0 * normal  # zeros of both signs
    yield np.repeat(random.standard_normal((ROWS, 1), np.float32), COLUMNS, 1)  # constant
    outlier = 0.02 * normal
    outlier[:, ::48] *= 1000
    yield outlier
    yield np.abs(normal)
    yield -np.abs(normal)
    yield np.where(random.random(shape) < 0.95, 0, normal)
    yield random.integers(-8, 9, shape) / 8  # ties of affine codes
    for values, peak in ((codec.E2M1, 6), (codec.e4m3_values()[:127], 448)):  # ties of theirs, and just beside them
        halfway = random.choice((values[:-1] + values[1:]) / 2, shape) * signs
        halfway[:, ::16] = peak
        halfway *= 2.0 ** random.integers(-9, 9, (ROWS, 1))
        yield from (halfway, np.nextafter(halfway, np.float32(0)), np.nextafter(halfway, 2 * halfway))
    yield random.integers(-40, 41, shape) * SMALLEST[source]  # denormals
    for exponent in (-38, -36, -30, -8, -7, -6, -5, -4, -3, -2, 2, 4, 8, 9, 10, 11, 20, 30, 38):  # groups of one size
        yield np.clip(normal, -3, 3) * 10.0**exponent
    yield random.choice(LARGEST[source] * np.array([-1, 1, 1e-3]), shape)  # the range overflows
    yield random.choice(LARGEST[source] * np.array([0, 1, 1e-3]), shape)
    yield random.integers(2**22, 2**28, shape) * 448.0 * signs  # where float32's steps are wider than E2M1's
    if source == F16:
        yield random.integers(0, 1 << 16, shape).astype(np.uint16).view(np.float16)
    yield random.integers(0, 1 << 32, shape).astype(np.uint32).view(np.float32)  # any bits


def awkward(source: Encoding) -> np.ndarray:
    """All of them, of values that the source type has; more than one chunk, the last not full."""
    with np.errstate(all="ignore"):
        rows = np.concatenate([kind.astype(np.float32) for kind in kinds(source)])
        rows = codec.rounded(np.where(np.isnan(rows), 0, rows), source)
    rows = np.clip(rows, -LARGEST[source], LARGEST[source])
    assert rows.size > codec.CHUNK
    assert rows.size % codec.CHUNK
    return rows


def bits(array: mx.array) -> np.ndarray:
    return np.array(array.view(mx.uint16) if array.dtype == mx.bfloat16 else array)


def by_mlx(weights: np.ndarray, packing: Packing, source: Encoding) -> list[mx.array]:
    array = mx.array(weights).astype(TYPES[source], stream=mx.cpu)
    return list(mx.quantize(array, packing.group, packing.bits, packing.mode, stream=mx.cpu))


def assert_same(ours: tuple[np.ndarray, ...], theirs: list[np.ndarray]) -> None:
    for what, one, other in zip(("weight", "scales", "biases"), ours, theirs, strict=False):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), what
        places = np.argwhere(one != other)
        assert one.tobytes() == other.tobytes(), f"{what} differ at {places[:3].tolist()}, {len(places)} in all"
    assert len(ours) == len(theirs)


@pytest.mark.parametrize(("packing", "source"), CASES)
def test_bytes_equal_mlx_quantize(packing, source):
    weights = awkward(source)
    theirs = [bits(array) for array in by_mlx(weights, packing, source)]
    assert_same(codec.quantize(weights, packing, source), theirs)
    assert_same(kernels.quantize(codec.narrow(weights, source), packing, source), theirs)


@pytest.mark.parametrize(("packing", "source"), CASES)
def test_dequantized_equals_mlx_in_float32(packing, source):
    arrays = by_mlx(awkward(source), packing, source)
    wide = list(arrays)
    if packing.scale:
        wide[1:] = [array.astype(mx.float32, stream=mx.cpu) for array in arrays[1:]]
    options = {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode, "dtype": mx.float32}
    theirs = np.array(mx.dequantize(*wide, **options, stream=mx.cpu))
    ours = codec.dequantize(tuple(bits(array) for array in arrays), packing)
    assert (ours.dtype, ours.shape) == (np.float32, theirs.shape)
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_bits_are_where_the_layout_says():
    """Written by hand: eight codes of three bits are three bytes, the first code lowest."""
    weights = np.tile(np.float32([0, 1, 2, 3, 4, 5, 6, 7]), (1, 4))
    weight, scales, biases = codec.quantize(weights, Packing("affine", 3, 32, BF16))
    # the edge is 7, so code 0 stands for it and the scale is -1: codes 7 6 5 4 3 2 1 0, lowest bits first
    stream = sum(code << 3 * i for i, code in enumerate((7, 6, 5, 4, 3, 2, 1, 0)))
    assert weight.tobytes() == stream.to_bytes(3, "little") * 4
    assert (scales.tobytes(), biases.tobytes()) == (b"\x80\xbf", b"\xe0\x40")  # -1.0 and 7.0 of bfloat16


def test_values_of_the_float_packings_are_those_of_their_specification():
    assert codec.E2M1_PAIRS[0x7A].tolist() == [-1.0, 6.0]
    values = codec.e4m3_values()
    assert values[[0x01, 0x08, 0x38, 0x7E, 0xFE]].tolist() == [2.0**-9, 2.0**-6, 1.0, 448.0, -448.0]
    assert np.flatnonzero(np.isnan(values)).tolist() == [0x7F, 0xFF]


@pytest.mark.parametrize("encoding", TYPES, ids=lambda encoding: encoding.name)
def test_rounding_equals_mlx(encoding):
    """Any bits, every half of the type's last place, denormals, infinities, and what is too large."""
    random = np.random.default_rng(3)
    any_bits = random.integers(0, 1 << 32, 1 << 18).astype(np.uint32).view(np.float32)
    every = widened(np.arange(1 << 16, dtype=np.uint16).view(np.float16 if encoding == F16 else np.uint16))
    with np.errstate(all="ignore"):
        halfway = every[:-1] / 2 + every[1:] / 2
    large = np.float32([65504, 65519, 65520, 3.3895e38, 3.3961e38, 3.3962e38, np.finfo(np.float32).max, np.inf])
    numbers = np.concatenate([any_bits, every, halfway, large, -large])
    numbers = numbers[~np.isnan(numbers)]
    theirs = mx.array(numbers).astype(TYPES[encoding], stream=mx.cpu)
    assert codec.narrow(numbers, encoding).tobytes() == bits(theirs).tobytes()
    wide = np.array(theirs.astype(mx.float32, stream=mx.cpu))
    assert codec.rounded(numbers, encoding).tobytes() == wide.tobytes()


def test_what_mlx_spoils_is_counted():
    tiny, huge, usual = np.full((3, 1, 64), 1, np.float32) * np.float32([[[1e-38]], [[3.2e38]], [[0.02]]])
    tiny[0, 32:] *= 1e-2  # wraps around to something finite in float32
    huge[0, ::2] *= -1  # spans more than float32 holds
    for packing, weights, groups in (
        (PACKINGS[MXFP4], tiny, 2),
        (PACKINGS[MXFP8], tiny, 2),
        (PACKINGS[NVFP4], tiny, 0),  # all become zero
        (Packing("affine", 4, 64, BF16), tiny, 0),
        (Packing("affine", 4, 64, BF16), huge, 1),
        (Packing("affine", 4, 32, F32), huge, 2),
        (PACKINGS[MXFP8], huge, 0),
    ):
        both = np.concatenate([usual, weights])
        assert codec.ruined(both, codec.quantize(both, packing, F32), packing) == groups, packing
        assert codec.ruined(usual, codec.quantize(usual, packing, F32), packing) == 0


def test_float_packings_ask_for_the_source_type():
    with pytest.raises(TypeError, match="mxfp4 depends on the float type of the weights"):
        codec.quantize(np.zeros((1, 32), np.float32), PACKINGS[MXFP4])


def test_threads_at_once_give_the_same_bytes():
    packing = Packing("affine", 4, 64, BF16)
    blocks = [awkward(BF16)[i:] for i in range(8)]

    def packed(block):
        return kernels.quantize(codec.narrow(block, BF16), packing, BF16)

    with ThreadPoolExecutor(4) as pool:
        for block, arrays in zip(blocks, pool.map(packed, blocks), strict=True):
            assert_same(arrays, list(codec.quantize(block, packing)))


WITHOUT_MLX = """
import sys
from hashlib import sha256
import numpy as np
sys.modules["mlx"] = None  # as where it is not installed
from pipeline.formats.mlx import codec, kernels
from pipeline.formats.mlx.schemes import BF16, PACKINGS
weights = np.load(sys.argv[1])
for packing in PACKINGS.values():
    arrays = kernels.quantize(codec.narrow(weights, BF16), packing, BF16)
    print(sha256(b"".join(array.tobytes() for array in arrays)).hexdigest())
print(*kernels.tools())
"""


def test_a_machine_without_mlx_writes_the_same_bytes(tmp_path):
    weights = awkward(BF16)
    np.save(tmp_path / "weights.npy", weights)
    command = [sys.executable, "-W", "error", "-c", WITHOUT_MLX, str(tmp_path / "weights.npy")]
    *digests, tools = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    for packing, digest in zip(PACKINGS.values(), digests, strict=True):
        arrays = kernels.quantize(codec.narrow(weights, BF16), packing, BF16)
        assert sha256(b"".join(array.tobytes() for array in arrays)).hexdigest() == digest, packing
    assert tools == "numpy"
    assert [*kernels.tools()] == ["mlx", "numpy"]


def test_mlx_core_alone_is_imported():
    program = (
        "import sys, numpy; from pipeline.formats.mlx import kernels, schemes\n"
        "kernels.quantize(numpy.zeros((1, 64), 'u2'), schemes.Packing('affine', 4, 64, schemes.BF16), schemes.BF16)\n"
        "print(sorted(name for name in sys.modules if name.split('.')[0] in ('mlx', 'mlx_lm', 'transformers')))"
    )
    out = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert "'mlx.core'" in out
    assert "mlx.nn" not in out
    assert "mlx_lm" not in out
    assert "transformers" not in out
