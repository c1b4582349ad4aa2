"""Lends layers, and keeps some of those that stream in memory after their use.

A held layer takes the memory of a slot with it: nothing is copied, the ring goes on with another
slot, and reads pass over the layer until it is let go.
"""

from __future__ import annotations

from abc import abstractmethod

from offload.ring.lending import LayerLender, Lease, LoanT
from offload.ring.slots import MemoryT
from offload.ring.walk import LayerWalk, Taken


class HoldingLender(LayerLender[MemoryT, LoanT]):
    """See LayerLender and `hold`."""

    def __init__(self, walk: LayerWalk[MemoryT]) -> None:
        super().__init__(walk)
        self._to_hold: frozenset[int] = frozenset()
        self._n_to_hold = 0

    @property
    @abstractmethod
    def ring_bytes(self) -> int:
        """Memory of the ring, all slots being equal."""

    @abstractmethod
    def _new_slot(self) -> MemoryT:
        """Memory for the ring in the place of a slot that is held. Raises MemoryError."""

    def _keep(self, index: int, taken: Taken[MemoryT]) -> None:
        """Layer `index` is held from now on, as it was lent."""

    def _let_go(self, index: int) -> None:
        """Layer `index` is not to be held any longer; its memory is closed after that."""

    def hold(self, n_layers: int) -> int:
        """Let up to so many layers that stream stay in memory after their next use, each with the
        memory of a slot beside those of the ring; returns how many may. Those that are more are
        given back at once, and what is lent is taken back, as by `restart`.

        The first of them stay in the next pass. Where there is no memory for another one, those
        that are held have to do.
        """
        with self._lock:
            if self._is_freed:
                return 0
            self._to_hold = self._walk.chosen(n_layers)
            self._n_to_hold = len(self._to_hold)
            surplus = list(self._walk.held)[self._n_to_hold :]
            if surplus:
                self._walk.break_off()
                self._end(self._leases)
                for index in surplus:
                    self._let_go(index)
                    self._walk.let_go(index).close()
                self._walk.resume_at(0)
            return self._n_to_hold

    def hold_bytes(self, n_bytes: int) -> None:
        """`hold` as many as so many bytes are enough for."""
        if self.n_slots:
            self.hold(n_bytes // (self.ring_bytes // self.n_slots))

    @property
    def n_held(self) -> int:
        """Layers that would stream, and are in memory."""
        return len(self._walk.held)

    @property
    def held_bytes(self) -> int:
        """Their memory."""
        return self.n_held * (self.ring_bytes // self.n_slots) if self.n_held else 0

    def _is_kept(self, lease: Lease[MemoryT]) -> bool:
        """Hold a layer that has been used, if it is one of those that are to stay."""
        # Never waited for: a forgotten lease may be collected in any thread, with the ring's lock.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return lease.has_arrived and not self._is_freed and self._is_held_now(lease)
        finally:
            self._lock.release()

    def _is_held_now(self, lease: Lease[MemoryT]) -> bool:
        index, taken = lease.index, lease.taken
        if taken is None or index not in self._to_hold or self.n_held >= self._n_to_hold:
            return False
        try:
            other = self._new_slot()
        except MemoryError:
            self._n_to_hold = self.n_held
            return False
        if self._walk.hold(index, taken, other):
            self._keep(index, taken)
            return True
        other.close()
        return False
