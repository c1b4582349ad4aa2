"""Lends the layers of a walk, one at a time or several, whatever an error cuts short.

What `WeightStreamer`, `HostTier`, `DeviceStreamer` and `Pager` have in common: a layer is valid
from `enter` to `leave`, or inside the with-block of `layer`, and `restart` takes back whatever is
still lent.
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

from offload.ring.cursor import LayerCursor, StreamStats, Taken
from offload.ring.slots import Check, MemoryT
from offload.trace import LAYER, record_since

logger = logging.getLogger(__name__)

LayerT = TypeVar("LayerT")
"""What the caller gets of a layer."""


@dataclass(eq=False)
class AcquiredLayer(Generic[MemoryT]):
    """One layer that is lent."""

    index: int
    taken: Taken[MemoryT] | None
    """None where nothing of the layer came through the ring."""
    entered: float = field(default_factory=time.perf_counter)
    has_arrived: bool = False


class LayerAccess(ABC, Generic[MemoryT, LayerT]):
    """The layers of `walk`, one after another, over and over.

    One thread at a time walks the layers; `close` may be called by another one.
    """

    def __init__(self, cursor: LayerCursor[MemoryT]) -> None:
        self._cursor = cursor
        self._acquired: list[AcquiredLayer[MemoryT]] = []
        """Of layers that are lent."""
        self._is_freed = False
        self._lock = threading.RLock()  # memory changes hands, or is given back for good

    @abstractmethod
    def _acquire(self, index: int, taken: Taken[MemoryT] | None) -> LayerT:
        """A layer that has arrived; `taken` is None where nothing of it came through the ring."""

    def _take_back(self, taken: Taken[MemoryT]) -> None:
        """Before the slot of a layer is filled again."""

    def _is_retained(self, acquired: AcquiredLayer[MemoryT]) -> bool:
        """Whether a layer that has been used stays in memory; then it is not taken back."""
        return False

    @abstractmethod
    def _free(self) -> None:
        """Give back what is there beside the ring. The ring's slots are in use no more."""

    @contextmanager
    def layer(self, index: int, check: Check | None = None) -> Iterator[LayerT]:
        """`enter` and `leave`; what is lent is valid inside the with-block only."""
        acquired, layer_mapping = self._enter(index, check)
        try:
            yield layer_mapping
        finally:  # not another walk's layer, should this run late
            self._end([acquired])
        self._cursor.leave(index)

    def enter(self, index: int, check: Check | None = None) -> LayerT:
        """Wait until layer `index` is in memory; its bytes in its file's byte order and layout.

        Layers are asked for in cyclic order, as many at a time as there are slots; any other
        request (a pass that was given up and begins anew) costs what was read ahead. `check` is
        called again and again; what it raises interrupts the wait.

        Raises:
            StorageError: the layer could not be read, or (at the last layer of a pass) a file
                changed under the pass. It can be asked for again, and is then read anew.
            StreamerClosed: it was closed.
        """
        return self._enter(index, check)[1]

    def leave(self, index: int) -> None:
        """Take layer `index` back; nothing happens where `restart` already did."""
        self._end([acquired for acquired in self._acquired if acquired.index == index])
        self._cursor.leave(index)

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up; nothing is lent afterwards.

        Slots still lent are taken back. Nothing is read anew where layer 0 is the next one anyway.
        """
        if self._acquired or not self._cursor.is_at_start:
            self._cursor.break_off()
            self._end(self._acquired)
            self._cursor.resume_at(0)

    @property
    def stats(self) -> StreamStats:
        return self._cursor.stats

    @property
    def n_slots(self) -> int:
        return self._cursor.n_slots

    @property
    def unread_bytes(self) -> int:
        """Of what stays in memory, what has not been read yet."""
        return self._cursor.unread_bytes

    def stop(self) -> bool:
        """End all threads, and with StreamerClosed a wait for them; nothing is freed yet.

        Returns False where a read from storage does not return.
        """
        return self._cursor.close()

    def close(self) -> None:
        """Stop all threads and give the memory back; a caller that waits gets StreamerClosed."""
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
                logger.warning("a read from storage does not return; its memory is not given back")
            self._is_freed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _enter(self, index: int, check: Check | None) -> tuple[AcquiredLayer[MemoryT], LayerT]:
        self._cursor.check(index)
        self._cursor.seek(index, is_inside=bool(self._acquired))
        acquired = AcquiredLayer(index, self._cursor.take(index, check))
        self._acquired.append(acquired)
        try:
            layer_mapping = self._acquire(index, acquired.taken)
            self._cursor.reach(index)
            acquired.has_arrived = True
        except BaseException:
            self._end([acquired])
            raise
        return acquired, layer_mapping

    def _end(self, acquired_layers: Iterable[AcquiredLayer[MemoryT]]) -> None:
        """Take layers back and give the slots to the readers."""
        for acquired in tuple(acquired_layers):
            if acquired not in self._acquired:
                continue
            if acquired.taken is not None and not self._is_retained(acquired):
                self._take_back(acquired.taken)
                self._cursor.give_back(acquired.taken)
            self._acquired.remove(acquired)
            record_since(acquired.entered, LAYER, f"layer {acquired.index}")
