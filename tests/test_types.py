"""Rows of tensors that lie in many places."""

from __future__ import annotations

from pipeline.types import Span, TensorSpec


def test_rows_are_taken_from_where_they_lie() -> None:
    spans = (Span("a", (9, 2), 4, 3), Span("b", (2, 2), 0, 2), Span("c", (8, 2), 1, 5))  # rows 0-2, 3-4, 5-9
    tensor = TensorSpec("x", "", None, (10, 2), spans=spans)
    assert tensor.taken([(0, 10)]) == spans
    assert tensor.taken([(1, 1)]) == (Span("a", (9, 2), 5, 1),)
    assert tensor.taken([(2, 4)]) == (Span("a", (9, 2), 6, 1), Span("b", (2, 2), 0, 2), Span("c", (8, 2), 1, 1))
    assert tensor.taken([(5, 5), (3, 1)]) == (Span("c", (8, 2), 1, 5), Span("b", (2, 2), 0, 1))
    assert tensor.taken([(0, 0), (10, 3)]) == ()


def test_without_spans_rows_are_those_of_its_own_name() -> None:
    matrix, vector = TensorSpec("x", "", None, (3, 4, 2)), TensorSpec("y", "", None, (5,))
    assert matrix.taken([(5, 3)]) == (Span("x", (3, 4, 2), 5, 3),)
    assert vector.taken([(0, 1)]) == (Span("y", (5,), 0, 1),)
