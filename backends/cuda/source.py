"""Hugging Face checkpoints for the planner, run by the torch backend on a GPU."""

from __future__ import annotations

from functools import cache, cached_property

import torch

from backends.contract.ranking import RANKED_TOGETHER, Ranking
from backends.contract.source import ModelCompute
from backends.cuda.engine import CudaEngine
from backends.cuda.memory import cache_bytes, recording_bytes
from backends.cuda.ranker import DeviceRanker
from backends.cuda.rows import DeviceRows
from backends.hf.activations import activation_bytes
from backends.hf.source import HfSource
from backends.hf.timing import measure_gpu_compute
from backends.timing.measure import ComputeCurve, Product, measure_curve
from backends.timing.passes import is_small, measure_small
from offload.residency.placement import Placement, device_footprint

_RANKED_ROWS = (1, RANKED_TOGETHER, 4 * RANKED_TOGETHER)


class HfGpuSource(HfSource):
    """A checkpoint as a CUDA device runs it. Needs none before it measures."""

    def __init__(self, source: HfSource) -> None:
        self.path, self.model = source.path, source.model
        self.vocab_size, self.max_context = source.vocab_size, source.max_context

    def on_gpu(self) -> HfGpuSource:
        return self

    @property
    def outer_bytes(self) -> int:
        return device_footprint(super().outer_bytes)

    def kv_bytes(self, ctx_size: int, max_nodes: int, cache_type: str | None = None) -> int:
        return cache_bytes(self.model, ctx_size + max_nodes)

    def scratch_bytes(self, ctx_size: int, max_rows: int, max_nodes: int) -> int:
        return activation_bytes(self.model, ctx_size, max_rows, on_gpu=True)

    def recording_bytes(self, ctx_size: int, max_rows: int, max_nodes: int) -> int:
        return recording_bytes(self.model, ctx_size, max_nodes, max_rows)

    @cached_property
    def all_on_device(self) -> Placement:
        """Nothing is copied."""
        layers = tuple(layer.all_on_device() for layer in self.layers)
        return Placement(layers, is_on_device=True)

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        """Reads from storage leave a GPU's arithmetic alone."""
        if is_small(self):
            return measure_small(self, 0, residency=self.all_on_device, records_levels=True)
        curve = measure_gpu_compute(self.model.dtype, torch.device("cuda", 0))
        return ModelCompute(curve, self.head_bytes)

    def measure_ranking(self, ranking: Ranking, width: int) -> ComputeCurve:
        return _measure_ranking(ranking, self.vocab_size, self.model.dtype, width)


@cache
def _measure_ranking(
    ranking: Ranking, vocab_size: int, dtype: torch.dtype, width: int
) -> ComputeCurve:
    """Measured once in a process; what is ranked is waited for."""
    engine = CudaEngine(None)
    ranker = DeviceRanker(ranking, engine.device, engine.computing)
    with engine.computing():
        logits = torch.randn((max(_RANKED_ROWS), vocab_size), dtype=dtype, device=engine.device)

    def product(n_rows: int) -> Product:
        rows = DeviceRows(logits[:n_rows], engine.computing)
        return lambda: ranker.rank(rows, range(n_rows), width)

    return measure_curve({n: product(n) for n in _RANKED_ROWS}, 1)
