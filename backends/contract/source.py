"""A model before its weights: what planning must know of it, and how to load it.

One implementation for each format; each lives in a module of its own, so that a format's libraries
are imported only for its models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from backends.contract.backend import Backend
from backends.contract.curve import ComputeCurve
from backends.contract.exactness import NOT_ASKED, Exactness
from offload.formats.tensors import TensorRecord
from offload.placement.experts import LayerExperts
from offload.placement.placement import LayerWeights, Placement
from offload.ring.weight_prefetch import WeightPrefetch
from offload.storage.aligned import buffer_bytes
from offload.units import Progress

LOAD_MODES = ("auto", "stream", "ram", "mmap")
CACHE_TYPES = ("f16", "bf16", "q8_0", "q4_0")
"""Number formats of a KV cache. The first is llama.cpp's own choice, and the second as large."""


@dataclass(frozen=True)
class BackendOptions:
    """How the models of a run are to be run, whatever their format."""

    n_threads: int | None = None
    """Of the computation; when None as many as the process may keep busy, or torch's own fewer."""
    cache_type_k: str | None = None
    """Number format of the keys in the KV cache, from CACHE_TYPES; the model's own when None."""
    cache_type_v: str | None = None
    is_exact: bool = False
    """Whether a row's bits are to depend on the tokens before it alone, where that can be."""


@dataclass(frozen=True)
class ModelCompute:
    """Measured arithmetic of one model, wherever its layers are placed."""

    per_byte: ComputeCurve
    """Seconds for each byte of the weights that a pass multiplies with."""
    head_bytes: int
    """Size of the weights that come after the layers."""
    seconds_per_streamed_byte: float = 0.0
    """Time between the arrival of a layer and its use, and after that; nothing is computed then."""
    head_per_byte: ComputeCurve | None = None
    """The same for the weights after the layers, where their number format is another."""
    per_pass: ComputeCurve | None = None
    """Seconds of a pass that no weights account for."""

    def non_layer_seconds(self, num_tokens: int) -> float:
        """Return the seconds after the layers."""
        head = self.head_per_byte or self.per_byte
        seconds = head.seconds(num_tokens) * self.head_bytes
        return seconds if self.per_pass is None else seconds + self.per_pass.seconds(num_tokens)

    def times(self, factor: float) -> ModelCompute:
        """Return arithmetic that takes so many times as long."""
        head, rest = (
            None if curve is None else curve.times(factor)
            for curve in (self.head_per_byte, self.per_pass)
        )
        per_byte = self.per_byte.times(factor)
        return replace(self, per_byte=per_byte, head_per_byte=head, per_pass=rest)


@dataclass(frozen=True)
class Loading:
    """What `ModelSource.load` is told by the plan."""

    placement: Placement
    max_context: int
    max_nodes: int
    """Most live nodes at a time."""
    max_num_tokens: int
    """Most nodes of one call of `extend`."""
    load_mode: str = "stream"
    """From LOAD_MODES, decided: not "auto"."""
    vram_bytes: int | None = None
    """What the whole process may take of the GPU's memory beside CUDA's own context, where
    `residency` is of a GPU. None: what it was promised before, or all."""
    n_readers: int | None = None
    progress: Progress | None = None
    kv_tokens: int | None = None
    """Of all sequences together, beside live nodes; None: as many as one may have."""
    max_num_seqs: int = 1
    """At a time, those among them that are over and kept."""
    weight_prefetch: WeightPrefetch | None = None
    """Weights that are read already, perhaps those that are wanted."""

    @property
    def has_more_tokens(self) -> bool:
        """Whether all sequences together may have more tokens than one."""
        return self.kv_tokens is not None and self.kv_tokens > self.max_context

    @property
    def num_kv_slots(self) -> int:
        """Tokens and live nodes of all sequences."""
        return (self.kv_tokens or self.max_context) + self.max_nodes


