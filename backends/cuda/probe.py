"""Properties of this machine's GPU for the planner: its memory, and the bandwidth of copies."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from backends.contract.backend import one_line
from backends.cuda.engine import CudaEngine, NoDevice, vram_use
from backends.cuda.errors import no_raw_out_of_memory
from offload.device.bandwidth import measure_copies


@dataclass(frozen=True)
class CudaMemory:
    """Memory of one GPU, in bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    """Bytes available to this process: free ones, and the cache of torch's allocator."""
    used_bytes: int = 0
    """Bytes that other models of this process use."""
    computes_bf16: bool = True
    """Whether bf16 is native; before Ampere it is computed in float32, slowly."""


def cuda_memory(device: int = 0) -> CudaMemory:
    """Query the driver; creates the CUDA context, which takes memory, if there is none.

    Raises NoDevice if the driver refuses, for example because another program uses the whole card.
    """
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        used_bytes = torch.cuda.memory_allocated(device)
        free_bytes += torch.cuda.memory_reserved(device) - used_bytes
        name = torch.cuda.get_device_name(device)
        is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        return CudaMemory(name, total_bytes, free_bytes, used_bytes, is_ampere)
    except RuntimeError as error:
        problem = f"CUDA does not start on this GPU ({one_line(error)})"
        raise NoDevice(f"{problem}: end what else uses it, or give --device cpu") from error


@contextmanager
def measuring(device: int = 0) -> Iterator[None]:
    """Context for measurements before a plan: frees their device memory afterwards and resets the
    peak of `vram_peak_bytes`.

    Raises VramExceeded if the device's memory does not suffice.
    """
    gpu = torch.device("cuda", device)
    with no_raw_out_of_memory(lambda: vram_use(gpu, cuda_memory(device).total_bytes)):
        try:
            yield
        finally:
            torch.cuda.synchronize(gpu)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(gpu)


@cache
def measure_copies_to_gpu(device: int = 0) -> float:
    """Return bytes per second from pinned host memory; measured once per process."""
    return measure_copies(CudaEngine(None, device))
