"""Lends layers, and keeps some of those that stream in memory after their use.

A held layer takes the memory of a slot with it: nothing is copied, the ring goes on with another
slot, and reads pass over the layer until it is let go.
"""

from __future__ import annotations

from abc import abstractmethod

from offload.ring.cursor import LayerCursor, Taken
from offload.ring.layer_access import AcquiredLayer, LayerAccess, LayerT
from offload.ring.slots import MemoryT


class PinningAccess(LayerAccess[MemoryT, LayerT]):
    """See LayerLender and `hold`."""

    def __init__(self, cursor: LayerCursor[MemoryT]) -> None:
        super().__init__(cursor)
        self._to_pin: frozenset[int] = frozenset()
        self._num_to_pin = 0

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

    def pin_layers(self, n_layers: int) -> int:
        """Let up to so many layers that stream stay in memory after their next use, each with the
        memory of a slot beside those of the ring; returns how many may. Those that are more are
        given back at once, and what is lent is taken back, as by `restart`.

        The first of them stay in the next pass. Where there is no memory for another one, those
        that are held have to do.
        """
        with self._lock:
            if self._is_freed:
                return 0
            self._to_pin = self._cursor.chosen(n_layers)
            self._num_to_pin = len(self._to_pin)
            surplus = list(self._cursor.pinned)[self._num_to_pin :]
            if surplus:
                self._cursor.break_off()
                self._end(self._acquired)
                for index in surplus:
                    self._let_go(index)
                    self._cursor.let_go(index).close()
                self._cursor.resume_at(0)
            return self._num_to_pin

    def pin_bytes(self, n_bytes: int) -> None:
        """`hold` as many as so many bytes are enough for."""
        if self.n_slots:
            self.pin_layers(n_bytes // (self.ring_bytes // self.n_slots))

    @property
    def num_pinned(self) -> int:
        """Layers that would stream, and are in memory."""
        return len(self._cursor.pinned)

    @property
    def pinned_bytes(self) -> int:
        """Their memory."""
        return self.num_pinned * (self.ring_bytes // self.n_slots) if self.num_pinned else 0

    def _is_retained(self, acquired: AcquiredLayer[MemoryT]) -> bool:
        """Hold a layer that has been used, if it is one of those that are to stay."""
        # Never waited for: a forgotten lease may be collected in any thread, with the ring's lock.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return acquired.has_arrived and not self._is_freed and self._is_pinned_now(acquired)
        finally:
            self._lock.release()

    def _is_pinned_now(self, acquired: AcquiredLayer[MemoryT]) -> bool:
        index, taken = acquired.index, acquired.taken
        if taken is None or index not in self._to_pin or self.num_pinned >= self._num_to_pin:
            return False
        try:
            other = self._new_slot()
        except MemoryError:
            self._num_to_pin = self.num_pinned
            return False
        if self._cursor.pin_layers(index, taken, other):
            self._keep(index, taken)
            return True
        other.close()
        return False
