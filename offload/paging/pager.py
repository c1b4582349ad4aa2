"""Layers of a mapped file in order, at the addresses where the file is mapped.

Another library (llama.cpp) has mapped a file and computes from those addresses. The pager removes
the pages of the layers and moves them back for the time they are needed:

    with pager.layer(i):        # blocks until layer i lies at its addresses
        compute()               # the pages go back at the end, for the readers to fill

Slots are filled from storage as those of `WeightStreamer`, at addresses of their own; then their
*pages* are moved to the layer's addresses, and moved back afterwards. No page is copied, zeroed or
freed on the way, so that the memory taken is the same from the first layer to the last.

A layer that is not in memory is address space without access: computing on it is a crash, never a
wrong result. So a range is protected before its pages are moved, and readable only afterwards.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from offload.formats.tensors import TensorRecord
from offload.paging.address_space import check_supported
from offload.paging.memory import (
    LayerMapping,
    PageMemory,
    read_resident,
    reserve_all,
    reserve_streamed,
)
from offload.paging.plan import Mappings, ResidentRange, plan_paging
from offload.placement.placement import LayerWeights
from offload.ring.cursor import AcquiredSlot
from offload.ring.file_source import RingOptions, file_cursor
from offload.ring.pinning_access import PinningAccess
from offload.storage.aligned import HostMemory, buffer_bytes
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.reading import DEFAULT_N_READERS, DEFAULT_READ_BYTES
from offload.units import Progress


class Pager(PinningAccess[HostMemory, None]):
    """The weights of all layers of a mapped file.

    `close` must come before the mapping's owner unmaps the file; until then the mapping belongs to
    the pager.

    Args:
        layers: in the order of use; some may be wholly resident.
        resident: non-layer tensors that stay in memory.
        mappings: where each file is mapped.
        n_slots: depth of the ring, 1 (no overlap) or more, at most the number of streamed layers.
        untouched: tensors that remain as they are mapped. Only named tensors can be told from
            padding: between a layer's tensors, what is not named is paged along with them.
        read_bytes, n_readers, storage, progress, poison: as for WeightStreamer.

    Raises (after the first one, the mapping is unusable):
        AddressSpaceError: the system cannot move pages, or a tensor is not mapped exactly once.
        StorageError: a file cannot be opened.
        MemoryError: memory for the slots cannot be had.
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
        resident, untouched = tuple(resident), tuple(untouched)
        self._plan = plan = plan_paging(layers, resident, mappings, untouched)
        other_tensors = (*resident, *untouched)
        options = RingOptions(n_slots, read_bytes, n_readers, storage, poison)
        reads = options.plan([layer.reads for layer in plan.layers])
        self._acquired_mappings: dict[int, LayerMapping] = {}
        """Acquired layers, by the read sequence number of their slot."""
        self._pinned_mappings: dict[int, LayerMapping] = {}
        """Pinned layers, by index."""
        try:
            reserve_streamed(plan)
            background = read_resident(
                plan,
                layers,
                other_tensors,
                progress,
                read_bytes=read_bytes,
                n_readers=n_readers,
                storage=storage,
            )
            super().__init__(
                file_cursor(
                    reads,
                    options,
                    plan.slot_bytes,
                    allocate=lambda _: self._new_slot(),
                    background=background,
                )
            )
        except BaseException:
            reserve_all(plan)
            raise

    @property
    def resident_bytes(self) -> int:
        """Memory of the resident tensors and of the edges of streamed ones."""
        return self._plan.resident_bytes

    @property
    def resident_ranges(self) -> tuple[ResidentRange, ...]:
        """Pages that have memory of their own for good."""
        return self._plan.resident

    @property
    def ring_bytes(self) -> int:
        """Memory of the ring, wherever its pages are."""
        return self._cursor.n_slots * buffer_bytes(self._plan.slot_bytes)

    def _acquire(self, index: int, acquired_slot: AcquiredSlot[HostMemory] | None) -> None:
        """Move the pages of the slot to the layer's addresses."""
        with self._lock:
            self._cursor.check(index)  # closed while this waited?
            if acquired_slot is not None:
                parts, address = self._plan.layers[index].parts, acquired_slot.slot.buffer.address
                self._acquired_mappings[acquired_slot.read_number] = layer_mapping = (
                    LayerMapping.of(parts, address)
                )
                layer_mapping.acquire()

    def _take_back(self, acquired_slot: AcquiredSlot[HostMemory]) -> None:
        with self._lock:
            layer_mapping = self._acquired_mappings.get(
                acquired_slot.read_number
            )  # none after `close`
            if layer_mapping is not None:
                layer_mapping.take_back()
                del self._acquired_mappings[acquired_slot.read_number]

    def _new_slot(self) -> PageMemory:
        return PageMemory(self._plan.body_bytes, self._plan.edge_bytes)

    def _keep(self, index: int, acquired_slot: AcquiredSlot[HostMemory]) -> None:
        """Leave the pages of a pinned layer at its addresses."""
        self._pinned_mappings[index] = self._acquired_mappings.pop(acquired_slot.read_number)

    def _before_unpin(self, index: int) -> None:
        self._pinned_mappings[index].take_back()  # where it fails, the layer can still be acquired
        del self._pinned_mappings[index]

    def _free(self) -> None:
        """Free the pages of acquired, pinned and resident weights. The addresses stay reserved,
        without access, for the file's owner to unmap."""
        self._acquired_mappings.clear()
        self._pinned_mappings.clear()
        reserve_all(self._plan)
