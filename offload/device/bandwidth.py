"""Bandwidth of copies from pinned host memory to a device, with the streamer's own engine."""

from __future__ import annotations

import statistics

from offload.device.engine import CopyEngine, DeviceBuffer
from offload.storage.aligned import HostMemory
from offload.units import MIB

_BUFFER_BYTES = 64 * MIB
_N_BUFFERS = 2
_COPIES_PER_RUN = 8
_N_RUNS = 5


def measure_copies(engine: CopyEngine, buffer_bytes: int = _BUFFER_BYTES) -> float:
    """Measure the bytes per second of copies without pauses in between, on the device's clock.

    Returns the median of a few runs of 512 MiB, after a warm-up. Takes two pinned buffers of
    `buffer_bytes` and as much of the device meanwhile.

    Raises BudgetExceeded, MemoryError: the memory cannot be had.
    """
    pinned: list[HostMemory] = []
    device: list[DeviceBuffer] = []
    try:
        for _ in range(_N_BUFFERS):
            pinned.append(engine.allocate_pinned(buffer_bytes))
            device.append(engine.allocate_device(buffer_bytes))
        seconds = []
        for _ in range(1 + _N_RUNS):
            began = engine.record_copy()
            for index in range(_COPIES_PER_RUN):
                buffer = index % _N_BUFFERS
                engine.copy(pinned[buffer].view[:buffer_bytes], device[buffer], 0)
            ended = engine.record_copy()
            ended.wait()
            seconds.append(ended.seconds_after(began))
        return _COPIES_PER_RUN * buffer_bytes / max(statistics.median(seconds[1:]), 1e-9)
    finally:
        _give_back(engine, pinned, device)


def _give_back(engine: CopyEngine, pinned: list[HostMemory], device: list[DeviceBuffer]) -> None:
    """Free the buffers, after everything enqueued has ended."""
    try:
        engine.synchronize()
    finally:
        for source in pinned:
            source.close()
        for target in device:
            target.close()
