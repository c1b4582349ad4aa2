"""A GPU for runs without one: the fake engine computes with torch on the CPU.

Everything above the engine is the real thing: options, plans, both ledgers, rings, backends.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from cpu_engine import CpuEngine
from fake_device import Policy
from tiered import plan_tiers

from backends.cuda.probe import CudaMemory
from backends.feedforward.timing import measure_compute
from offload.placement.placement import LayerWeights, Placement
from offload.units import GIB

PEAK_BYTES = 123


def install_fake_gpu(patch: pytest.MonkeyPatch) -> list[int]:
    """Pretend that a GPU of 8 GiB exists. Return the VRAM limits of the engines made, except those
    for measurements."""
    limits: list[int] = []

    def engine(vram_bytes: int | None) -> CpuEngine:
        if vram_bytes is not None:
            limits.append(vram_bytes)
        return CpuEngine(Policy.EARLY)

    def compute(dtype: torch.dtype, device: torch.device) -> Any:
        return measure_compute(dtype)

    patch.setattr("backends.cuda.engine.cuda_problem", lambda: None)
    patch.setattr("backends.cuda.engine.vram_peak_bytes", lambda: PEAK_BYTES)
    memory = CudaMemory("fake", 8 * GIB, 6 * GIB)
    patch.setattr("backends.cuda.probe.cuda_memory", lambda: memory)
    patch.setattr("backends.cuda.probe.measure_copies_to_gpu", lambda: 1e9)
    patch.setattr("backends.cuda.probe.measuring", nullcontext)
    patch.setattr("backends.cuda.source.measure_gpu_compute", compute)
    patch.setattr("backends.cuda.source.CudaEngine", engine)
    return limits


def force_tiers(patch: pytest.MonkeyPatch) -> None:
    """Stream all of a target from now on, through one pinned slot."""

    def nothing(layers: Any, device_bytes: int) -> Any:
        return tuple(LayerWeights(layer.tensors) for layer in layers)

    def streamed(layers: Any, host_bytes: int, **slots: Any) -> Placement:
        return Placement(layers, 1, is_on_device=True)

    patch.setattr("specdec.planning.memory.placement_planner.fill_device", nothing)
    patch.setattr("specdec.planning.memory.placement_planner.fill_host", streamed)
    patch.setattr(
        "specdec.planning.memory.placement_planner.WholeGpuPlacementPlanner.place", _resident
    )


def _resident(self: Any, n_bytes: int, device_bytes: int) -> Placement:
    """Keep the draft in device memory all the same."""
    return plan_tiers(self.source.layers, n_bytes, device_bytes)
