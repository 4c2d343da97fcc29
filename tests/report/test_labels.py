"""Names in the picture: none lies on another, on a point or outside."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from pipeline.report.labels import Box, along, around, place, upright

INSIDE = Box(0.0, 0.0, 900.0, 600.0)
SIZE = (90.0, 16.0)


def test_the_area_that_two_boxes_share() -> None:
    box = Box(0.0, 0.0, 10.0, 4.0)
    assert box.area == 40.0
    assert box.shared(Box(8.0, 3.0, 20.0, 20.0)) == 2.0
    assert box.shared(Box(10.0, 0.0, 20.0, 4.0)) == 0.0  # they touch
    assert box.shared(Box(20.0, 20.0, 30.0, 30.0)) == 0.0
    assert (box.nearest((-1e5, 3.0)), box.nearest((4.0, 9.0))) == ((0.0, 3.0), (4.0, 4.0))
    assert around((5.0, 6.0), 2.0) == Box(4.0, 5.0, 6.0, 7.0)


def test_a_line_is_covered_by_squares() -> None:
    points = ((0.0, 0.0), (2.0, 1.0), (4.0, 2.0))
    assert along([(0.0, 0.0), (4.0, 2.0)], 2.0) == [around(point, 2.0) for point in points]
    assert along([(0.0, 0.0)], 2.0) == []
    assert len(along([(0.0, 0.0), (0.0, 0.0)], 2.0)) == 2


def test_a_name_alone_is_right_of_its_point() -> None:
    assert place({"a": (100.0, 100.0)}, {"a": SIZE}, [], INSIDE) == {"a": (109.0, 96.0)}


def test_a_name_that_would_leave_the_picture_is_left_of_its_point() -> None:
    ((x, _),) = place({"a": (850.0, 100.0)}, {"a": SIZE}, [], INSIDE).values()
    assert x + SIZE[0] == 850.0 - 9.0


@pytest.mark.parametrize("seed", range(20))
def test_twelve_crowded_names_lie_on_nothing(seed: int) -> None:
    """Points as a report has them, falling from left to right, in pairs that are close."""
    rng = np.random.default_rng(seed)
    x = np.repeat(np.sort(rng.uniform(50, 800, 6)), 2) + rng.uniform(0, 30, 12)
    y = np.repeat(np.linspace(550, 50, 6), 2) + rng.uniform(-15, 15, 12)
    points = {f"p{i}": (float(x[i]), float(y[i])) for i in range(12)}
    taken = [around(point, 11.0) for point in points.values()] + along(sorted(points.values()), 2.0)[::50]
    corners = place(points, dict.fromkeys(points, SIZE), taken, INSIDE)
    boxes = [Box(left, bottom, left + SIZE[0], bottom + SIZE[1]) for left, bottom in corners.values()]
    assert corners.keys() == points.keys()
    assert max(a.shared(b) for a, b in combinations([*boxes, *taken[:12]], 2) if a not in taken) == 0.0
    assert all(box.shared(INSIDE) == pytest.approx(box.area) for box in boxes)


def test_where_no_place_is_free_the_one_that_shares_least_is_taken() -> None:
    half = Box(0.0, 0.0, 900.0, 95.0)
    ((_, y),) = place({"a": (100.0, 60.0)}, {"a": SIZE}, [half, Box(0.0, 95.0, 900.0, 600.0), half], INSIDE).values()
    assert y >= 95.0  # twice taken is worse than once


def test_a_bar_is_a_box() -> None:
    assert upright((5.0, 1.0), (5.0, 9.0), 2.0) == Box(4.0, 1.0, 6.0, 9.0)


def test_a_thin_line_is_avoided_but_not_at_the_price_of_a_far_place() -> None:
    points, sizes = {"a": (400.0, 300.0)}, {"a": SIZE}
    right = [upright((x, 200.0), (x, 400.0), 2.0) for x in (450.0, 460.0)]
    ((x, _),) = place(points, sizes, [], INSIDE, right).values()
    assert x + SIZE[0] == 400.0 - 9.0  # as near on the other side
    around_it = [upright((x, 0.0), (x, 600.0), 2.0) for x in (340.0, 400.0, 430.0)]  # free beyond
    assert place(points, sizes, [], INSIDE, around_it) == {"a": (409.0, 296.0)}
    ((_, y),) = place(points, sizes, [Box(405.0, 290.0, 900.0, 310.0)], INSIDE, around_it).values()
    assert y == 296.0  # left of it, over a line; not over what is taken
