"""The suppliers of layers, slot ring and pager, behind one adapter for the tests of their contract.

with kind(weights, n_slots, read_bytes=PAGE) as layers:     # kind: RingLayers or PagedLayers
    layers.run_passes()                                     # all bytes are checked
"""

from __future__ import annotations

import errno
import gc
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from mapped_weights import MappedWeights, is_readable, memory_in
from paging import slot_ranges
from streaming import reader_threads
from system_probes import populates_memory
from typing_extensions import Self
from weight_files import FaultyReads, Weights

from offload.paging.pager import Pager
from offload.paging.plan import paging_overhead_bytes
from offload.ring.pinning_access import PinningAccess
from offload.ring.slots import Check, SlotState
from offload.ring.streamer import WeightStreamer
from offload.storage.aligned import PAGE_BYTES as PAGE
from offload.storage.aligned import buffer_bytes
from offload.storage.direct_io import StorageError
from offload.storage.reading import resident_footprint

POPULATES_MEMORY = populates_memory()


def n_open_files() -> int:
    """Count open files; those of objects left to the garbage collector may be among them."""
    return len(os.listdir("/proc/self/fd"))


class SuppliedLayers(ABC):
    """One open supplier of the layers of `weights`; what is acquired is compared with the files.

    Args:
        remainder: distance to the last huge page, where the files are mapped.
        options: as for WeightStreamer. Reads are small, and released slots poisoned.
    """

    access: PinningAccess[Any, Any]

    def __init__(
        self, weights: Weights, n_slots: int, *, remainder: int = 0, **options: Any
    ) -> None:
        self.weights, self.n_slots, self.remainder = weights, n_slots, remainder
        self.acquired: dict[int, Any] = {}
        """Layers entered and not left, by index."""
        self.n_files_before = n_open_files()
        self._open(weights, n_slots, {"read_bytes": PAGE, "poison": True, **options})

    @abstractmethod
    def _open(self, weights: Weights, n_slots: int, options: dict[str, Any]) -> None: ...

    @abstractmethod
    def check(self, index: int, given: Any) -> None:
        """Assert that an acquired layer has the file's bytes."""

    @abstractmethod
    def streamed_bytes(self, index: int) -> int:
        """Return what one pass reads of a layer."""

    @abstractmethod
    def check_budget(self) -> None:
        """Assert that, after whole passes, the memory taken is that of the slots and pinned layers,
        and what is resident."""

    @abstractmethod
    def check_absent(self, index: int) -> None:
        """Assert that a layer neither acquired nor pinned takes no slot and has no address."""

    @abstractmethod
    def is_freed(self, memory: Any) -> bool:
        """Return whether a slot's memory was freed."""

    @property
    def memories(self) -> list[Any]:
        """Memory of all slots and pinned layers."""
        cursor = self.access._cursor
        slots = cursor._ring.slots if cursor._ring else ()
        return [*(slot.buffer for slot in slots), *cursor.pinned.values()]

    def enter(self, index: int, check: Check | None = None) -> None:
        self.acquired[index] = self.access.enter(index, check)
        self.check(index, self.acquired[index])

    def check_acquired(self) -> None:
        for index, given in self.acquired.items():
            self.check(index, given)

    def leave(self, index: int) -> None:
        self.check(index, self.acquired[index])  # nothing came over it meanwhile
        del self.acquired[index]
        self.access.leave(index)

    @contextmanager
    def layer(self, index: int) -> Iterator[None]:
        with self.access.layer(index) as given:
            self.check(index, given)
            yield
            self.check(index, given)

    def run_passes(self, n_passes: int = 1, stop_before: int = -1) -> None:
        """Check all layers of some passes; leave the last pass before layer `stop_before`."""
        for number in range(n_passes):
            for index in range(len(self.weights.layers)):
                if index == stop_before and number == n_passes - 1:
                    return
                with self.layer(index):
                    pass

    def run_with_errors(self, n_passes: int, resume: int | None) -> int:
        """Run passes that go on at layer `resume` after a StorageError, or at the same (None).
        Return the number of errors."""
        n_errors = 0
        for _ in range(n_passes):
            index = 0
            while index < len(self.weights.layers):
                try:
                    with self.layer(index):
                        pass
                    index += 1
                except StorageError:
                    n_errors += 1
                    index = index if resume is None else resume
        return n_errors

    def run_unchecked(self) -> None:
        """Run a pass over files whose bytes have changed."""
        for index in range(len(self.weights.layers)):
            with self.access.layer(index):
                pass

    def forget(self) -> None:
        """Leave the supplier to the garbage collector."""
        del self.access
        gc.collect()

    def close(self) -> None:
        """Close, twice, and assert that nothing is left."""
        self.acquired.clear()  # a view keeps its memory
        memories = self.memories
        self.access.close()
        self.access.close()
        assert all(map(self.is_freed, memories))
        self.check_closed()

    def check_closed(self) -> None:
        """Assert that threads have ended and files are closed."""
        assert not reader_threads()
        assert n_open_files() <= self.n_files_before

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if hasattr(self, "access"):
            self.access.close()


