"""Which layer each ticket of a ring is for: those that stream, in a cycle, but for held ones.

A held layer stays in memory after its use and is passed over from then on.
"""

from __future__ import annotations

from offload.placement.plan import spread


class ReadOrder:
    """Layers that stream are numbered by `position`, 0 to n_layers - 1, in the order of use.

    The ring asks for one ticket after the other, `begin_at` says where a walk begins. Whoever calls
    holds the ring's lock: what a reader is to bring next changes with what the ring has.

    Args:
        n_layers: that stream, one at least.
        n_slots: of the ring. The readers are at most so many tickets ahead; as many layers are
            never held, so that no layer is under way twice.
    """

    def __init__(self, n_layers: int, n_slots: int) -> None:
        self._n_layers, self._n_slots = n_layers, n_slots
        self._pinned: set[int] = set()
        self._latest = (0, 0)
        """The last ticket that was asked for, and its layer's position."""

    def position(self, read_number: int) -> int:
        """Of the layer that this ticket is for; the ticket before it was asked for."""
        latest, position = self._latest
        if read_number != latest:
            assert read_number == latest + 1, (read_number, latest)
            position = self._next(position + 1)
            self._latest = (read_number, position)
        return position

    def begin_at(self, read_number: int, position: int) -> None:
        """The next ticket is `ticket`, for the first layer from `position` on."""
        self._latest = (read_number, self._next(position))

    def chosen(self, n_layers: int) -> frozenset[int]:
        """So many layers to hold, or as many as may be: in even distances, so that reads go on
        while those between them are computed."""
        return frozenset(spread(min(n_layers, self.max_pinned), self._n_layers))

    @property
    def max_pinned(self) -> int:
        return max(0, self._n_layers - self._n_slots)

    def pin_layers(self, position: int) -> None:
        """Pass over this layer from now on."""
        if len(self._pinned) >= self.max_pinned:
            raise ValueError(f"{self._n_slots} of {self._n_layers} layers have to stream")
        self._pinned.add(position)

    def let_go(self, position: int) -> None:
        """The layer streams again; the walk has to begin anew."""
        self._pinned.discard(position)

    def _next(self, position: int) -> int:
        while position % self._n_layers in self._pinned:
            position += 1
        return position % self._n_layers
