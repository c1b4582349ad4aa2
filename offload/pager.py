"""Layers of a mapped file in order, at the addresses where the file is mapped.

Somebody else (llama.cpp) has mapped a file and computes from those addresses. The pager takes the
pages of the layers away and brings them back for the time they are needed:

    with pager.layer(i):        # blocks until layer i lies at its addresses
        compute()               # leaving takes its pages back, for the readers to fill

Slots are filled from storage as those of `WeightStreamer`, at addresses of their own; then their
*pages* are moved to the layer's addresses, and moved back afterwards. No page is copied, zeroed or
freed on the way, so that the memory taken is the same from the first layer to the last.

A layer that is not in memory is address space without access: computing on it is a crash, never a
wrong result. For that a range is closed before its pages are moved, and opened after it.
"""

from __future__ import annotations

import logging
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from offload.address_space import check_supported
from offload.direct_io import DirectFile, OpenStorage
from offload.index import TensorRecord
from offload.layout import Piece
from offload.paged_memory import Loan, PageMemory, load_resident, reserve_all, reserve_streamed
from offload.paging_plan import Mappings, plan_paging
from offload.plan import LayerWeights
from offload.reading import (
    DEFAULT_N_READERS,
    DEFAULT_READ_BYTES,
    OpenFiles,
    Progress,
    ReaderThreads,
    shared_read_bytes,
)
from offload.slots import Slot, SlotRing, StreamerClosed
from offload.streamer import StreamStats

logger = logging.getLogger(__name__)

_JOIN_SECONDS = 10.0  # a read that hangs longer (a dead network mount) is left behind


@dataclass(eq=False)
class _Lease:
    index: int  # of the layer that a slot's pages are lent to
    slot: Slot
    ticket: int
    loan: Loan
    is_ending: bool = False


