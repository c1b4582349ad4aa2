"""Hugging Face checkpoints for the planner, run by the torch backend on a GPU."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial

import torch
import transformers

from backends.contract.backend import Backend
from backends.contract.exactness import EXACT_OFF
from backends.contract.source import Loading, ModelCompute
from backends.cuda import probe
from backends.cuda.engine import CudaEngine
from backends.cuda.memory import cache_bytes
from backends.cuda.weights import DeviceWeights
from backends.feedforward.timing import measure_gpu_compute
from backends.hf.activations import activation_bytes
from backends.hf.backend import TorchBackend
from backends.hf.self_test import TorchExactness
from backends.hf.source import HfSource
from backends.packed.device import device_buffer_bytes
from backends.packed.timing import measure_gpu_decoding
from backends.timing.passes import is_small, measure_small
from offload.formats.tensors import TensorRecord
from offload.placement.placement import Placement, device_footprint


class HfGpuSource(HfSource):
    """A checkpoint that runs on a CUDA device, which is needed only once it measures."""

    def __init__(self, source: HfSource) -> None:
        self.path, self.model = source.path, source.model
        self.warnings = self.model.weight_warnings
        self._is_exact = source._is_exact
        self.vocab_size, self.max_context = source.vocab_size, source.max_context

    @cached_property
    def exactness(self) -> TorchExactness:
        return TorchExactness(False, "not tested on a GPU" if self._is_exact else EXACT_OFF.reason)

    @property
    def _decode_buffer_bytes(self) -> int:
        return 0  # torch decodes on the device

    @property
    def non_layer_bytes(self) -> int:
        buffer, beside = device_buffer_bytes(self.model.packed_modules)
        weights = super().non_layer_bytes
        return device_footprint(weights) + (device_footprint(buffer) + beside if buffer else 0)

    @property
    def _resident_records(self) -> Sequence[TensorRecord]:
        return self.model.non_layer_records

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        return cache_bytes(self.model, ctx_size + max_nodes + self.exactness.min_batch_tokens)

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        return activation_bytes(self.model, ctx_size, max_num_tokens, on_gpu=True)

    def shared_scratch_bytes(
        self, ctx_size: int, kv_tokens: int, max_num_tokens: int, max_nodes: int
    ) -> int:
        """See ModelSource; the keys of all sequences are gathered in order."""
        return self.scratch_bytes(kv_tokens, max_num_tokens, max_nodes)

    @cached_property
    def all_on_device(self) -> Placement:
        """Placement with all layers on the device, so that nothing is copied."""
        layers = tuple(layer.all_on_device() for layer in self.layers)
        return Placement(layers, is_on_device=True)

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        """Measure without reads from storage, which do not slow a GPU's arithmetic down."""
        if is_small(self):
            versions = f"torch {torch.__version__} transformers {transformers.__version__}"
            libraries = f"{versions} {probe.cuda_memory().name} {self.model.dtype}"
            return measure_small(self, libraries, placement=self.all_on_device)
        device = torch.device("cuda", 0)
        curve = measure_gpu_compute(self.model.dtype, device)
        decoding = self._by_scheme(partial(measure_gpu_decoding, device=device))
        return self._compute(curve, decoding, None)  # recurrent layers run on the CPU alone

    def _load(self, loading: Loading) -> Backend:
        assert loading.placement.is_on_device, "a model on a GPU is placed over three tiers"
        weights = DeviceWeights(
            self.model,
            loading.placement,
            CudaEngine(loading.vram_bytes),
            n_readers=loading.n_readers,
            progress=loading.progress,
        )
        return TorchBackend(
            self.model,
            weights,
            max_context=loading.max_context,
            max_nodes=loading.max_nodes,
            num_kv_slots=loading.num_kv_slots,
        )
