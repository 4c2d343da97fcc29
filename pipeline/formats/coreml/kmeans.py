"""Optimal one-dimensional k-means of many groups at once, in numpy.

Clusters of sorted values are intervals, so a clustering is a path over the cuts between values, and each interval
costs the squared error around its mean. These costs are Monge, from which three facts follow (Aggarwal, Schieber,
Tokuyama 1994: Finding a minimum-weight k-link path in graphs with the concave Monge property): where every cluster has
a price beside its error, one sweep finds the best path of any length; a lower price never leads to fewer clusters; and
the best path of k clusters interleaves with the best ones of other lengths. So a price is looked for that leads to
about k clusters, and the path of exactly k is looked for between the cuts of that path. Nothing is approximated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Doubles = NDArray[np.float64]
Integers = NDArray[np.int64]

CELLS = 8
"""Cuts for each cluster in the coarse problem that prices are first looked for in."""

REFRESH = 8  # cuts between two looks at where the windows of a sweep begin

MOST_SWEEPS = 12
"""Over one problem. Where values lie so that no price leads near to `k` clusters, the path has far to go from there."""

MOST_PAIRS = 1 << 20  # of cuts, looked at together


@dataclass(frozen=True)
class _Sums:
    """Of the values before each cut, float64 [cuts, groups]: how many, their sum, the sum of their squares.

    A group has `last` + 1 cuts; what follows only fills the columns up.
    """

    count: Doubles
    first: Doubles
    second: Doubles
    last: Integers

    def of(self, groups: Integers) -> _Sums:
        last = self.last[groups]
        count, first, second = (
            np.ascontiguousarray(x[: last.max() + 1, groups]) for x in (self.count, self.first, self.second)
        )
        return _Sums(count, first, second, last)


def centroids(ordered: NDArray[np.float32], k: int) -> Doubles:
    """Means [groups, k] of the `k` clusters of each group that have the least squared error, in ascending order.

    `ordered` [groups, weights] is finite and ascending. A group of `k` distinct values or fewer has them as its
    clusters, and its last again in the places that are left.
    """
    tables = np.empty((len(ordered), k))
    distinct = np.ones(ordered.shape, bool)
    np.not_equal(ordered[:, 1:], ordered[:, :-1], out=distinct[:, 1:])
    starts = [np.flatnonzero(row) for row in distinct]
    many = np.array([len(at) > k for at in starts])
    for group in np.flatnonzero(~many):
        values = ordered[group, starts[group]]
        tables[group] = values[np.minimum(np.arange(k), len(values) - 1)]
    if many.any():
        chosen = np.flatnonzero(many)
        sums, measure = _prepared([ordered[group] for group in chosen], [starts[group] for group in chosen], k)
        for i, cuts in enumerate(_best(sums, measure, k)):
            tables[chosen[i]] = np.diff(sums.first[cuts, i]) / np.diff(sums.count[cuts, i])
    return tables


def _prepared(ordered: Sequence[NDArray[np.float32]], starts: Sequence[Integers], k: int) -> tuple[_Sums, Doubles]:
    """The sums of distinct values, and a measure [cuts, groups] of which every cluster has about an equal share:
    the third root of the density (Panter and Dite 1951), integrated up to each cut.
    """
    last = np.array([len(at) for at in starts])
    shape = (last.max() + 1, len(last))
    count, first, second, gaps = (np.zeros(shape) for _ in range(4))
    for i, (row, at) in enumerate(zip(ordered, starts, strict=True)):
        inner = slice(1, len(at) + 1)
        values = row[at].astype(np.float64)
        count[inner, i] = np.diff(at, append=len(row))
        first[inner, i] = values
        gaps[2 : len(at) + 1, i] = np.diff(values)
    np.multiply(count, first, out=second)
    measure = np.cbrt(count * gaps * gaps)
    for _ in range(4):  # the gap before an outlier is no more than one cluster's share
        np.minimum(measure, measure.sum(0) / k, out=measure)
    sums = [np.cumsum(x, 0) for x in (count, second, second * first)]
    beyond = np.arange(shape[0])[:, None] - last
    sums[0] += np.maximum(beyond, 0)  # no division by zero in what fills up
    return _Sums(sums[0], sums[1], sums[2], last), np.cumsum(measure, 0)


def _best(sums: _Sums, measure: Doubles, k: int) -> list[Integers]:
    """The cuts [k + 1] of each group's best `k` clusters, of more than `k` values."""
    prices = (measure[-1] / k) ** 3 / 6  # of Panter and Dite's error, by its slope
    if len(measure) > 2 * CELLS * k:
        cells = (measure * (CELLS * k / measure[-1])).astype(np.int64)
        kept = np.empty(cells.shape, bool)
        np.not_equal(cells[1:], cells[:-1], out=kept[:-1])
        kept[0] = True
        kept[np.arange(len(kept))[:, None] >= sums.last] = False
        kept[sums.last, np.arange(len(sums.last))] = True
        chosen = np.flatnonzero(kept.sum(0) > k + 1)
        if chosen.size:
            _, prices[chosen] = _near(_subset(sums, kept, chosen), prices[chosen], k)
    paths, _ = _near(sums, prices, k)
    return [path if len(path) == k + 1 else _exactly(sums, i, path, k) for i, path in enumerate(paths)]


