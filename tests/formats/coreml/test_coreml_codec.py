"""Our codec of Core ML's constants against coremltools: its blob writer, its quantizer and its dequantization."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from pipeline.errors import QuantizationError
from pipeline.formats.coreml import codec
from pipeline.formats.coreml.engine import tools
from pipeline.formats.coreml.names import BITS, pieces
from pipeline.formats.coreml.schemes import F16, F32, INT4, INT8, INT16, PACKINGS, PAL4, PAL6, Packing
from pipeline.types import Planned, TensorSpec

LINEAR = [INT16, INT8, INT4]
HALF_LINEAR = [INT8, INT4]
ROWS, COLUMNS = 16, 96  # of each kind
STEP = 2.0**-24  # between float16's denormals


def named(packing: Packing) -> str:
    return packing.name


def kinds() -> Iterator[np.ndarray]:
    """Rows of every kind that float16 can hold."""
    random = np.random.default_rng(7)
    shape = (ROWS, COLUMNS)
    normal = random.standard_normal(shape, np.float32)
    yield 0.02 * normal
    yield 0 * normal  # zeros of both signs
    yield np.repeat(normal[:, :1], COLUMNS, 1)  # constant
    outlier = 0.02 * normal
    outlier[:, ::40] *= 1000
    yield outlier
    yield -np.abs(normal)
    yield np.where(random.random(shape) < 0.95, 0, normal)
    yield random.integers(-127, 128, shape) / 2  # ties
    for exponent in (-45, -42, -38, -20, -9, -8, -7, -6, -5, -4, -3, 2, 4):
        yield np.clip(normal, -4, 4) * 10.0**exponent
    for most in (1, 3, 7, 8, 10, 63, 64, 127, 128, 160, 190, 191, 254, 500):  # scales of few bits, or none
        yield random.integers(-most, most + 1, shape) * STEP
        yield random.uniform(-most, most, shape) * STEP
    for most in (7.5, 127.5):  # half a step beyond the largest code
        yield random.choice([-most, most, 1], shape) * STEP
    yield random.choice(np.float32([-65504, 65504, 32752, 100, 0]), shape)
    yield random.uniform(-65519, 65519, shape)


def awkward() -> np.ndarray:
    return np.concatenate([kind.astype(np.float32) for kind in kinds()])


def blob_bytes(path: Path, dtype: str, codes: np.ndarray) -> bytes:
    """The data of the one blob that coremltools' own writer makes."""
    tools()
    from coremltools.libmilstoragepython import _BlobStorageWriter

    writer = _BlobStorageWriter(str(path))
    getattr(writer, f"write_{dtype.lower()}_data")(codes)
    del writer
    data = path.read_bytes()
    size, offset = np.frombuffer(data, np.uint64, 2, 64 + 8)
    return data[int(offset) : int(offset + size)]


@pytest.mark.parametrize("dtype", ["INT16", "INT8", "INT4", "UINT6", "UINT4"])
def test_bytes_equal_those_of_coremltools_writer(dtype, tmp_path):
    """Any codes, the last byte full or not."""
    bits = BITS[dtype]
    lowest = 0 if dtype[0] == "U" else -(1 << bits - 1)
    for count in (1, 2, 3, 4, 5, 96, 1001, 4096):
        random = np.random.default_rng(count)
        codes = random.integers(lowest, lowest + (1 << bits), count).astype(codec.TYPES[dtype])
        packed = codec.pack(codes, bits)
        assert packed.dtype == np.uint8
        assert packed.tobytes() == blob_bytes(tmp_path / f"{count}.bin", dtype, codes)
        back = codec.unpack(packed, count, dtype)
        assert (back.dtype, back.tolist()) == (codes.dtype, codes.tolist())


def test_bits_are_where_the_layout_says():
    """Written by hand: the first code lowest."""
    assert codec.pack(np.array([1, -2, 7], np.int8), 4).tobytes() == bytes([0xE1, 0x07])
    stream = sum(code << 6 * i for i, code in enumerate((1, 2, 3, 63)))
    assert codec.pack(np.array([[1, 2], [3, 63]], np.uint8), 6).tobytes() == stream.to_bytes(3, "little")


