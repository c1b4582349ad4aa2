"""The order of the reads, and the layers that are chosen to be pinned."""

from __future__ import annotations

from offload.ring.order import ReadOrder


def test_layers_are_pinned_at_even_distances() -> None:
    order = ReadOrder(12, 2)
    assert order.chosen(3) == {2, 6, 10}
    assert len(order.chosen(99)) == order.max_pinned == 10
