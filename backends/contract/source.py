"""ModelSource: a model before its weights are read, as the planner sees it, and how to load it.

Each format has an implementation in a module of its own, so that its libraries are imported only
for its models.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from pathlib import Path

from backends.contract.backend import Backend
from backends.contract.curve import ComputeCurve
from backends.contract.exactness import EXACT_OFF, Exactness
from offload.formats.tensors import TensorRecord
from offload.placement.experts import LayerExperts
from offload.placement.placement import LayerWeights, Placement
from offload.storage.aligned import buffer_bytes
from offload.units import Progress

LOAD_MODES = ("auto", "stream", "ram", "mmap")
MAX_PROMPT_STATES = 512
"""Last tokens whose hidden states a draft head is given in a pass: the states of a whole prompt
would take more memory than its KV. With the last 16, 64, 256 and 1024 tokens of prompts of 350,
pair:hybrid's head brings 5.25, 5.60, 5.93 and 5.86 tokens per pass."""
CACHE_TYPES = ("f16", "bf16", "q8_0", "q4_0", "fp8")
"""Number formats of a KV cache. f16 is llama.cpp's default; bf16 is as large. Only llama.cpp has
q4_0, and only torch fp8."""


@dataclass(frozen=True)
class BackendOptions:
    """Options for running models, whatever their format."""

    n_threads: int | None = None
    """Compute threads; None: as many as the process may use, or torch's own number if smaller."""
    cache_type_k: str | None = None
    """Number format of the keys in the KV cache, from CACHE_TYPES; None: the dtype of a checkpoint,
    or what exactness needs of a GGUF model."""
    cache_type_v: str | None = None
    is_exact: bool = False
    """Whether a token's logits are to depend on the tokens before it alone, where possible."""


@dataclass(frozen=True)
class ModelCompute:
    """Measured compute times of one model, independent of the placement of its layers."""

    per_byte: ComputeCurve
    """Seconds per byte of the weights that a pass multiplies with."""
    head_bytes: int
    """Size of the weights that come after the layers."""
    seconds_per_streamed_byte: float = 0.0
    """Idle seconds per byte before and after the use of a streamed layer; nothing computes then."""
    head_per_byte: ComputeCurve | None = None
    """Seconds per byte of the weights after the layers, if their number format is another."""
    per_pass: ComputeCurve | None = None
    """Seconds of a pass that do not depend on the weights."""
    block_size: int | None = None
    """Tokens of the single pass in which a draft proposes all levels of a tree; None: a pass for
    each level, of its tokens."""

    def non_layer_seconds(self, num_tokens: int) -> float:
        """Return the seconds of a pass outside of the layers."""
        head = self.head_per_byte or self.per_byte
        seconds = head.seconds(num_tokens) * self.head_bytes
        return seconds if self.per_pass is None else seconds + self.per_pass.seconds(num_tokens)

    def times(self, factor: float) -> ModelCompute:
        """Return the same compute times, multiplied by `factor`."""
        head, per_pass = (
            None if curve is None else curve.times(factor)
            for curve in (self.head_per_byte, self.per_pass)
        )
        per_byte = self.per_byte.times(factor)
        return replace(self, per_byte=per_byte, head_per_byte=head, per_pass=per_pass)


@dataclass(frozen=True)
class KvSplit:
    """A KV cache of which a part is in memory, and the rest in a file."""

    hot_tokens: int
    """Tokens of all sequences whose KV is in memory."""
    prompt_tokens: int
    """Maximum prompt tokens of a pass: the activations of a whole context may not fit either."""


@dataclass(frozen=True)
class StoredKv:
    """Memory of a model whose KV cache is split, in bytes."""

    hot_bytes: int
    staging_bytes: int
    """Buffers that the cold KV of one layer after the other passes through."""
    scratch_bytes: int
    """Activations and logits: see ModelSource.scratch_bytes."""
    layer_token_bytes: tuple[int, ...]
    """KV of one token in each layer."""
    split: KvSplit

    def layer_read_bytes(self, n_tokens: int) -> tuple[int, ...]:
        """Return the bytes of KV that a pass reads for each layer, for sequences of `n_tokens`."""
        n_cold = max(0, n_tokens - self.split.hot_tokens)
        return tuple(n_cold * n_bytes for n_bytes in self.layer_token_bytes)


