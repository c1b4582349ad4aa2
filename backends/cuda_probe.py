"""What a plan has to know of this machine's GPU: its memory, and how fast copies to it are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from offload.copy_profile import measure_copies


@dataclass(frozen=True)
class CudaMemory:
    """Of one GPU, bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    """Of this and other processes; what torch holds in reserve here counts as free."""


def cuda_memory(device: int = 0) -> CudaMemory:
    """Asks the driver; makes the CUDA context, which takes memory of its own, if there is none."""
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    ours = torch.cuda.memory_reserved(device)
    return CudaMemory(torch.cuda.get_device_name(device), total_bytes, free_bytes + ours)


@cache
def measure_copies_to_gpu(device: int = 0) -> float:
    """Bytes per second from pinned host memory; measured once in a process.

    Gives back what measuring took, and lets the peak of `vram_peak_bytes` begin anew.
    """
    from backends.cuda_engine import CudaEngine

    total_bytes = torch.cuda.get_device_properties(device).total_memory
    speed = measure_copies(CudaEngine(total_bytes, device))
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    return speed