class ModelSource(ABC):
    """The headers of one model. All sizes are bytes of real memory."""

    path: Path
    """Directory or file."""
    vocab_size: int
    """Columns of the logits."""
    max_context: int
    layers: tuple[LayerWeights, ...]
    experts: tuple[LayerExperts | None, ...] = ()
    """Of a mixture whose experts are read as they are asked for, of every layer: these are no part
    of `layers`."""
    warnings: tuple[str, ...] = ()
    """What the user of a plan should know."""
    can_mmap: bool = False
    can_use_gpu: bool = False
    """Whether a GPU can compute a model of this format."""
    smaller_cache_types: tuple[str, ...] = ()
    """Formats of the KV cache that would take less than the present one."""
    max_tree_leaves: int | None = None
    """Most leaves that a tree of this backend may have."""
    prefetch_records: tuple[TensorRecord, ...] | None = None
    """Tensors outside of the layers, where `load` takes early weights on the CPU."""

    @property
    @abstractmethod
    def weight_file(self) -> Path:
        """A file to measure the storage with: the longest, steadiest reads are possible there."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Tells whether KV that was computed elsewhere is this model's: weights, config, formats.

        Reads a few KB of every tensor. Raises CheckpointError where that fails.
        """

    @property
    @abstractmethod
    def non_layer_bytes(self) -> int:
        """Embeddings, norms and head, and copies of tensors that cannot be used as they lie."""

    def streaming_overhead_bytes(self, n_slots: int) -> int:
        """What a ring of that depth takes beside its slots, at most."""
        return 0

    def slot_bytes(self, placement: Placement) -> int:
        """Memory of one slot of the ring, at most, and so of a layer that is held in its place."""
        return buffer_bytes(placement.slot_bytes)

    @abstractmethod
    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        """The KV cache of so many tokens and live nodes."""

    def with_cache_type(self, cache_type: str) -> ModelSource:
        """The same model with a KV cache of a number format from `smaller_cache_types`."""
        raise ValueError(f"the KV cache cannot be {cache_type}")

    @abstractmethod
    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        """Activations and logits of a prompt of `ctx_size` or a pass of `max_rows`, at most."""

    @property
    def exactness(self) -> Exactness:
        """Whether a backend of this source is exact, and if not why; found out once and kept."""
        return NOT_ASKED

    @property
    @abstractmethod
    def head_bytes(self) -> int:
        """Of the weights that a pass multiplies with after the layers."""

    @abstractmethod
    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        """Time this machine's arithmetic on the model's own number formats, or on a small model
        itself.

        beside_reads: also while the model's storage is read, which a model in memory need not know.
        """

    @property
    def multiplied(self) -> tuple[TensorRecord, ...]:
        """What passes multiply with, experts included: of tensors that are decoded first, with the
        dtype, shape and bytes of what they are decoded into."""
        records = [record for layer in self.layers for record in layer.tensors]
        records += [r for x in self.experts if x is not None for e in x.tensors for r in e]
        return tuple(records)

    def decode_seconds(self) -> float:
        """Of a pass on this machine, beside its products: decoding what is stored packed."""
        return 0.0

    def pass_bytes(self, num_tokens: int) -> float:
        """Weights of the layers that a pass of so many rows multiplies with: of experts those that
        it is likely to be routed to."""
        dense = sum(record.n_bytes for layer in self.layers for record in layer.tensors)
        return dense + sum(x.used_bytes(num_tokens) for x in self.experts if x is not None)

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise CheckpointError where the files are others than those whose headers were read."""

    def load(self, loading: Loading) -> Backend:
        """Read the weights as planned. Raises CheckpointError: see `check_unchanged`."""
        backend = self._load(loading)
        try:
            self.check_unchanged()  # at the end, because by then all files are open
        except BaseException:
            backend.close()
            raise
        return backend

    @abstractmethod
    def _load(self, loading: Loading) -> Backend:
        """Read the weights, whatever files are there by now."""
