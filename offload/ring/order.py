"""The layer of each read sequence number: the streamed layers in a cycle, except pinned ones.

A pinned layer stays in memory after its use and is skipped from then on.
"""

from __future__ import annotations

from offload.placement.plan import spread


class ReadOrder:
    """The cyclic order of the layers that stream, numbered by `position`, 0 to n_layers - 1.

    The ring asks for one read sequence number after the other, `begin_at` says where to begin. The
    caller holds the ring's lock: the next layer to read changes with the state of the ring.

    Args:
        n_layers: number of layers that stream, one at least.
        n_slots: slots of the ring. The readers are at most so many reads ahead; as many layers are
            never pinned, so that no layer is read into two slots.
    """

    def __init__(self, n_layers: int, n_slots: int) -> None:
        self._n_layers, self._n_slots = n_layers, n_slots
        self._pinned: set[int] = set()
        self._latest = (0, 0)
        """The last read sequence number that was asked for, and its layer's position."""

    def position(self, read_number: int) -> int:
        """Return the layer position of this read. Read numbers must be asked for consecutively."""
        latest, position = self._latest
        if read_number != latest:
            assert read_number == latest + 1, (read_number, latest)
            position = self._next(position + 1)
            self._latest = (read_number, position)
        return position

    def begin_at(self, read_number: int, position: int) -> None:
        """Continue with `read_number` at the first layer from `position` on."""
        self._latest = (read_number, self._next(position))

    def chosen(self, n_layers: int) -> frozenset[int]:
        """Choose `n_layers` layers to pin, or as many as may be: evenly spaced, so that reads go on
        while those between them are computed."""
        return frozenset(spread(min(n_layers, self.max_pinned), self._n_layers))

    @property
    def max_pinned(self) -> int:
        return max(0, self._n_layers - self._n_slots)

    def pin(self, position: int) -> None:
        """Skip this layer from now on."""
        if len(self._pinned) >= self.max_pinned:
            raise ValueError(f"{self._n_slots} of {self._n_layers} layers have to stream")
        self._pinned.add(position)

    def unpin(self, position: int) -> None:
        """Stream the layer again; the caller restarts the ring."""
        self._pinned.discard(position)

    def _next(self, position: int) -> int:
        while position % self._n_layers in self._pinned:
            position += 1
        return position % self._n_layers