@pytest.mark.parametrize("packing", HALF_LINEAR, ids=named)
def test_scales_and_codes_are_coremltools(packing):
    """Its scales of float16 weights; its codes by these scales, where it divides in float32."""
    tools()
    from coremltools.converters.mil.mil import types
    from coremltools.optimize import _utils as theirs

    weights = awkward().astype(np.float16)
    codes, scales = codec.quantize(weights.astype(np.float32), packing)
    with np.errstate(all="ignore"):
        expected, expected_scales, _ = theirs.compute_qparams(
            weights, packing.bits, True, "LINEAR_SYMMETRIC", np.int8, [1, packing.block or 0]
        )
    blocks = np.abs(weights.astype(np.float32)).reshape(scales.shape[0], scales.shape[1], -1)
    usual = (blocks.max(2) > 127 * 2.0**-14) & (blocks.max(2) < 32752)  # a normal scale; it doubles the largest
    assert usual.any(0).all()
    assert usual.sum() > 100
    assert scales[usual].tobytes() == expected_scales[usual].tobytes()

    wide = np.repeat(scales.astype(np.float32), blocks.shape[2], 1)
    inside = np.repeat(usual, blocks.shape[2], 1)
    nearest = theirs.quantize_by_scale_and_zp(weights.astype(np.float32), wide, None, types.int8)
    assert codes[inside].tobytes() == nearest[inside].tobytes()

    same = codes == expected
    assert same[inside].mean() > 0.99
    ours, others = (np.abs(q * wide - weights.astype(np.float32)) for q in (codes, expected))
    assert (ours <= others)[inside].all()
    assert np.abs(codes.astype(int) - expected)[inside].max() <= 1


