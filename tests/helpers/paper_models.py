"""Models that exist only as sizes, for planning."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest

from backends.contract.backend import Backend
from backends.contract.curve import ComputeCurve
from backends.contract.source import Loading, ModelCompute, ModelSource
from offload.formats.tensors import TensorRecord
from offload.placement.placement import LayerWeights
from offload.units import MIB


class PaperModel(ModelSource):
    """Layers of two equal tensors.

    Args:
        curve: seconds per byte; measuring is refused without it.
        can_use_gpu: as it is, and as fast as on the CPU; see `on_paper_gpus`.
    """

    smaller_cache_types = ("q8_0",)
    max_context = 4096
    vocab_size = 32000
    path = weight_file = Path("model.gguf")
    non_layer_bytes = head_bytes = 10 * MIB

    def __init__(
        self,
        name: str,
        n_layers: int,
        tensor_bytes: int,
        overhead_bytes: int = 0,
        curve: ComputeCurve | None = None,
        kv_bytes_per_token: int = MIB // 4,
        can_use_gpu: bool = False,
    ) -> None:
        self.layers = tuple(
            LayerWeights(
                tuple(
                    TensorRecord(
                        f"{name}.{i}.{k}", "F16", (tensor_bytes // 2,), self.path, at, tensor_bytes
                    )
                    for k, at in enumerate(
                        range(2 * i * tensor_bytes, 2 * (i + 1) * tensor_bytes, tensor_bytes)
                    )
                )
            )
            for i in range(n_layers)
        )
        self._overhead_bytes = overhead_bytes
        self._curve = curve
        self._kv_bytes_per_token = kv_bytes_per_token
        self.can_use_gpu = can_use_gpu

    def fingerprint(self) -> str:
        return self.layers[0].tensors[0].name

    def streaming_overhead_bytes(self, n_slots: int) -> int:
        return n_slots * self._overhead_bytes

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        return (ctx_size + max_nodes) * self._kv_bytes_per_token

    def with_cache_type(self, cache_type: str) -> ModelSource:
        other = copy.copy(self)
        other._kv_bytes_per_token //= 2
        return other

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        return 20 * MIB

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        assert self._curve is not None, "this model's arithmetic is not to be measured"
        return ModelCompute(self._curve, self.head_bytes)

    def check_unchanged(self) -> None:
        raise NotImplementedError

    def _load(self, loading: Loading) -> Backend:
        raise NotImplementedError


def on_paper_gpus(patch: pytest.MonkeyPatch) -> None:
    """Make a GPU run paper models unchanged from now on."""
    patch.setattr("backends.cuda.source.HfGpuSource", lambda source: source)
