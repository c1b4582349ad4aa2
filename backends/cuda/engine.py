"""The copy engine of a GPU: pinned memory, two streams, events. All that is CUDA's own is here.

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
    """There is no GPU that torch could use."""


class PinningFailed(SpecdecError, MemoryError):
    """The system does not let so much host memory be pinned."""


def cuda_problem() -> str | None:
    """Why torch cannot compute on a GPU here, and what would help; None where it can."""
    if not torch.backends.cuda.is_built():
        return f"torch {torch.__version__} was built without CUDA: install a CUDA build of torch"
    if not torch.cuda.is_available():
        return "torch finds no CUDA device: check nvidia-smi and CUDA_VISIBLE_DEVICES"
    return None


def vram_peak_bytes(index: int = 0) -> int:
    """Most memory that the process has held on the device, what torch keeps for reuse included."""
    return int(torch.cuda.max_memory_reserved(index))


class CudaEvent:
    """See offload.device.engine.Event."""

    def __init__(self, stream: torch.cuda.Stream) -> None:
        # blocking: a thread that waits sleeps, instead of keeping a core busy.
        self.raw = torch.cuda.Event(enable_timing=True, blocking=True)
        self.raw.record(stream)

    def is_done(self) -> bool:
        return bool(self.raw.query())

    def wait(self) -> None:
        self.raw.synchronize()

    def seconds_after(self, earlier: CudaEvent) -> float:
        return float(earlier.raw.elapsed_time(self.raw)) / 1e3  # milliseconds


class PinnedBuffer(AlignedBuffer):
    """Host memory registered with CUDA where it lies.

    torch's own pinned memory is rounded up to a power of two, which no budget could bear.
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
            with suppress(RuntimeError):  # a device that failed copies no more
                self._copying.synchronize()
            torch.cuda.cudart().cudaHostUnregister(self.address)
            self._is_registered = False
        super().close()

    def __del__(self) -> None:
        if getattr(self, "_is_registered", False):
            with suppress(Exception):  # at the interpreter's end CUDA may be gone
                self.close()


def pin(address: int, n_bytes: int, device: torch.device) -> None:
    """Register host memory with CUDA. Raises PinningFailed."""
    code = int(torch.cuda.cudart().cudaHostRegister(address, n_bytes, _PORTABLE))
    if not code:
        return
    # It stays the thread's last error, and would be taken for that of the next kernel.
    with suppress(RuntimeError):
        torch.ones(1, device=device)
    raise PinningFailed(
        f"{format_bytes(n_bytes)} of host memory cannot be pinned ({torch.cuda.CudaError(code)}): "
        "lower --memory-budget, or raise what the system lets one process pin"
    )


class VramBuffer:
    """Memory of the GPU; see offload.device.engine.DeviceBuffer."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.n_bytes = tensor.nbytes

    def part(self, offset: int, n_bytes: int) -> torch.Tensor:
        assert self.tensor is not None, "the buffer is closed"
        return self.tensor[offset : offset + n_bytes]

    def close(self) -> None:
        """Give the memory back, or leave it to its last user where a view of it still lives."""
        self.tensor = None


class CudaEngine:
    """See CopyEngine and TorchEngine. Each model has one of its own, and so its own streams.

    Args:
        vram_bytes: what all models of the process together may take of the device's memory; what
            CUDA itself takes (its context, a few hundred MB) comes on top. None leaves what was
            promised before as it is: for measurements.
        index: of the device.

    Raises:
        NoDevice: there is none.
    """

    def __init__(self, vram_bytes: int | None, index: int = 0) -> None:
        problem = cuda_problem()
        if problem is not None:
            raise NoDevice(problem)
        self.device = torch.device("cuda", index)
        # Versions of torch differ in which of the two the fraction is taken of.
        reported = torch.cuda.get_device_properties(self.device).total_memory
        total = max(reported, torch.cuda.mem_get_info(self.device)[1])
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
        # Whatever had the memory before may still be computed with.
        self._copying.wait_stream(self._computing)
        # Should nobody close it in order: no other tensor gets the memory while it is copied to.
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
