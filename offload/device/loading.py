"""Tensors read onto a device for good, through a small pinned buffer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from queue import SimpleQueue
from typing import Any

from offload.device.engine import CopyEngine, DeviceBuffer
from offload.formats.tensors import TensorRecord
from offload.storage.aligned import HostMemory
from offload.storage.direct_io import DirectFile, OpenStorage
from offload.storage.layout import Layout, ReadChunk, make_layout
from offload.storage.reading import DEFAULT_N_READERS, OpenFiles, fetch_chunks
from offload.units import MIB, Progress

LOAD_READ_BYTES = 8 * MIB
LOAD_STAGING_BYTES = DEFAULT_N_READERS * LOAD_READ_BYTES
"""Pinned memory taken while tensors are read onto a device, and freed afterwards."""


class OnDevice(Mapping[str, Any]):
    """Tensors that stay on a device: name -> its bytes as the device's library knows them."""

    def __init__(self, layout: Layout, buffer: DeviceBuffer) -> None:
        self.buffer = buffer
        self._places = layout.tensors

    def __getitem__(self, name: str) -> Any:
        return self.buffer.part(*self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def close(self) -> None:
        """Free the memory. Nothing enqueued may still use it."""
        self.buffer.close()


def load_on_device(
    records: Iterable[TensorRecord],
    engine: CopyEngine,
    progress: Progress | None = None,
    *,
    n_readers: int = DEFAULT_N_READERS,
    storage: OpenStorage = DirectFile,
) -> OnDevice:
    """Read tensors onto the device; all copies are done when this returns.

    Takes `device_footprint` of their layout there, and LOAD_STAGING_BYTES of the host meanwhile.

    Raises:
        StorageError: the first read that failed; the others are given up.
        BudgetExceeded: the device has not enough memory.
    """
    layout = make_layout(records, merge_gap=0)
    pieces = layout.pieces(LOAD_READ_BYTES)
    weights = OnDevice(layout, engine.allocate_device(layout.n_bytes))
    staging: list[HostMemory] = []
    free: SimpleQueue[HostMemory] = SimpleQueue()

    def fetch(files: OpenFiles, read_chunk: ReadChunk) -> None:
        memory = free.get()
        try:
            files.read(replace(read_chunk, buffer_offset=0), memory.view)
            engine.copy(
                memory.view[: read_chunk.n_needed], weights.buffer, read_chunk.buffer_offset
            )
            engine.record_copy().wait()
        finally:
            free.put(memory)

    n_readers = min(n_readers, DEFAULT_N_READERS)  # more would take more memory than was planned
    try:
        while len(staging) < min(n_readers, len(pieces)):
            staging.append(engine.allocate_pinned(max(read_chunk.n_bytes for read_chunk in pieces)))
            free.put(staging[-1])
        fetch_chunks(pieces, fetch, progress, n_readers=n_readers, storage=storage)
    except BaseException:
        weights.close()
        raise
    finally:
        for memory in staging:
            memory.close()
    return weights
