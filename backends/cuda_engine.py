"""The copy engine of a GPU: pinned memory, two streams, events. All that is CUDA's own is here.

Sources: CUDA C++ Programming Guide, "Asynchronous Concurrent Execution" and "Page-Locked Host
Memory"; torch's notes on CUDA semantics.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch

from backends.base import BackendError
from offload.budget import BudgetExceeded, format_up
from offload.direct_io import AlignedBuffer
from offload.units import format_bytes

_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every context
_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


class NoDevice(BackendError):
    """There is no GPU that torch could use."""


class VramExceeded(BudgetExceeded):
    """The device's memory, as far as it was promised to this process, does not suffice."""

    def __init__(self, wanted_bytes: int, taken_bytes: int, vram_bytes: int) -> None:
        left = max(0, vram_bytes - taken_bytes)
        smallest = max(vram_bytes, taken_bytes + wanted_bytes)
        super().__init__("the GPU", wanted_bytes, left, smallest)
        wanted = f"{format_bytes(wanted_bytes)} more" if wanted_bytes else "more memory"
        self.args = (
            f"the GPU needs {wanted}, but {format_bytes(taken_bytes)} of the "
            f"{format_bytes(vram_bytes)} it may use are taken: raise --vram-budget above "
            f"{format_up(smallest)}, or lower --ctx-size or the number of draft tokens",
        )


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
    """See offload.copying.Event."""

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
        super().__init__(n_bytes)
        self._copying = copying
        self._is_registered = False
        code = int(torch.cuda.cudart().cudaHostRegister(self.address, len(self.view), _PORTABLE))
        if code:
            size, reason = format_bytes(n_bytes), torch.cuda.CudaError(code)
            super().close()
            raise MemoryError(f"cannot pin {size} of host memory: {reason}")
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
            self.close()


class VramBuffer:
    """Memory of the GPU; see offload.copying.DeviceBuffer."""

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
            CUDA itself takes (its context, a few hundred MB) comes on top.
        index: of the device.

    Raises:
        NoDevice: there is none.
    """

    def __init__(self, vram_bytes: int, index: int = 0) -> None:
        problem = cuda_problem()
        if problem is not None:
            raise NoDevice(problem)
        self.device = torch.device("cuda", index)
        total = torch.cuda.get_device_properties(self.device).total_memory
        self._vram_bytes = min(vram_bytes, total)
        torch.cuda.set_per_process_memory_fraction(self._vram_bytes / total, self.device)
        self._copying = torch.cuda.Stream(self.device)
        self._computing = torch.cuda.Stream(self.device)

    def allocate_pinned(self, n_bytes: int) -> PinnedBuffer:
        return PinnedBuffer(n_bytes, self._copying)

    def allocate_device(self, n_bytes: int) -> VramBuffer:
        with self.computing():
            tensor = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
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
        with (
            torch.cuda.stream(self._computing),
            no_raw_out_of_memory(self._taken_bytes, self._vram_bytes),
        ):
            yield

    def _taken_bytes(self) -> int:
        return int(torch.cuda.memory_allocated(self.device))


@contextmanager
def no_raw_out_of_memory(taken_bytes: Callable[[], int], vram_bytes: int) -> Iterator[None]:
    """Raise VramExceeded instead, with figures, and let go of what the broken pass held."""
    try:
        yield
    except RuntimeError as error:  # OutOfMemoryError is one; CUDA's own libraries raise others
        if "out of memory" not in str(error):
            raise
        exceeded = VramExceeded(wanted_bytes(str(error)), taken_bytes(), vram_bytes)
        traceback.clear_frames(error.__traceback__)  # they refer to the activations
        raise exceeded from None


def wanted_bytes(message: str) -> int:
    """What torch's out-of-memory message says that was asked for; 0 where it does not say."""
    found = re.search(r"Tried to allocate ([\d.]+) (bytes|KiB|MiB|GiB)", message)
    return 0 if found is None else int(float(found[1]) * _UNITS[found[2]])
