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
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from offload.formats.tensors import TensorRecord
from offload.paging.address_space import check_supported
from offload.paging.memory import Loan, PageMemory, load_resident, reserve_all, reserve_streamed
from offload.paging.plan import Mappings, plan_paging
from offload.residency.placement import LayerWeights
from offload.ring.file_supply import RingOptions, walk_files
from offload.ring.slots import Check
from offload.ring.walk import StreamStats, Taken
from offload.storage.aligned import HostMemory, buffer_bytes
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.reading import DEFAULT_N_READERS, DEFAULT_READ_BYTES, Progress
from offload.trace import LAYER, record_since

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class _Lease:
    index: int  # of the layer that a slot's pages are lent to
    taken: Taken[HostMemory]
    loan: Loan
    is_ending: bool = False
    entered: float = field(default_factory=time.perf_counter)


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
        self._plan = plan = plan_paging(layers, resident, mappings, untouched)
        options = RingOptions(n_slots, read_bytes, n_readers, storage, poison)
        reads = options.plan([layer.reads for layer in plan.layers])
        self._leases: list[_Lease] = []
        self._is_freed = False
        self._moving = threading.RLock()  # pages are moved, or given back for good
        try:
            load_resident(
                plan, progress, read_bytes=read_bytes, n_readers=n_readers, storage=storage
            )
            reserve_streamed(plan)
            self._walk = walk_files(
                reads,
                options,
                plan.slot_bytes,
                allocate=lambda _: PageMemory(plan.body_bytes, plan.edge_bytes),
            )
        except BaseException:
            reserve_all(plan)
            raise

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        """`enter` and `leave`."""
        self.enter(index)
        mine = [lease for lease in self._leases if lease.index == index]
        try:
            yield
        finally:  # not another walk's layer, should this run late
            self._end_leases(mine)
        self._walk.leave(index)

    def enter(self, index: int, check: Check | None = None) -> None:
        """Wait until layer `index` is in memory and bring it to its addresses.

        Layers are asked for in cyclic order, as many at a time as there are slots; any other
        request (a pass that was given up and begins anew) costs what was read ahead. Ctrl-C
        interrupts the wait, and so does what `check` raises, which is called again and again.

        Raises:
            StorageError: the layer could not be read, or (at the last layer of a pass) a file
                changed under the pass. The pager can be used again; it then reads anew.
            AddressSpaceError: the system refused to move pages.
            StreamerClosed: it was closed.
        """
        self._walk.check(index)
        self._end_leases([lease for lease in self._leases if lease.is_ending])  # interrupted ones
        self._walk.seek(index, is_inside=bool(self._leases))
        self._bring_in(index, check)

    def leave(self, index: int) -> None:
        """Take the pages of layer `index` back; nothing happens where `restart` already did."""
        self._end_leases([lease for lease in self._leases if lease.index == index])
        self._walk.leave(index)

    def restart(self) -> None:
        """Begin again at layer 0, as after a pass that was given up; no layer is in afterwards.

        Nothing is read anew where layer 0 is the next one anyway. Where interrupted, call it again.
        """
        if self._leases or not self._walk.is_at_start:
            self._walk.break_off()
            self._end_leases(self._leases)
            self._walk.resume_at(0)

    @property
    def stats(self) -> StreamStats:
        return self._walk.stats

    @property
    def n_slots(self) -> int:
        return self._walk.n_slots

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident tensors and of the edges of streamed ones."""
        return self._plan.resident_bytes

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring, wherever its pages are."""
        return self._walk.n_slots * buffer_bytes(self._plan.slot_bytes)

    def close(self) -> None:
        """Stop the readers and give the memory back; a caller that waits gets StreamerClosed.

        The addresses stay reserved without access: what the file's owner unmaps is still there.
        """
        has_ended = self._walk.close()
        with self._moving:
            if self._is_freed:
                return
            self._leases.clear()
            reserve_all(self._plan)
            if has_ended:
                self._walk.free()
            else:
                # Its file and slot are in use: leaking them is the lesser evil.
                logger.warning("a read from storage does not return; its memory is not given back")
            self._is_freed = True

    def __enter__(self) -> Pager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # --- parts -----------------------------------------------------------------------------

    def _bring_in(self, index: int, check: Check | None) -> None:
        lease = None
        taken, paged = self._walk.take(index, check), self._plan.layers[index]
        if taken is not None:
            lease = _Lease(index, taken, Loan.of(paged.parts, taken.slot.buffer.address))
            self._leases.append(lease)
        try:
            with self._moving:
                self._walk.check(index)  # closed while this waited?
                if lease is not None:
                    lease.loan.lend()
            self._walk.arrive(index)
        except BaseException:
            self._end_leases([lease] if lease else [])
            raise

    def _end_leases(self, leases: Iterable[_Lease]) -> None:
        """Take pages back and give the slots to the readers; where interrupted, call it again."""
        for lease in tuple(leases):
            lease.is_ending = True
            with self._moving:
                if self._is_freed or lease not in self._leases:
                    continue
                lease.loan.take_back()
                self._walk.give_back(lease.taken)
                self._leases.remove(lease)
            record_since(lease.entered, LAYER, f"layer {lease.index}")
