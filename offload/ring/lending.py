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

from offload.ring.slots import Check, MemoryT
from offload.ring.walk import LayerWalk, StreamStats, Taken
from offload.trace import LAYER, record_since

logger = logging.getLogger(__name__)

LoanT = TypeVar("LoanT")
"""What the caller gets of a layer."""


@dataclass(eq=False)
class Lease(Generic[MemoryT]):
    """One layer that is lent."""

    index: int
    taken: Taken[MemoryT] | None
    """None where nothing of the layer came through the ring."""
    entered: float = field(default_factory=time.perf_counter)
    has_arrived: bool = False


class LayerLender(ABC, Generic[MemoryT, LoanT]):
    """The layers of `walk`, one after another, over and over.

    One thread at a time walks the layers; `close` may be called by another one.
    """

    def __init__(self, walk: LayerWalk[MemoryT]) -> None:
        self._walk = walk
        self._leases: list[Lease[MemoryT]] = []
        """Of layers that are lent."""
        self._is_freed = False
        self._lock = threading.RLock()  # memory changes hands, or is given back for good

    @abstractmethod
    def _lend(self, index: int, taken: Taken[MemoryT] | None) -> LoanT:
        """A layer that has arrived; `taken` is None where nothing of it came through the ring."""

    def _take_back(self, taken: Taken[MemoryT]) -> None:
        """Before the slot of a layer is filled again."""

    def _is_kept(self, lease: Lease[MemoryT]) -> bool:
        """Whether a layer that has been used stays in memory; then it is not taken back."""
        return False

    @abstractmethod
    def _free(self) -> None:
        """Give back what is there beside the ring. The ring's slots are in use no more."""

    @contextmanager
    def layer(self, index: int, check: Check | None = None) -> Iterator[LoanT]:
        """`enter` and `leave`; what is lent is valid inside the with-block only."""
        lease, loan = self._enter(index, check)
        try:
            yield loan
        finally:  # not another walk's layer, should this run late
            self._end([lease])
        self._walk.leave(index)

    def enter(self, index: int, check: Check | None = None) -> LoanT:
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
        self._end([lease for lease in self._leases if lease.index == index])
        self._walk.leave(index)

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up; nothing is lent afterwards.

        Slots still lent are taken back. Nothing is read anew where layer 0 is the next one anyway.
        """
        if self._leases or not self._walk.is_at_start:
            self._walk.break_off()
            self._end(self._leases)
            self._walk.resume_at(0)

    @property
    def stats(self) -> StreamStats:
        return self._walk.stats

    @property
    def n_slots(self) -> int:
        return self._walk.n_slots

    @property
    def unread_bytes(self) -> int:
        """Of what stays in memory, what has not been read yet."""
        return self._walk.unread_bytes

    def stop(self) -> bool:
        """End all threads, and with StreamerClosed a wait for them; nothing is freed yet.

        Returns False where a read from storage does not return.
        """
        return self._walk.close()

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
                self._walk.free()
            else:
                # Its file and slot are in use: leaking them is the lesser evil.
                logger.warning("a read from storage does not return; its memory is not given back")
            self._is_freed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _enter(self, index: int, check: Check | None) -> tuple[Lease[MemoryT], LoanT]:
        self._walk.check(index)
        self._walk.seek(index, is_inside=bool(self._leases))
        lease = Lease(index, self._walk.take(index, check))
        self._leases.append(lease)
        try:
            loan = self._lend(index, lease.taken)
            self._walk.arrive(index)
            lease.has_arrived = True
        except BaseException:
            self._end([lease])
            raise
        return lease, loan

    def _end(self, leases: Iterable[Lease[MemoryT]]) -> None:
        """Take layers back and give the slots to the readers."""
        for lease in tuple(leases):
            if lease not in self._leases:
                continue
            if lease.taken is not None and not self._is_kept(lease):
                self._take_back(lease.taken)
                self._walk.give_back(lease.taken)
            self._leases.remove(lease)
            record_since(lease.entered, LAYER, f"layer {lease.index}")
