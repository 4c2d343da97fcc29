"""Where names of points go in a picture, so that none lies on another. All in pixels, y upwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

Point = tuple[float, float]
GAPS = (9.0, 18.0, 30.0, 45.0)  # between a point and its name, the near ones first
PULL = 4.0  # a pixel farther from its point counts as that many square pixels of a thin line


@dataclass(frozen=True)
class Box:
    """A rectangle by its left, lower, right and upper edge."""

    left: float
    bottom: float
    right: float
    top: float

    def shared(self, other: Box) -> float:
        """The area that lies in both."""
        width = min(self.right, other.right) - max(self.left, other.left)
        height = min(self.top, other.top) - max(self.bottom, other.bottom)
        return max(0.0, width) * max(0.0, height)

    def nearest(self, point: Point) -> Point:
        """The point, or what is closest to it here: a KL of 0 lies far below a logarithmic axis."""
        x, y = point
        return min(max(x, self.left), self.right), min(max(y, self.bottom), self.top)

    @property
    def area(self) -> float:
        return (self.right - self.left) * (self.top - self.bottom)


def around(point: Point, side: float) -> Box:
    """A square with the point in its middle."""
    x, y = point
    return Box(x - side / 2, y - side / 2, x + side / 2, y + side / 2)


def along(points: Sequence[Point], width: float) -> list[Box]:
    """Squares of a side of `width` that cover the line through the points."""
    boxes = []
    for (x, y), (next_x, next_y) in pairwise(points):
        steps = max(1, round(max(abs(next_x - x), abs(next_y - y)) / width))
        shares = [step / steps for step in range(steps + 1)]
        boxes += [around((x + (next_x - x) * share, y + (next_y - y) * share), width) for share in shares]
    return boxes


def upright(lower: Point, upper: Point, width: float) -> Box:
    """A bar from one point up to the other."""
    return Box(lower[0] - width / 2, lower[1], upper[0] + width / 2, upper[1])


def place(
    points: Mapping[str, Point],
    sizes: Mapping[str, Point],
    taken: Sequence[Box],
    inside: Box,
    thin: Sequence[Box] = (),
) -> dict[str, Point]:
    """The left lower corner of each name of width and height `sizes`.

    The first place that is free is taken, near ones and those right of the point first; where none is, the one that
    shares least with what is `taken` or lies least out of `inside`. What is `thin` may be crossed rather than a name be
    far from its point. The lowest points choose first.
    """
    boxes, found = list(taken), {}
    for name in sorted(points, key=lambda n: points[n][::-1]):
        width, height = sizes[name]
        tried = [(gap, Box(x, y, x + width, y + height)) for gap, (x, y) in _corners(points[name], sizes[name])]
        costs = [
            (
                box.area - box.shared(inside) + sum(box.shared(other) for other in boxes),
                sum(box.shared(line) for line in thin) + PULL * gap,
            )
            for gap, box in tried
        ]
        _, best = tried[costs.index(min(costs))]
        boxes.append(best)
        found[name] = (best.left, best.bottom)
    return found


def _corners(point: Point, size: Point) -> Iterator[tuple[float, Point]]:
    """Gaps and left lower corners to try: right of the point, left, above and below it, then farther away."""
    (x, y), (width, height) = point, size
    for gap in GAPS:
        right, left, middle = x + gap, x - gap - width, x - width / 2
        for corner_x in (right, left):
            yield from ((gap, (corner_x, y + shift - height / 2)) for shift in (height / 4, height / 2, -height / 4))
        for corner_y in (y + gap, y - gap - height):
            yield from ((gap, (corner_x, corner_y)) for corner_x in (middle, right - gap, left + gap))
