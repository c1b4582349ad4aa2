"""SharedSource: a draft that is the target itself, with a KV cache of its own."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from pathlib import Path

from backends.contract.backend import Backend, BackendError
from backends.contract.curve import ComputeCurve
from backends.contract.source import Loading, ModelCompute, ModelSource


class SharesWeights(ModelSource):
    """A source whose models use weights of another one that is loaded."""

    @abstractmethod
    def share_weights(self, owner: Backend) -> None:
        """Let `load` use this backend's weights from now on."""


class SharedSource(SharesWeights):
    """A source for a second KV cache over `source`'s weights; those take no further memory.

    `load` needs the backend that has the weights: see `share_weights`.
    """

    def __init__(self, source: ModelSource) -> None:
        self.source = source
        self._owner: Backend | None = None
        self.path = source.path
        self.vocab_size = source.vocab_size
        self.max_context = source.max_context
        self.max_tree_leaves = source.max_tree_leaves
        self.can_use_gpu = source.can_use_gpu
        self.layers = ()

    def share_weights(self, owner: Backend) -> None:
        self._owner = owner

    @property
    def weight_file(self) -> Path:
        return self.source.weight_file

    def fingerprint(self) -> str:
        return self.source.fingerprint()

    @property
    def non_layer_bytes(self) -> int:
        return 0

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        return self.source.kv_bytes(ctx_size, max_nodes)

    def state_bytes(self, n_sequences: int, max_nodes: int) -> int:
        return self.source.state_bytes(n_sequences, max_nodes)

    def measure_states(self, reading: Path | None = None) -> ComputeCurve | None:
        return self.source.measure_states(reading)

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        return self.source.scratch_bytes(ctx_size, max_num_tokens, max_nodes)

    def shared_scratch_bytes(
        self, ctx_size: int, kv_tokens: int, max_num_tokens: int, max_nodes: int
    ) -> int:
        return self.source.shared_scratch_bytes(ctx_size, kv_tokens, max_num_tokens, max_nodes)

    @property
    def head_bytes(self) -> int:
        """Bytes of all weights that a pass multiplies with, since this source has no layers."""
        return int(self.source.pass_bytes(1)) + self.source.head_bytes

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        compute, n_bytes = self.source.measure_compute(beside_reads), self.head_bytes
        n_head = self.source.head_bytes
        parts = [
            ((n_bytes - n_head) / n_bytes, compute.per_byte),
            (n_head / n_bytes, compute.head_per_byte or compute.per_byte),
        ]
        return replace(compute, head_bytes=n_bytes, head_per_byte=ComputeCurve.mixed(parts))

    def check_unchanged(self) -> None:
        self.source.check_unchanged()

    def _load(self, loading: Loading) -> Backend:
        if self._owner is None:
            raise BackendError("the weights that were to be shared are not loaded")
        return self._owner.with_shared_weights(
            max_context=loading.max_context,
            max_nodes=loading.max_nodes,
            max_num_tokens=loading.max_num_tokens,
        )
