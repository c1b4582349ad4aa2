"""The copy engine of a GPU: pinned memory, two streams, events. All CUDA-specific code is here.

Sources: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution" and "Page-Locked Host
Memory"; torch's notes on CUDA semantics.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

import torch

from backends.contract.backend import BackendError
from backends.cuda.errors import VramUse, no_raw_out_of_memory
from offload.errors import SpecdecError
from offload.storage.aligned import AlignedBuffer
from offload.units import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context


class NoDevice(BackendError):
    """Raised when torch can use no GPU."""


class PinningFailed(SpecdecError, MemoryError):
    """Raised when the system does not allow this much host memory to be pinned."""


def cuda_problem() -> str | None:
    """Return why torch cannot compute on a GPU here, with a remedy; None if it can."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def vram_peak_bytes(index: int = 0) -> int:
    """Return the peak memory of the process on the device, including torch's allocator cache."""
    return int(torch.cuda.max_memory_reserved(index))


class CudaEvent:
    """CUDA implementation of offload.device.engine.Event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: a waiting thread sleeps instead of keeping a core busy.
        self.raw = torch.cuda.Event(enable_timing=True, blocking=True)
        self.raw.record(stream)

    def is_done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()

    def seconds_after(self, earlier: CudaEvent) -> float:
        return float(earlier.raw.elapsed_time(self.raw)) / 1e3  # milliseconds


class PinnedBuffer(AlignedBuffer):
    """Host memory that is registered with CUDA in place.

    torch's own pinned memory is rounded up to a power of two, which would exceed the budget.
    """

    def __init__(self, n_bytes: int, copying: torch.cuda.Stream) -> None:
        # A fork must not move pages that the device copies from.
        super().__init__(n_bytes, in_children=False)
        self._copying = copying
        self._is_registered = False
        try:
            pin(self.address, len(self.view), copying.device)
        except BaseException:
            super().close()
            raise
        self._is_registered = True

    def close(self) -> None:
        if self._is_registered:
            with suppress(RuntimeError):  # after a device error no copy is running
                self._copying.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self._is_registered = False
        super().close()

    def __del__(self) -> None:
        if getattr(self, "_is_registered", False):
            with suppress(Exception):  # at interpreter exit CUDA may be shut down
                self.close()


def pin(address: int, n_bytes: int, device: torch.device) -> None:
    """Register host memory with CUDA. Raises PinningFailed."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, _PORTABLE))
    if not code:
        return
    # Clear the thread's last error, which would be reported for the next kernel.
    with suppress(RuntimeError):
        torch.ones(1, device=device)
    raise PinningFailed(
        f"{format_bytes(n_bytes)} of host memory cannot be pinned ({torch.cuda.CudaError(code)}): "
        "lower --memory-budget, or raise what the system lets one process pin"
    )


class VramBuffer:
    """GPU memory; implements offload.device.engine.DeviceBuffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.n_bytes = tensor.nbytes

    def part(self, offset: int, n_bytes: int) -> torch.Tensor:
        assert self.tensor is not None, "the buffer is closed"
        return self.tensor[offset : offset + n_bytes]

    def close(self) -> None:
        """Release the memory; it is freed once the last view of it is gone."""
        self.tensor = None


class CudaEngine:
    """CUDA implementation of CopyEngine and TorchEngine. Each model has its own, with own streams.

    Args:
        vram_bytes: device memory that all models of the process together may take, not counting
            CUDA's context (a few hundred MB). None, for measurements, leaves the limit unchanged.
        index: index of the device.

    Raises:
        NoDevice: torch can use no GPU.
    """

    def __init__(self, vram_bytes: int | None, index: int = 0) -> None:
        problem = cuda_problem()
        if problem is not None:
            raise NoDevice(problem)
        self.device = torch.device("cuda", index)
        # Versions of torch differ in which of the two totals the fraction applies to.
        properties = torch.cuda.get_device_properties(self.device)
        total = max(properties.total_memory, torch.cuda.mem_get_info(self.device)[1])
        self._vram_bytes = total if vram_bytes is None else min(vram_bytes, total)
        if vram_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(self._vram_bytes / total, self.device)
        self._copying = torch.cuda.Stream(self.device)
        self._computing = torch.cuda.Stream(self.device)

    def allocate_pinned(self, n_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(n_bytes, self._copying)

    def allocate_device(self, n_bytes: int) -> VramBuffer:
        with self.computing():
            tensor = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
        # Enqueued computations may still use what was in this memory before.
        self._copying.wait_stream(self._computing)
        # Even if it is not closed in order, no other tensor may get the memory during a copy.
        tensor.record_stream(self._copying)
        return VramBuffer(tensor)

    def copy(self, source: memoryview, target: VramBuffer, offset: int) -> None:
        pinned = torch.frombuffer(source, dtype=torch.uint8)
        with torch.cuda.stream(self._copying):
            target.part(offset, len(source)).copy_(pinned, non_blocking=True)

    def record_copy(self) -> CudaEvent:
        return CudaEvent(self._copying)

    def record_compute(self) -> CudaEvent:
        return CudaEvent(self._computing)

    def copy_waits(self, event: CudaEvent) -> None:
        self._copying.wait_event(event.raw)

    def compute_waits(self, event: CudaEvent) -> None:
        self._computing.wait_event(event.raw)

    def synchronize(self) -> None:
        self._computing.synchronize()
        self._copying.synchronize()

    @contextmanager
    def computing(self) -> Iterator[None]:
        with torch.cuda.stream(self._computing), no_raw_out_of_memory(self._use):
            yield

    def _use(self) -> VramUse:
        return vram_use(self.device, self._vram_bytes)


def vram_use(device: torch.device, promised_bytes: int) -> VramUse:
    free_bytes = torch.cuda.mem_get_info(device)[0]
    return VramUse(torch.cuda.memory_reserved(device), promised_bytes, free_bytes)
