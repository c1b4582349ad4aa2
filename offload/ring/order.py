"""Which layer each ticket of a ring is for: those that stream, in a cycle, but for held ones.

A held layer stays in memory after its use and is passed over from then on.
"""

from __future__ import annotations

import threading

from offload.residency.plan import spread


class TicketOrder:
    """Layers that stream are numbered by `position`, 0 to n_layers - 1, in the order of use.

    The ring asks for one ticket after the other, `begin_at` says where a walk begins.

    Args:
        n_layers: that stream, one at least.
        n_slots: of the ring. The readers are at most so many tickets ahead; as many layers are
            never held, so that no layer is under way twice.
    """

    def __init__(self, n_layers: int, n_slots: int) -> None:
        self._n_layers, self._n_slots = n_layers, n_slots
        self._held: set[int] = set()
        self._positions: dict[int, int] = {0: 0}
        """Of the latest tickets."""
        self._n_kept = 3 * n_slots + 2
        self._lock = threading.Lock()

    def position(self, ticket: int) -> int:
        """Of the layer that this ticket is for; the ticket before it was asked for."""
        with self._lock:
            if ticket not in self._positions:
                before = self._positions.get(ticket - 1, -1)
                self._positions[ticket] = self._next(before + 1)
                self._positions.pop(ticket - self._n_kept, None)
            return self._positions[ticket]

    def begin_at(self, ticket: int, position: int) -> None:
        """The next ticket is `ticket`, for the first layer from `position` on.

        What earlier tickets are for stays: a reader may be about to begin with one of them.
        """
        with self._lock:
            self._positions = {
                t: at for t, at in self._positions.items() if t >= ticket - self._n_kept
            }
            self._positions[ticket] = self._next(position)

    def chosen(self, n_layers: int) -> frozenset[int]:
        """So many layers to hold, or as many as may be: in even distances, so that reads go on
        while those between them are computed."""
        return frozenset(spread(min(n_layers, self.most_held), self._n_layers))

    @property
    def most_held(self) -> int:
        return max(0, self._n_layers - self._n_slots)

    def hold(self, position: int) -> None:
        """Pass over this layer from now on."""
        with self._lock:
            if len(self._held) >= self.most_held:
                raise ValueError(f"{self._n_slots} of {self._n_layers} layers have to stream")
            self._held.add(position)

    def let_go(self, position: int) -> None:
        """The layer streams again; the walk has to begin anew."""
        with self._lock:
            self._held.discard(position)

    def _next(self, position: int) -> int:
        while position % self._n_layers in self._held:
            position += 1
        return position % self._n_layers