class RingLayers(SuppliedLayers):
    """A WeightStreamer: layers are views of their slots."""

    def _open(self, weights: Weights, n_slots: int, options: dict[str, Any]) -> None:
        self.access = WeightStreamer(weights.layers, n_slots, **options)

    def check(self, index: int, given: Any) -> None:
        self.weights.check(index, given)

    def streamed_bytes(self, index: int) -> int:
        return self.weights.layers[index].slot_bytes

    def check_budget(self) -> None:
        assert self.access.n_slots <= self.n_slots
        sizes = [len(memory.view) for memory in self.memories]
        assert sum(sizes) == self.access.ring_bytes + self.access.pinned_bytes
        assert len({memory.address for memory in self.memories}) == len(sizes)

    def check_absent(self, index: int) -> None:
        ring, acquired = self.access._cursor._ring, self.access._acquired
        used = [slot for slot in ring.slots if slot.state is SlotState.IN_USE] if ring else []
        assert all(item.index != index for item in acquired)
        assert len(used) == sum(item.acquired_slot is not None for item in acquired)

    def is_freed(self, memory: Any) -> bool:
        return memory._map is None or memory._map.closed


class PagedLayers(SuppliedLayers):
    """A Pager of files that are mapped as a library would: layers lie at their addresses."""

    def _open(self, weights: Weights, n_slots: int, options: dict[str, Any]) -> None:
        self.files = MappedWeights(weights, self.remainder)
        try:
            self.access = Pager(weights.layers, [], self.files.mappings, n_slots, **options)
        except BaseException as error:
            # An argument is refused before the mapping is touched; later, no memory is left in it.
            if not isinstance(error, ValueError):
                assert memory_in(self.files.ranges.values()) == 0
            self.files.close()
            raise

    def check(self, index: int, given: Any) -> None:
        for record in self.weights.layers[index].streamed:  # a failure, in place of a crash
            for address in (0, record.n_bytes - 1) if record.n_bytes else ():
                assert is_readable(self.files.address(record) + address), f"no {record.name}"
        self.files.check(index)

    def streamed_bytes(self, index: int) -> int:
        return self.access._plan.layers[index].reads.n_bytes

    def check_budget(self) -> None:
        ranges = [(memory.address, len(memory.view)) for memory in self.memories]
        actual = memory_in([*ranges, *self.files.ranges.values()])
        access, layers = self.access, self.weights.layers
        taken = access.resident_bytes + access.ring_bytes + access.pinned_bytes
        assert actual == taken or (actual < taken and not POPULATES_MEMORY)
        planned = resident_footprint([r for layer in layers for r in layer.resident_records])
        streamed = [layer.slot_bytes for layer in layers if layer.slot_bytes]
        n_slots = min(self.n_slots, len(streamed))
        planned += n_slots * buffer_bytes(max(streamed, default=0))
        planned += paging_overhead_bytes(layers, n_slots)
        assert access.resident_bytes + access.ring_bytes <= planned

    def check_absent(self, index: int) -> None:
        self.files.check_absent(index)

    def is_freed(self, memory: Any) -> bool:
        return memory._n_reserved == 0

    def close(self) -> None:
        slots = slot_ranges(self.access)
        super().close()
        assert memory_in([*slots, *self.files.ranges.values()]) == 0
        for index in range(len(self.weights.layers)):
            self.check_absent(index)

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)
        self.files.close()


class WatchedReads(FaultyReads):
    """Faulty reads that note each one into the memory of an acquired layer.

    Set `layers` once they are open. What is `broken` fails; so do reads of the numbers `failing`.
    """

    def __init__(self, seed: int, failing: set[int] = frozenset()) -> None:
        super().__init__(self._interfere)
        self.layers: SuppliedLayers | None = None
        self.wrong: list[str] = []
        self.is_broken = False
        self.failing, self.n_failed = set(failing), 0
        self._rng = np.random.default_rng(seed)

    def __call__(self, descriptor: int, view: memoryview, offset: int) -> int:
        if self.layers is not None:
            address = np.frombuffer(view, np.uint8).ctypes.data
            for acquired in tuple(self.layers.access._acquired):
                if acquired.acquired_slot is None:
                    continue
                start = acquired.acquired_slot.slot.buffer.address
                if start <= address < start + self._slot_bytes:
                    self.wrong.append(f"layer {acquired.index} is acquired and overwritten")
        try:
            return super().__call__(descriptor, view, offset)
        except OSError as error:
            if error.errno == errno.EFAULT:  # the memory is freed, or its pages are elsewhere
                self.wrong.append(str(error))
            raise

    @property
    def _slot_bytes(self) -> int:
        assert self.layers is not None
        access = self.layers.access
        return access.ring_bytes // max(1, access.n_slots)

    def _interfere(self, call: int, length: int) -> int | None:
        """Let reads fail, be interrupted, and be short, now and then."""
        with self._lock:
            if self.is_broken or call in self.failing:
                self.n_failed += 1
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            chance, n_bytes = self._rng.random(), int(self._rng.integers(1, length + 1))
        if chance < 0.1:
            raise InterruptedError(errno.EINTR, "interrupted")
        return n_bytes if chance < 0.3 else 4096 if chance < 0.4 else None
