"""Lends the layers of a walk in with-blocks, whatever an error or Ctrl-C cuts short.

What `WeightStreamer`, `HostTier` and `DeviceStreamer` have in common: a layer is valid inside its
with-block, is given back at the end of it, and `restart` takes back whatever is still lent.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from typing_extensions import Self

from offload.ring.slots import Check, MemoryT
from offload.ring.walk import LayerWalk, Taken
from offload.trace import LAYER, record_since

logger = logging.getLogger(__name__)

LoanT = TypeVar("LoanT")
"""What the caller gets of a layer."""


class LayerLender(ABC, Generic[MemoryT, LoanT]):
    """The layers of `walk`, one after another, over and over.

    One thread at a time walks the layers; `close` may be called by another one.
    """

    def __init__(self, walk: LayerWalk[MemoryT]) -> None:
        self._walk = walk
        self._leases: list[Taken[MemoryT]] = []
        self._is_freed = False

    @abstractmethod
    def _lend(self, index: int, lease: Taken[MemoryT] | None) -> LoanT:
        """A layer that has arrived; `lease` is None where nothing of it came through the ring."""

    @abstractmethod
    def _free(self) -> None:
        """Give the memory back, the ring's included; no thread of ours is running."""

    @contextmanager
    def layer(self, index: int, check: Check | None = None) -> Iterator[LoanT]:
        """The bytes of layer `index`, in its file's byte order and layout.

        They are valid inside the with-block only: afterwards the slot holds another layer. Layers
        are asked for in cyclic order; any other request (a pass that was given up and begins anew)
        costs what was read ahead. Ctrl-C interrupts the wait, and so does what `check` raises,
        which is called again and again.

        Raises:
            StorageError: the layer could not be read, or (at the last layer of a pass) a file
                changed under the pass. The streamer can be used again; it then reads anew.
            StreamerClosed: it was closed.
        """
        lease = self._acquire(index, check)
        entered = time.perf_counter()
        try:
            yield self._lend(index, lease)
        finally:
            self._release(lease)
            record_since(entered, LAYER, f"layer {index}")
        self._walk.leave(index)

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up.

        Slots still lent are taken back, by what the ring says: an interrupt may have come between
        its doing and ours. Nothing is read anew where layer 0 is the next one anyway. When this is
        interrupted itself, call it again.
        """
        if self._leases or not self._walk.is_at_start:
            self._walk.break_off()
            self._leases.clear()
            self._walk.resume_at(0)

    @property
    def n_slots(self) -> int:
        return self._walk.n_slots

    def stop(self) -> bool:
        """End all threads, and with StreamerClosed a wait for them; nothing is freed yet.

        Returns False where a read from storage does not return.
        """
        return self._walk.close()

    def close(self) -> None:
        """Stop all threads and give the memory back; a caller that waits gets StreamerClosed."""
        if self._is_freed:
            return
        if not self.stop():
            # Their files and buffers are in use: leaking them is the lesser evil.
            logger.warning("a read from storage does not return; its memory is not given back")
            self._is_freed = True
            return
        self._free()
        self._is_freed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _acquire(self, index: int, check: Check | None) -> Taken[MemoryT] | None:
        self._walk.check(index)
        self._walk.seek(index, is_inside=bool(self._leases))
        lease = self._walk.take(index, check)
        if lease is not None:
            self._leases.append(lease)
        try:
            self._walk.arrive(index)
        except BaseException:
            self._release(lease)
            raise
        return lease

    def _release(self, lease: Taken[MemoryT] | None) -> None:
        if lease is not None:
            if lease in self._leases:
                self._leases.remove(lease)
            self._walk.give_back(lease)
