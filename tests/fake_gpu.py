"""A GPU for runs that have none: the fake engine computes with torch on the CPU.

Everything above the engine is the real thing: options, plans, both ledgers, rings, backends.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cpu_engine import CpuEngine
from fake_device import Policy

from backends.compute import measure_compute
from backends.cuda_probe import CudaMemory
from offload import tier_planner
from offload.units import GIB

PEAK_BYTES = 123


def install_fake_gpu(patch: pytest.MonkeyPatch) -> list[int]:
    """From now on a GPU of 8 GiB is here. Returns the limits that engines were made with."""
    limits: list[int] = []

    def engine(vram_bytes: int) -> CpuEngine:
        limits.append(vram_bytes)
        return CpuEngine(Policy.EARLY)

    def compute(dtype: torch.dtype, device: torch.device) -> Any:
        return measure_compute(dtype)

    patch.setattr("backends.cuda_engine.cuda_problem", lambda: None)
    patch.setattr("backends.cuda_engine.vram_peak_bytes", lambda: PEAK_BYTES)
    patch.setattr("backends.cuda_probe.cuda_memory", lambda: CudaMemory("fake", 8 * GIB, 6 * GIB))
    patch.setattr("backends.cuda_probe.measure_copies_to_gpu", lambda: 1e9)
    patch.setattr("backends.hf_gpu_source.measure_gpu_compute", compute)
    patch.setattr("backends.hf_source.CudaEngine", engine)
    return limits


def force_tiers(patch: pytest.MonkeyPatch) -> None:
    """Of targets from now on nothing stays on the GPU, and all but the least comes from storage."""

    def nothing(layers: Any, device_bytes: int, n_device_slots: int) -> tier_planner.OnDevice:
        return tuple(frozenset[str]() for _ in layers)

    def least(layers: Any, on_device: Any, host_bytes: int, **slots: Any) -> Any:
        if any(on_device):
            return tier_planner.place_rest(layers, on_device, host_bytes, **slots)
        n_slots = slots.get("n_slots")
        smallest = tier_planner.smallest_host_bytes(layers, on_device, n_slots)
        return tier_planner.place_rest(layers, on_device, smallest, **slots)

    patch.setattr("specdec.tenants.choose_on_device", nothing)
    patch.setattr("specdec.tenants.place_rest", least)