def _subset(sums: _Sums, kept: NDArray[np.bool_], groups: Integers) -> _Sums:
    """The problem in which only the cuts that are `kept` may be made."""
    at = [np.flatnonzero(kept[:, group]) for group in groups]
    last = np.array([len(cuts) - 1 for cuts in at])
    length = last.max() + 1
    picked = [np.zeros((length, len(groups))) for _ in range(3)]
    for i, (group, cuts) in enumerate(zip(groups, at, strict=True)):
        for new, old in zip(picked, (sums.count, sums.first, sums.second), strict=True):
            new[: len(cuts), i] = old[cuts, group]
            new[len(cuts) :, i] = new[len(cuts) - 1, i]
    picked[0] += np.maximum(np.arange(length)[:, None] - last, 0)
    return _Sums(picked[0], picked[1], picked[2], last)


def _near(sums: _Sums, prices: Doubles, k: int) -> tuple[list[Integers], Doubles]:
    """The cuts of each group's best path of about `k` clusters, and a price for `k` itself."""
    prices = prices.copy()
    low, high = np.zeros(len(prices)), np.full(len(prices), np.inf)  # prices known to lead to more, to fewer
    nearest = [np.arange(n + 1) for n in sums.last]
    left = np.arange(len(prices))
    for _ in range(MOST_SWEEPS):
        for i, path in zip(left, _sweep(sums.of(left), prices[left]), strict=True):
            clusters = len(path) - 1
            if abs(clusters - k) < abs(len(nearest[i]) - 1 - k):
                nearest[i] = path
            if clusters > k:
                low[i] = prices[i]
            else:
                high[i] = prices[i]
            guess = prices[i] * (clusters / k) ** 3  # the error falls about with the square of their number
            prices[i] = guess if low[i] < guess < high[i] or clusters == k else np.sqrt(low[i] * high[i])
        left = left[[abs(len(nearest[i]) - 1 - k) > max(1, k // 32) for i in left]]
        if not left.size:
            break
    return nearest, prices


def _exactly(sums: _Sums, group: int, path: Integers, k: int) -> Integers:
    """The cuts of a group's best `k` clusters, from those of its best path of another number of clusters.

    Cut m lies between the cuts of `path` that are m-th from its begin and from its end, both counted as of `k`.
    """
    ahead = len(path) - 1 - k
    m = np.arange(k + 1)
    ends = [path[np.clip(at, 0, len(path) - 1)] for at in (m, m + ahead)]
    starts, stops = np.minimum(*ends), np.maximum(*ends) + 1
    stops[0], starts[k] = 1, path[-1]
    count, first = sums.count[:, group], sums.first[:, group]
    best = np.zeros(1)
    before = []
    for i in range(k):
        here, there = slice(starts[i], stops[i]), np.arange(starts[i + 1], stops[i + 1])
        parts = [
            _nearest(count[part, None] - count[here], first[part, None] - first[here], best)
            for part in np.array_split(there, -(-len(there) * len(best) // MOST_PAIRS))
        ]
        before.append(np.concatenate([at for at, _ in parts]))
        best = np.concatenate([least for _, least in parts])
    cuts = np.empty(k + 1, np.int64)
    at = 0
    for i in range(k, 0, -1):
        cuts[i] = starts[i] + at
        at = before[i - 1][at]
    cuts[0] = 0
    return cuts


def _nearest(counts: Doubles, sums: Doubles, best: Doubles) -> tuple[Integers, Doubles]:
    """For each row the place of the best cut before it, and the cost by it; a cluster without values is none."""
    np.multiply(sums, sums, out=sums)
    costs = best - np.divide(sums, counts, out=np.full(counts.shape, -np.inf), where=counts > 0)
    return costs.argmin(1), costs.min(1)


def _sweep(sums: _Sums, prices: Doubles) -> list[Integers]:
    """The cuts of each group's best path where every cluster costs its price beside its error.

    The cut before the best cut never moves back as a path's end moves on, so only a window is looked at.
    """
    cuts, groups = sums.count.shape
    best = np.empty((cuts, groups))  # of a path to each cut: its cost, less the squares up to there
    best[0] = 0
    one, other = np.empty((2, cuts, groups))
    begins = np.zeros(cuts, np.int64)
    begin = 0
    for j in range(1, cuts):
        begins[j] = begin
        window = slice(begin, j)
        means, counts = one[: j - begin], other[: j - begin]
        np.subtract(sums.first[j], sums.first[window], out=means)
        np.multiply(means, means, out=means)
        np.subtract(sums.count[j], sums.count[window], out=counts)
        np.divide(means, counts, out=means)
        np.subtract(best[window], means, out=means)
        np.minimum.reduce(means, 0, out=best[j])
        best[j] += prices
        if j % REFRESH == 0:
            begin += int(np.where(sums.last >= j, means.argmin(0), j).min(initial=j - begin - 1))
    return _traced(sums, best, begins)


def _traced(sums: _Sums, best: Doubles, begins: Integers) -> list[Integers]:
    """The cuts on the path that the costs of a sweep came by, from the last cut back to the first."""
    groups = best.shape[1]
    active = np.arange(groups)
    at = sums.last.copy()
    steps = [at.copy()]
    while active.size:
        here = at[active]
        width = int((here - begins[here]).max())
        before = np.maximum(here - 1 - np.arange(width)[:, None], 0)
        places, ends = before * groups + active, here * groups + active
        means = sums.first.take(ends) - sums.first.take(places)
        means *= means
        means /= sums.count.take(ends) - sums.count.take(places)
        nearest = np.subtract(best.take(places), means, out=means).argmin(0)
        at[active] = before[nearest, np.arange(len(active))]
        steps.append(at.copy())
        active = active[at[active] > 0]
    paths = np.array(steps[::-1])
    return [path[np.flatnonzero(path)[0] - 1 :] if path[0] == 0 else path for path in paths.T]
