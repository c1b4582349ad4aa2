"""Access to the layers of a cursor, one at a time or several, also after errors.

Shared by `WeightStreamer`, `HostTier`, `DeviceStreamer` and `Pager`: a layer is valid from `enter`
to `leave`, or inside the with-block of `layer`, and `restart` releases all acquired layers.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from typing_extensions import Self

from offload.ring.cursor import AcquiredSlot, LayerCursor, StreamStats
from offload.ring.slots import Check, MemoryT
from offload.trace import LAYER, record_since

logger = logging.getLogger(__name__)

LayerT = TypeVar("LayerT")
"""Type of a layer's weights as the caller gets them."""


@dataclass(eq=False)
class AcquiredLayer(Generic[MemoryT]):
    """One layer that is acquired."""

    index: int
    acquired_slot: AcquiredSlot[MemoryT] | None
    """None if nothing of the layer came through the ring."""
    entered: float = field(default_factory=time.perf_counter)
    has_arrived: bool = False


class LayerAccess(ABC, Generic[MemoryT, LayerT]):
    """The layers of a cursor, one after another, over and over.

    One thread at a time uses the layers; `close` may be called by another one.
    """

    def __init__(self, cursor: LayerCursor[MemoryT]) -> None:
        self._cursor = cursor
        self._acquired: list[AcquiredLayer[MemoryT]] = []
        """Layers that are acquired."""
        self._is_freed = False
        self._lock = threading.RLock()  # while memory changes its owner, or is freed

    @abstractmethod
    def _acquire(self, index: int, acquired_slot: AcquiredSlot[MemoryT] | None) -> LayerT:
        """Return the weights of a layer that was read.

        acquired_slot: None if none of it was streamed.
        """

    def _take_back(self, acquired_slot: AcquiredSlot[MemoryT]) -> None:
        """Prepare a layer's slot to be filled again."""

    def _pin_after_use(self, acquired: AcquiredLayer[MemoryT]) -> bool:
        """Pin a used layer, if it is to stay; return whether it is pinned, not to be taken back."""
        return False

    @abstractmethod
    def _free(self) -> None:
        """Free what this has beside the ring. The ring's slots are not in use any more."""

    @contextmanager
    def layer(self, index: int, check: Check | None = None) -> Iterator[LayerT]:
        """`enter` and `leave` a layer; its weights are valid inside the with-block only."""
        acquired, weights = self._enter(index, check)
        try:
            yield weights
        finally:  # if this runs after a restart, a layer acquired since stays
            self._end([acquired])
        self._cursor.end_layer(index)

    def enter(self, index: int, check: Check | None = None) -> LayerT:
        """Wait until layer `index` is in memory; return its bytes as they are in the file.

        Layers are entered in cyclic order, as many at a time as there are slots; any other order
        (after a pass that was given up) discards what was read ahead. `check` is called regularly;
        what it raises interrupts the wait.

        Raises:
            StorageError: the layer could not be read, or (at the last layer of a pass) a file
                changed during the pass. The layer can be entered again, and is then read anew.
            StreamerClosed: this was closed.
        """
        return self._enter(index, check)[1]

    def leave(self, index: int) -> None:
        """Release layer `index`; does nothing if `restart` already did."""
        self._end([acquired for acquired in self._acquired if acquired.index == index])
        self._cursor.end_layer(index)

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up, with all layers released.

        Nothing is read again if layer 0 is the next one anyway.
        """
        if self._acquired or not self._cursor.is_at_start:
            self._cursor.abort_pass()
            self._end(self._acquired)
            self._cursor.restart_at(0)

    @property
    def stats(self) -> StreamStats:
        return self._cursor.stats

    @property
    def n_slots(self) -> int:
        return self._cursor.n_slots

    @property
    def unread_bytes(self) -> int:
        """Bytes that stay in memory, but have not been read yet."""
        return self._cursor.unread_bytes

    def stop(self) -> bool:
        """End all threads, and waits for them with StreamerClosed; nothing is freed yet.

        Returns False if a read from storage does not return.
        """
        return self._cursor.close()

    def close(self) -> None:
        """Stop all threads and free the memory; waiting callers get StreamerClosed."""
        if self._is_freed:
            return
        has_ended = self.stop()
        with self._lock:
            if self._is_freed:
                return
            self._free()
            if has_ended:
                self._cursor.free()
            else:
                # Its file and slot are in use: leaking them is the lesser evil.
                logger.warning("a read from storage does not return; its memory is not freed")
            self._is_freed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _enter(self, index: int, check: Check | None) -> tuple[AcquiredLayer[MemoryT], LayerT]:
        self._cursor.check(index)
        self._cursor.begin_layer(index, is_inside=bool(self._acquired))
        acquired = AcquiredLayer(index, self._cursor.acquire(index, check))
        self._acquired.append(acquired)
        try:
            weights = self._acquire(index, acquired.acquired_slot)
            self._cursor.mark_ready(index)
            acquired.has_arrived = True
        except BaseException:
            self._end([acquired])
            raise
        return acquired, weights

    def _end(self, acquired_layers: Iterable[AcquiredLayer[MemoryT]]) -> None:
        """Take layers back and release their slots to the readers."""
        for acquired in tuple(acquired_layers):
            if acquired not in self._acquired:
                continue
            if acquired.acquired_slot is not None and not self._pin_after_use(acquired):
                self._take_back(acquired.acquired_slot)
                self._cursor.release(acquired.acquired_slot)
            self._acquired.remove(acquired)
            record_since(acquired.entered, LAYER, f"layer {acquired.index}")