@dataclass(frozen=True)
class Loading:
    """The plan's arguments for `ModelSource.load`."""

    placement: Placement
    max_context: int
    max_nodes: int
    """Maximum number of live nodes at a time."""
    max_num_tokens: int
    """Maximum number of nodes of one forward pass."""
    load_mode: str = "stream"
    """One of LOAD_MODES, but not "auto"."""
    vram_bytes: int | None = None
    """GPU memory for the whole process beside CUDA's own context, if `placement` is on a GPU.
    None: what was reserved before, or all."""
    n_readers: int | None = None
    progress: Progress | None = None
    kv_tokens: int | None = None
    """Tokens of all sequences together, beside live nodes; None: `max_context`."""
    max_num_seqs: int = 1
    """Sequences at a time, finished ones in the prefix cache included."""
    kv_split: KvSplit | None = None
    """Part of the KV cache that is in memory; None: all of it."""
    kv_folder: Path | None = None
    """Folder of the file with the rest."""
    has_head: bool = False
    """Whether a draft will use the model's own draft head, which is loaded with it."""
    hidden_state_layers: tuple[int, ...] = ()
    """Layers whose outputs a draft head will take: see Backend.collect_hidden_states."""

    @property
    def has_more_tokens(self) -> bool:
        """Whether all sequences together may have more tokens than one."""
        return self.kv_tokens is not None and self.kv_tokens > self.max_context

    @property
    def num_kv_slots(self) -> int:
        """Tokens and live nodes of all sequences."""
        return (self.kv_tokens or self.max_context) + self.max_nodes