class Pager:
    """The weights of all layers of a mapped file.

    One thread at a time walks the layers; `close` may be called by another one. `close` must come
    before the mapping's owner unmaps the file: it is the pager's to fill until then.

    Args:
        layers: in the order of use; some may be wholly resident.
        resident: tensors outside of the layers to be held in memory.
        mappings: where each file is mapped.
        n_slots: depth of the ring, 1 (no overlap) or more; more than streamed layers are not made.
        untouched: tensors that remain as they are mapped. Only named tensors can be told from
            padding: between a layer's tensors, what is not named is paged along with them.
        read_bytes, n_readers, storage, progress, poison: as for WeightStreamer.

    Raises (after the first one, the mapping is unusable):
        AddressSpaceError: the system cannot move pages, or a tensor is not mapped exactly once.
        StorageError, MemoryError: resident tensors cannot be read, or the memory not be had.
    """

    def __init__(
        self,
        layers: Sequence[LayerWeights],
        resident: Iterable[TensorRecord],
        mappings: Mappings,
        n_slots: int,
        *,
        untouched: Iterable[TensorRecord] = (),
        read_bytes: int = DEFAULT_READ_BYTES,
        n_readers: int = DEFAULT_N_READERS,
        storage: OpenStorage = DirectFile,
        progress: Progress | None = None,
        poison: bool = False,
    ) -> None:
        check_supported()
        self._plan = plan_paging(layers, resident, mappings, untouched)
        self._streamed = [i for i, layer in enumerate(self._plan.layers) if layer]
        if n_readers < 1 or (self._streamed and n_slots < 1):
            raise ValueError(f"streaming needs a slot and a reader, not {n_slots} and {n_readers}")
        paged = [layer for layer in self._plan.layers if layer]
        pieces = [
            p.reads.pieces(shared_read_bytes(p.reads.n_bytes, n_readers, read_bytes)) for p in paged
        ]
        self._expected: int | None = 0  # the layer that continues the walk; None after an error
        self._ticket = 0  # of the next streamed layer in the walk
        self._leases: list[_Lease] = []
        self._stall_seconds = 0.0
        self._passes, self._last_is_in = 0, False  # a pass is complete when the last is left
        self._closed = self._is_freed = False
        self._moving = threading.RLock()  # pages are moved, or given back for good
        self._ring: SlotRing | None = None
        try:
            load_resident(
                self._plan, progress, read_bytes=read_bytes, n_readers=n_readers, storage=storage
            )
            reserve_streamed(self._plan)
            if paged:
                self._start_ring(pieces, min(n_slots, len(paged)), n_readers, storage, poison)
        except BaseException:
            reserve_all(self._plan)
            raise

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """`enter` and `leave`."""
        self.enter(index)
        mine = [lease for lease in self._leases if lease.index == index]
        try:
            yield
        except BaseException:
            self._last_is_in = False
            raise
        finally:  # not another walk's layer, should this run late
            self._leave(index, mine)

    def enter(self, index: int) -> None:
        """Wait until layer `index` is in memory and bring it to its addresses.

        Layers are asked for in cyclic order, as many at a time as there are slots; any other
        request (a pass that was given up and begins anew) costs what was read ahead. Ctrl-C
        interrupts the wait.

        Raises:
            StorageError: the layer could not be read, or (at the last layer of a pass) a file
                changed under the pass. The pager can be used again; it then reads anew.
            AddressSpaceError: the system refused to move pages.
            StreamerClosed: it was closed.
        """
        if not 0 <= index < len(self._plan.layers):
            raise IndexError(f"there is no layer {index} among {len(self._plan.layers)}")
        if self._closed:
            raise StreamerClosed("the pager is closed; load the model again")
        self._end_leases([lease for lease in self._leases if lease.is_ending])  # interrupted ones
        if index != self._expected:
            if self._leases:
                raise RuntimeError(f"layer {index} was asked for out of order inside another layer")
            self._resume_at(index)
        self._expected = None  # what follows may fail, or be interrupted
        self._bring_in(index)
        self._expected = (index + 1) % len(self._plan.layers)
        self._last_is_in = self._expected == 0

    def leave(self, index: int) -> None:
        """Take the pages of layer `index` back; nothing happens where `restart` already did."""
        self._leave(index, [lease for lease in self._leases if lease.index == index])

    def _leave(self, index: int, leases: list[_Lease]) -> None:
        self._end_leases(leases)
        if index == len(self._plan.layers) - 1 and self._last_is_in:
            self._last_is_in = False
            self._passes += 1

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up; no layer is in afterwards.

        Nothing is read anew where layer 0 is the next one anyway. Where interrupted, call it again.
        """
        if self._expected != 0 or self._leases or (self._ring and self._ring.is_lending):
            self._expected = None
            self._end_leases(self._leases)
            self._resume_at(0)

    @property
    def stats(self) -> StreamStats:
        bytes_read, read_seconds = self._ring.reading_figures() if self._ring else (0, 0.0)
        return StreamStats(bytes_read, self._stall_seconds, read_seconds, self._passes)

    @property
    def n_slots(self) -> int:
        return len(self._ring.slots) if self._ring else 0

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident tensors and of the edges of streamed ones."""
        return self._plan.resident_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring, wherever its pages are."""
        return self._ring.n_bytes if self._ring else 0

    def close(self) -> None:
        """Stop the readers and give the memory back; a caller that waits gets StreamerClosed.

        The addresses stay reserved without access: what the file's owner unmaps is still there.
        """
        self._closed = has_ended = True
        if self._ring is not None:
            self._ring.close()
            has_ended = self._readers.join(_JOIN_SECONDS)
        with self._moving:
            if self._is_freed:
                return
            self._leases.clear()
            reserve_all(self._plan)
            if not has_ended:
                # Its file and slot are in use: leaking them is the lesser evil.
                logger.warning("a read from storage does not return; its memory is not given back")
            elif self._ring is not None:
                self._ring.free_buffers()
                self._files.close()
            self._is_freed = True

    def __enter__(self) -> Pager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- construction and end --------------------------------------------------------------

    def _start_ring(
        self,
        pieces: list[tuple[Piece, ...]],
        n_slots: int,
        n_readers: int,
        storage: OpenStorage,
        poison: bool,
    ) -> None:
        plan = self._plan
        self._files = OpenFiles((piece.path for layer in pieces for piece in layer), storage)
        self._ring = SlotRing(
            n_slots,
            plan.slot_bytes,
            lambda ticket: pieces[ticket % len(pieces)],
            allocate=lambda _: PageMemory(plan.body_bytes, plan.edge_bytes),
            poison=poison,
        )
        self._readers = ReaderThreads(self._ring, self._files, n_readers)
        # Ends the readers of a forgotten pager. It leaves the mapping alone: that may be gone.
        weakref.finalize(self, self._ring.close)

    # --- the walk --------------------------------------------------------------------------

    def _bring_in(self, index: int) -> None:
        lease = None
        paged = self._plan.layers[index]
        if paged is not None and self._ring is not None:
            started = time.perf_counter()
            try:
                slot = self._ring.wait_ready(self._ticket)
            finally:
                self._stall_seconds += time.perf_counter() - started
            lease = _Lease(index, slot, self._ticket, Loan.of(paged.parts, slot.buffer.address))
            self._leases.append(lease)
            self._ticket += 1
        try:
            if self._ring is not None and index == len(self._plan.layers) - 1:
                # At the end: by then all bytes of the pass were read from an unchanged file.
                self._files.check_unchanged()
            with self._moving:
                if self._closed:
                    raise StreamerClosed("the pager is closed; load the model again")
                if lease is not None:
                    lease.loan.lend()
        except BaseException:
            self._end_leases([lease] if lease else [])
            raise

    def _end_leases(self, leases: Iterable[_Lease]) -> None:
        """Take pages back and give the slots to the readers; where interrupted, call it again."""
        for lease in tuple(leases):
            lease.is_ending = True
            with self._moving:
                if self._closed or lease not in self._leases:
                    continue
                lease.loan.take_back()
                if self._ring is not None:
                    self._ring.release(lease.slot, lease.ticket)
                self._leases.remove(lease)

    def _resume_at(self, index: int) -> None:
        """Let the readers begin at the first streamed layer from `index` on; nothing is lent."""
        self._expected, self._last_is_in = None, False
        n_streamed = len(self._streamed)
        position = sum(1 for i in self._streamed if i < index)
        # A ticket is never used twice, so that a late release cannot touch a later layer's slot.
        # The readers are at most n_slots (<= n_streamed) tickets ahead: two passes on is unused.
        if self._ring is not None:
            self._ticket = (self._ticket // n_streamed + 3) * n_streamed + position
            self._ring.restart(self._ticket)
        self._expected = index