@pytest.mark.parametrize("packing", LINEAR, ids=named)
def test_every_row_is_within_half_a_step(packing):
    """Outliers, constants, zeros, denormals and the largest numbers: finite in float16, and never off by more than the
    weight itself."""
    weights = awkward()
    codes, scales = codec.quantize(weights, packing)
    most = (1 << packing.bits - 1) - 1
    assert (codes.dtype, codes.shape) == (codec.TYPES[packing.data], weights.shape)
    assert scales.dtype == codec.TYPES[packing.scale or ""]
    assert scales.shape == (len(weights), COLUMNS // packing.block if packing.block else 1)
    assert np.abs(codes.astype(int)).max() == most
    assert np.isfinite(scales).all()
    assert (scales > 0).all()

    decoded = codec.dequantize(codes, scales)
    assert np.isfinite(decoded.astype(np.float16)).all()
    step = np.repeat(scales.astype(np.float64), weights.shape[1] // scales.shape[1], 1)
    error = np.abs(decoded.astype(np.float64) - weights)
    assert (error <= step * (0.5 + most * 2.0**-23)).all()  # float32 rounds the quotient, and the product
    assert (error <= np.abs(weights) * (1 + 1e-6)).all()
    largest = np.abs(weights).reshape(*scales.shape, -1).max(2)
    assert (scales <= largest / most * (1 + 2.0**-11) + STEP)[largest > 0].all()
    assert (scales[largest == 0] == 1).all()


@pytest.mark.parametrize("packing", LINEAR, ids=named)
def test_denormal_scales_lose_nothing_that_float16_has(packing):
    """Weights of at most `most` of float16's smallest steps are kept as they are."""
    most = min(127, (1 << packing.bits - 1) - 1)
    weights = np.float32(STEP) * np.random.default_rng(2).integers(-most, most + 1, (64, 32)).astype(np.float32)
    decoded = codec.dequantize(*codec.quantize(weights, packing))
    assert np.array_equal(decoded.astype(np.float16), weights)


def by_coremltools(codes: np.ndarray, other: np.ndarray, packing: Packing) -> np.ndarray:
    """What coremltools makes of the constants, as an operation of a program."""
    ct = tools()
    from coremltools.converters.mil.mil import Builder as mb
    from coremltools.converters.mil.mil import types

    found = []
    stored = codes.astype(types.nptype_from_builtin(types.string_to_builtin(packing.data.lower())))

    @mb.program(input_specs=[mb.TensorSpec(shape=(1,))], opset_version=ct.target.iOS18)
    def program(x):
        if packing.scale:
            weight = mb.constexpr_blockwise_shift_scale(data=stored, scale=other)
        else:
            weight = mb.constexpr_lut_to_dense(indices=stored, lut=other)
        found.append(weight.op.materialized_val_inference())
        return x

    return found[0]


@pytest.mark.parametrize("packing", [INT8, INT4, PAL4, PAL6], ids=named)
def test_dequantized_equals_coremltools(packing):
    codes, other = codec.quantize(awkward(), packing)
    expected = by_coremltools(codes, other, packing)
    ours = codec.dequantize(codes, other)
    assert (ours.dtype, expected.dtype) == (np.float32, np.float16)
    assert ours.astype(np.float16).tobytes() == expected.tobytes()


def test_blocks_along_any_axes():
    random = np.random.default_rng(4)
    codes = random.integers(-8, 8, (6, 4, 10)).astype(np.int8)
    scales = random.standard_normal((3, 1, 5)).astype(np.float16)
    expected = codes * np.repeat(np.repeat(scales.astype(np.float32), 2, 0), 2, 2)
    assert codec.dequantize(codes, scales).tobytes() == expected.tobytes()
    tables = random.standard_normal((2, 5, 8, 1)).astype(np.float16)
    indices = random.integers(0, 8, (6, 10)).astype(np.uint8)
    expected = [[tables[i // 3, j // 2, indices[i, j], 0] for j in range(10)] for i in range(6)]
    assert codec.dequantize(indices, tables).tolist() == np.float32(expected).tolist()


@pytest.mark.parametrize("packing", [None, *PACKINGS.values()], ids=lambda p: p.name if p else "F16")
def test_encoded_is_what_the_blobs_hold(packing):
    weights = awkward()
    tensor = TensorSpec("w", "ffn_up", 0, weights.shape)
    (piece,) = pieces(Planned(tensor, packing.encoding(COLUMNS) if packing else F16, ""))
    arrays = codec.encode(weights, packing, "F16")
    assert [array.nbytes for array in arrays] == [blob.size for blob in piece.blobs]
    if packing is None:
        assert arrays[0].tobytes() == weights.astype(np.float16).tobytes()
        return
    codes, other = codec.quantize(weights, packing)
    assert np.array_equal(codec.unpack(arrays[0], codes.size, packing.data).reshape(codes.shape), codes)
    assert arrays[1].tobytes() == other.tobytes()


@pytest.mark.parametrize("packing", [None, *PACKINGS.values()], ids=lambda p: p.name if p else "F16")
def test_what_float16_cannot_hold_is_refused_and_counted(packing):
    weights = np.full((16, 64), 0.02, np.float32)
    weights[3, :5] = 65519  # rounds to 65504
    for array in codec.encode(weights, packing, "F16"):
        assert array.dtype.kind in "iu" or np.isfinite(array).all()
    weights[7, :3] = [65520, -1e9, 3e38]
    with pytest.raises(QuantizationError, match=r"^weights too large for float16$") as caught:
        codec.encode(weights, packing, "F16")
    assert caught.value.weights == 3
    weights[8, :2] = [np.nan, -np.inf]
    with pytest.raises(QuantizationError, match=r"^weights that are not finite$") as caught:
        codec.encode(weights, packing, "F16")
    assert caught.value.weights == 2


def test_float32_holds_all_that_is_finite():
    weights = np.float32([[3.4e38, -1e-45, 0]])
    assert codec.narrow(weights, F32.name).tobytes() == weights.tobytes()
    with pytest.raises(QuantizationError, match="not finite"):
        codec.narrow(np.float32([np.inf]), F32.name)


def test_encoding_needs_neither_coremltools_nor_torch():
    program = (
        "import sys, numpy; from pipeline.formats.coreml import codec, schemes\n"
        "for packing in schemes.PACKINGS.values(): codec.encode(numpy.eye(16, 32, dtype='f4'), packing, 'F16')\n"
        "print({'coremltools', 'torch', 'sklearn', 'kmeans1d'} & sys.modules.keys())"
    )
    out = subprocess.run([sys.executable, "-W", "error", "-c", program], check=True, capture_output=True, text=True)
    assert out.stdout == "set()\n"