class ModelSource(ABC):
    """One model, known by its headers. All sizes are bytes of real memory."""

    path: Path
    """Directory or file."""
    vocab_size: int
    """Columns of the logits."""
    max_context: int
    layers: tuple[LayerWeights, ...]
    experts: tuple[LayerExperts | None, ...] = ()
    """Experts of each layer of a mixture whose experts are read on demand; they are no part of
    `layers`."""
    warnings: tuple[str, ...] = ()
    """Warnings for the user, shown with the plan."""
    can_mmap: bool = False
    can_use_gpu: bool = False
    """Whether a GPU can run a model of this format."""
    cache_types: tuple[str, str] = ("", "")
    """Number formats of the keys and the values in the KV cache; empty if not known."""
    smaller_cache_types: tuple[str, ...] = ()
    """KV cache formats that are smaller than the present one."""
    max_tree_leaves: int | None = None
    """Maximum number of leaves of a tree; None: no limit."""
    hidden_state_bytes: int = 0
    """Bytes, in float32, of the target's hidden states that a draft head takes with a token; 0 for
    other models."""
    target_layers: tuple[int, ...] = ()
    """Layers of the target whose outputs a draft head takes; () for other models."""
    can_store_kv: bool = False
    """Whether a part of the KV cache can be in a file: see `stored_kv`."""
    attends_to_target: bool = False
    """Whether it is a draft head that attends to the target's KV, which is in memory then."""
    prefers_chains: bool = False
    """Whether each branch of a tree takes a pass of its own."""

    @property
    def planning_takes_memory(self) -> bool:
        """Whether planning reads parts of the model, such as its vocabulary, until
        `end_planning`."""
        return False

    def end_planning(self) -> None:  # noqa: B027 (optional)
        """Free memory that nothing but planning needs, until the next time."""

    @property
    @abstractmethod
    def weight_file(self) -> Path:
        """The file to measure storage bandwidth with: the largest, for long and steady reads."""

    @abstractmethod
    def fingerprint(self) -> str:
        """Return a digest of weights, config and formats, to tell whether saved KV is this model's.

        Reads a few KB of every tensor. Raises CheckpointError where that fails.
        """

    @property
    @abstractmethod
    def non_layer_bytes(self) -> int:
        """Bytes of embeddings, norms and head, and of tensors that must be copied to be used."""

    def load_decoders(self) -> None:  # noqa: B027  # most formats need none
        """Load what decodes packed weights on the CPU, so that its own memory is measured before a
        memory plan is made. Raises UnsupportedModel where a library is missing."""

    def streaming_overhead_bytes(self, n_slots: int) -> int:
        """Return the maximum bytes that a ring of `n_slots` takes beside its slots."""
        return 0

    def slot_bytes(self, placement: Placement) -> int:
        """Return the maximum bytes of a slot of the ring, and so of a layer pinned in it."""
        return buffer_bytes(placement.slot_bytes)

    @abstractmethod
    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        """Return the bytes of a KV cache of `ctx_size` tokens and `max_nodes` live nodes."""

    def state_bytes(self, n_sequences: int, max_nodes: int) -> int:
        """Return the bytes of the recurrent states of `n_sequences` that run at a time, as many
        cached ones, and `max_nodes` live nodes; 0 without recurrent layers."""
        return 0

    def state_input_bytes(self, max_nodes: int) -> int:
        """Return the bytes that a streamed model keeps beside recurrent states, to roll them back
        to one of `max_nodes` nodes; 0 without such states."""
        return 0

    def measure_states(self, reading: Path | None = None) -> ComputeCurve | None:
        """Return the seconds that a pass takes for recurrent states; None without recurrent layers.

        reading: a file to read meanwhile.
        """
        return None

    def with_cache_type(self, cache_type: str) -> ModelSource:
        """Return the same model with a KV cache in a format from `smaller_cache_types`."""
        raise ValueError(f"the KV cache cannot be {cache_type}")

    def min_hot_tokens(self, max_nodes: int) -> int:
        """Return the minimum of `KvSplit.hot_tokens` with `max_nodes` live nodes."""
        raise ValueError("the KV cache cannot be split")

    def stored_kv(
        self, sizes: tuple[int, int], split: KvSplit, max_num_tokens: int, max_nodes: int
    ) -> StoredKv:
        """Return the memory with a split KV cache.

        sizes: (tokens of a sequence, of all sequences together).
        """
        raise ValueError("the KV cache cannot be split")

    @abstractmethod
    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        """Return the maximum bytes of activations and logits, for a prompt of `ctx_size` tokens
        or a pass of `max_num_tokens`."""

    def shared_scratch_bytes(
        self, ctx_size: int, kv_tokens: int, max_num_tokens: int, max_nodes: int
    ) -> int:
        """Return `scratch_bytes` where sequences of up to `ctx_size` tokens share a KV cache of
        `kv_tokens`: a pass takes `ctx_size` prompt tokens of them at most."""
        return self.scratch_bytes(kv_tokens, max_num_tokens, max_nodes)

    def can_share_kv(self, ctx_size: int, kv_tokens: int, max_nodes: int) -> bool:
        """Return whether the output is the same in a KV cache of `kv_tokens` as in one of a single
        context."""
        return True

    @property
    def exactness(self) -> Exactness:
        """Whether a backend of this source is exact, and if not why; checked once and cached."""
        return EXACT_OFF

    @property
    @abstractmethod
    def head_bytes(self) -> int:
        """Bytes of the weights that a pass multiplies with after the layers."""

    @abstractmethod
    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        """Time products in the model's number formats on this machine, or a small model itself.

        beside_reads: also while the model's storage is read; not needed for a model in memory.
        """

    @property
    def multiplied(self) -> tuple[TensorRecord, ...]:
        """Tensors that passes multiply with, experts included. Tensors that are decoded first have
        the dtype, shape and bytes of the decoded one."""
        records = [record for layer in self.layers for record in layer.tensors]
        records += [r for x in self.experts if x is not None for e in x.tensors for r in e]
        return tuple(records)

    def decode_seconds(self) -> float:
        """Return the seconds per pass for decoding weights that are stored packed."""
        return 0.0

    def pass_bytes(self, num_tokens: int) -> float:
        """Return the bytes of layer weights that a pass of `num_tokens` multiplies with, of experts
        those of the ones it is likely to be routed to."""
        dense = sum(record.n_bytes for layer in self.layers for record in layer.tensors)
        return dense + sum(x.used_bytes(num_tokens) for x in self.experts if x is not None)

    @abstractmethod
    def check_unchanged(self) -> None:
        """Raise CheckpointError if the files have changed since their headers were read."""

    def load(self, loading: Loading) -> Backend:
        """Load the model as planned. Raises CheckpointError: see `check_unchanged`."""
        backend = self._load(loading)
        try:
            self.check_unchanged()  # at the end, because by then all files are open
        except BaseException:
            backend.close()
            raise
        return backend

    @abstractmethod
    def _load(self, loading: Loading) -> Backend:
        """Load the model without `check_unchanged`."""
