"""What a plan has to know of this machine's GPU: its memory, and how fast copies to it are."""

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
    """Of one GPU, bytes."""

    name: str
    total_bytes: int
    free_bytes: int
    """For this process: what nobody has, and what torch holds in reserve here."""
    pinned_bytes: int = 0
    """What other models of this process have."""
    computes_bf16: bool = True
    """Else by way of float32, slowly: before Ampere."""


def cuda_memory(device: int = 0) -> CudaMemory:
    """Asks the driver; makes the CUDA context, which takes memory of its own, if there is none.

    Raises NoDevice where the driver refuses: another program has the whole card, say.
    """
    try:
        free_bytes, total_bytes = torch.cuda.mem_get_info(device)
        pinned_bytes = torch.cuda.memory_allocated(device)
        free_bytes += torch.cuda.memory_reserved(device) - pinned_bytes
        name = torch.cuda.get_device_name(device)
        is_ampere = torch.cuda.get_device_capability(device) >= (8, 0)
        return CudaMemory(name, total_bytes, free_bytes, pinned_bytes, is_ampere)
    except RuntimeError as error:
        problem = f"CUDA does not start on this GPU ({one_line(error)})"
        raise NoDevice(f"{problem}: end what else uses it, or give --device cpu") from error


@contextmanager
def measuring(device: int = 0) -> Iterator[None]:
    """Around measurements that come before a plan: they leave nothing behind on the device, and
    the peak of `vram_peak_bytes` begins after them.

    Raises VramExceeded where they find no room.
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
    """Bytes per second from pinned host memory; measured once in a process."""
    return measure_copies(CudaEngine(None, device))
