"""Layer access that can pin some of the streamed layers in memory after their use.

A pinned layer keeps the memory of its slot: nothing is copied, the ring goes on with another slot,
and reads skip the layer until it is unpinned.
"""

from __future__ import annotations

from abc import abstractmethod

from offload.ring.cursor import AcquiredSlot, LayerCursor
from offload.ring.layer_access import AcquiredLayer, LayerAccess, LayerT
from offload.ring.slots import MemoryT


class PinningAccess(LayerAccess[MemoryT, LayerT]):
    """Layer access with pinned layers; see LayerAccess and `set_num_pinned`."""

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
        """Return memory for the ring in place of a pinned slot. Raises MemoryError."""

    def _keep(self, index: int, acquired_slot: AcquiredSlot[MemoryT]) -> None:
        """Note that layer `index` is pinned from now on, as it was acquired."""

    def _before_unpin(self, index: int) -> None:
        """Prepare layer `index` to be unpinned; its memory is closed after that."""

    def set_num_pinned(self, n_layers: int) -> int:
        """Set how many streamed layers to keep in memory after their next use; return how many are
        allowed. Surplus pinned layers are freed and acquired ones released at once.

        Each takes the memory of a slot beside those of the ring. The first of them are pinned in
        the next pass. When memory runs out, no more are pinned.
        """
        with self._lock:
            if self._is_freed:
                return 0
            self._to_pin = self._cursor.chosen(n_layers)
            self._num_to_pin = len(self._to_pin)
            surplus = list(self._cursor.pinned)[self._num_to_pin :]
            if surplus:
                self._cursor.abort_pass()
                self._end(self._acquired)
                for index in surplus:
                    self._before_unpin(index)
                    self._cursor.unpin(index).close()
                self._cursor.restart_at(0)
            return self._num_to_pin

    def set_pinned_bytes(self, n_bytes: int) -> None:
        """Pin as many layers as fit into `n_bytes`; see `set_num_pinned`."""
        if self.n_slots:
            self.set_num_pinned(n_bytes // (self.ring_bytes // self.n_slots))

    @property
    def num_pinned(self) -> int:
        """Number of pinned layers."""
        return len(self._cursor.pinned)

    @property
    def pinned_bytes(self) -> int:
        """Memory of the pinned layers."""
        return self.num_pinned * (self.ring_bytes // self.n_slots) if self.num_pinned else 0

    def _pin_after_use(self, acquired: AcquiredLayer[MemoryT]) -> bool:
        """Pin a layer that has been used, if it is to stay; return whether it is pinned."""
        # Never waits: an abandoned layer may be collected in any thread that has the ring's lock.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return acquired.has_arrived and not self._is_freed and self._try_pin(acquired)
        finally:
            self._lock.release()

    def _try_pin(self, acquired: AcquiredLayer[MemoryT]) -> bool:
        index, acquired_slot = acquired.index, acquired.acquired_slot
        if (
            acquired_slot is None
            or index not in self._to_pin
            or self.num_pinned >= self._num_to_pin
        ):
            return False
        try:
            other = self._new_slot()
        except MemoryError:
            self._num_to_pin = self.num_pinned
            return False
        if self._cursor.pin(index, acquired_slot, other):
            self._keep(index, acquired_slot)
            return True
        other.close()
        return False
