"""Palettes: the k-means is the optimal one, by a plain program and by coremltools' own, and the tables are its."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from pipeline.formats.coreml import kmeans
from pipeline.formats.coreml.engine import tools
from pipeline.formats.coreml.palette import palettize
from pipeline.source.safetensors import widened

GROUP = 16


def normal(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """As of a bfloat16 checkpoint."""
    weights = 0.02 * np.random.default_rng(seed).standard_normal(shape, np.float32)
    return widened((weights.view(np.uint32) >> 16).astype(np.uint16))


def least_errors(values: np.ndarray, most: int) -> list[float]:
    """Of 1 to `most` clusters of ascending values: every begin of every cluster tried, each summed up by itself."""
    n = len(values)
    cost = np.full((n + 1, n + 1), np.inf)
    for i in range(n):
        for j in range(i + 1, n + 1):
            cost[i, j] = np.square(values[i:j] - values[i:j].mean(dtype=np.float64)).sum()
    best = cost[0]
    errors = [best[n]]
    for _ in range(most - 1):
        best = (best[:, None] + cost).min(0)
        errors.append(best[n])
    return errors


def error_of(values: np.ndarray, centroids: np.ndarray) -> float:
    return float((np.abs(values[:, None].astype(np.float64) - centroids).min(1) ** 2).sum())


def lists() -> list[np.ndarray]:
    random = np.random.default_rng(5)
    shapes = [
        random.standard_normal((6, 60)),
        random.standard_t(2, (6, 60)),
        random.integers(0, 90, (6, 120)),  # equally far apart: many clusterings are the best
        np.repeat(np.arange(30.0), 3)[None],
        (random.integers(0, 12, 60) * 10.0 + random.integers(0, 3, 60) / 8)[None],  # bunches
        np.concatenate([random.standard_normal(50), [-4e4, 6e4]])[None],
        2.0 ** np.arange(-20, 14)[None],
    ]
    return [np.sort(shape.astype(np.float32), axis=1) for shape in shapes]


@pytest.fixture(scope="module")
def solved() -> list[tuple[np.ndarray, list[list[float]]]]:
    return [(ordered, [least_errors(row, 13) for row in ordered]) for ordered in lists()]


@pytest.mark.parametrize("sweeps", [12, 1, 0])
@pytest.mark.parametrize("cells", [8, 2])
def test_clusters_have_the_least_error_there_is(sweeps, cells, solved, monkeypatch):
    """However far from `k` the search for a price ends."""
    monkeypatch.setattr(kmeans, "MOST_SWEEPS", sweeps)
    monkeypatch.setattr(kmeans, "CELLS", cells)
    monkeypatch.setattr(kmeans, "MOST_PAIRS", 64)
    for ordered, errors in solved:
        for k in (2, 3, 5, 8, 13):
            for row, found, least in zip(ordered, kmeans.centroids(ordered, k), errors, strict=True):
                assert (np.diff(found) > 0).all()
                assert error_of(row, found) == pytest.approx(least[k - 1], rel=1e-9, abs=1e-12)


def test_groups_of_any_sizes_at_once_are_as_each_alone():
    random = np.random.default_rng(1)
    ordered = np.stack([np.sort(random.integers(0, top, 3000)) for top in (1, 3, 40, 64, 65, 66, 900, 20000)])
    ordered = ordered.astype(np.float32)
    together = kmeans.centroids(ordered, 64)
    for row, found in zip(ordered, together, strict=True):
        assert kmeans.centroids(row[None], 64)[0].tobytes() == found.tobytes()


def test_few_values_are_the_table():
    weights = np.tile(np.float32([[0.5, -0.25, 3, -0.25]]), (32, 1))
    weights[16:] = -0.0
    codes, tables = palettize(weights, 4, GROUP)
    assert tables.shape == (2, 1, 16, 1)
    assert tables[0].reshape(-1).tolist() == [-0.25, 0.5] + [3.0] * 14
    assert tables[1].tobytes() == bytes(32)
    assert codes[:16].tolist() == [[1, 0, 2, 0]] * 16
    assert not codes[16:].any()


def test_halfway_between_two_entries_is_the_lower():
    weights = np.float32([[1, 1 + 2**-11, 1 + 2**-10, 1 + 2**-11 + 2**-20]] * GROUP)  # float16 has the first and third
    codes, tables = palettize(weights, 6, GROUP)
    assert tables[0, 0, :3, 0].tolist() == [1, 1 + 2**-10, 1 + 2**-10]
    assert codes.tolist() == [[0, 0, 1, 1]] * GROUP


@pytest.mark.parametrize("bits", [4, 6])
def test_a_weight_takes_the_nearest_entry_and_the_lower_of_two(bits):
    integers = np.random.default_rng(3).integers(-300, 300, (16, 40)).astype(np.float32)
    weights = np.concatenate([normal((48, 40)), integers / 8])
    codes, tables = palettize(weights, bits, GROUP)
    assert (codes.dtype, tables.dtype, tables.shape) == (np.uint8, np.float16, (4, 1, 2**bits, 1))
    assert (np.diff(tables.reshape(4, -1)) >= 0).all()
    nearest = np.abs(weights.reshape(4, -1, 1) - tables.reshape(4, 1, -1).astype(np.float64)).argmin(2)
    assert np.array_equal(codes.reshape(4, -1), nearest)


def by_coremltools(group: np.ndarray, bits: int) -> float:
    """Squared error of coremltools' palette of a group of float16 weights, its table in float16 too."""
    tools()
    from coremltools.models.neural_network.quantization_utils import _get_kmeans_lookup_table_and_weight

    table, codes = _get_kmeans_lookup_table_and_weight(bits, group, force_kmeans1d=True)
    return float(((table.astype(np.float16).astype(np.float64)[codes].reshape(group.shape) - group) ** 2).sum())


@pytest.mark.parametrize("bits", [4, 6])
@pytest.mark.parametrize("columns", [128, 1024], ids=["2k", "16k"])  # coremltools takes k-means from 10,000 weights on
def test_never_worse_than_coremltools(bits, columns):
    weights = normal((6 * GROUP, columns))
    weights[GROUP : 2 * GROUP] **= 3  # heavy tails
    weights[2 * GROUP, ::7] *= 1000
    weights[3 * GROUP, 5] = 6e4
    weights[4 * GROUP : 5 * GROUP] = np.random.default_rng(9).integers(-200, 200, (GROUP, columns)) / 64
    weights[5 * GROUP :] *= 1e-4  # denormals of float16
    weights = weights.astype(np.float16).astype(np.float32)
    codes, tables = palettize(weights, bits, GROUP)
    for i in range(6):
        rows = slice(i * GROUP, (i + 1) * GROUP)
        ours = float(((tables[i, 0, :, 0].astype(np.float64)[codes[rows]] - weights[rows]) ** 2).sum())
        assert 0 < ours <= by_coremltools(weights[rows].astype(np.float16), bits) * (1 + 1e-12)


def test_threads_at_once_give_the_same_tables():
    blocks = [normal((GROUP * (1 + i), 256), seed=i) for i in range(6)]
    with ThreadPoolExecutor(3) as pool:
        for block, (codes, tables) in zip(blocks, pool.map(lambda w: palettize(w, 6, GROUP), blocks), strict=True):
            alone = palettize(block, 6, GROUP)
            assert (codes.tobytes(), tables.tobytes()) == (alone[0].tobytes(), alone[1].tobytes())
