"""Hugging Face checkpoints for the planner, run by the torch backend on a GPU."""

from __future__ import annotations

import torch

from backends.compute import measure_gpu_compute
from backends.hf_source import HfSource
from backends.source import ModelCompute
from offload.tiers import device_footprint


class HfGpuSource(HfSource):
    """A checkpoint as a CUDA device runs it, loaded with tiers. Needs none before it measures."""

    def __init__(self, source: HfSource) -> None:
        self.path, self.model = source.path, source.model
        self.vocab_size, self.max_context = source.vocab_size, source.max_context

    def on_gpu(self) -> HfGpuSource:
        return self

    @property
    def outer_bytes(self) -> int:
        return device_footprint(super().outer_bytes)

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        """Reads from storage leave a GPU's arithmetic alone."""
        curve = measure_gpu_compute(self.model.dtype, torch.device("cuda", 0))
        return ModelCompute(curve, self.head_bytes)
