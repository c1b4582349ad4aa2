"""GgufHeadSource: the MTP head of a GGUF target, for the planner and for loading."""

from __future__ import annotations

from pathlib import Path

from backends.contract.backend import LAST_HIDDEN_STATE, Backend, BackendError
from backends.contract.exactness import EXACT_OFF
from backends.contract.shares_weights import SharesWeights
from backends.contract.source import BackendOptions, Loading, ModelCompute
from backends.ggml.nextn import hidden_state_functions
from backends.gguf.heads import (
    check_head,
    has_states_with_logits_only,
    head_records,
    output_record,
    resident_head_records,
)
from backends.heads.gguf_backend import GgufHead
from backends.llama.base import GgufBackend
from backends.llama.context import MAX_LEAVES, PREFILL_TOKENS, ContextOptions
from backends.llama.memory import ContextMemory, context_memory
from backends.llama.source import GgufSource, measure_formats
from offload.placement.placement import LayerWeights
from offload.process.cpus import usable_cpus
from offload.storage.reading import resident_footprint

_FLOAT32_BYTES = 4
_CHAIN_NODES = 64
"""Live nodes of a head whose target gets chains. llama.cpp reserves two rows of logits for each,
which are 2 MB with a vocabulary of 250,000."""


class GgufHeadSource(SharesWeights):
    """The MTP head inside a GGUF target's file. Embedding and output head are the target's own, and
    take no further memory.

    `load` needs the backend of the target (see `share_weights`), loaded with `Loading.has_head`: it
    has the head's tensors.

    Raises UnsupportedModel if the file has no head, or one that does not run; LlamaError where this
    llama.cpp has none of the functions that it needs.
    """

    layers = ()

    def __init__(self, target: GgufSource, options: BackendOptions) -> None:
        check_head(target.model)
        hidden_state_functions()
        self._target, self._model = target, target.model
        self._n_threads = options.n_threads or usable_cpus()
        self._follows_load = options.n_threads is None
        self.path = target.path
        self.vocab_size = target.vocab_size
        self.max_context = target.max_context
        self.max_tree_leaves = _CHAIN_NODES if target.prefers_chains else MAX_LEAVES
        self.hidden_state_bytes = _FLOAT32_BYTES * self._model.hidden_size
        self.target_layers = (LAST_HIDDEN_STATE,)
        self._resident = resident_head_records(head_records(self._model))
        self._experts = self._model.experts_of(LayerWeights(tuple(self._resident)))
        self._owner: Backend | None = None
        self._memory: dict[ContextOptions, ContextMemory] = {}

    def share_weights(self, owner: Backend) -> None:
        self._owner = owner

    @property
    def weight_file(self) -> Path:
        return self._target.weight_file

    def fingerprint(self) -> str:
        return f"{self._target.fingerprint()} mtp"

    @property
    def non_layer_bytes(self) -> int:
        return resident_footprint(self._resident)

    def kv_bytes(self, ctx_size: int, max_nodes: int) -> int:
        return self._memory_of(self._options(ctx_size, max_nodes)).kv_bytes

    def scratch_bytes(self, ctx_size: int, max_num_tokens: int, max_nodes: int) -> int:
        """Include the hidden states of a pass of the target and of one of the head, which llama.cpp
        and a batch keep."""
        options = self._options(ctx_size, max_nodes, max_num_tokens)
        n_states = PREFILL_TOKENS + 2 * options.max_num_tokens
        return self._memory_of(options).scratch_bytes + n_states * self.hidden_state_bytes

    @property
    def head_bytes(self) -> int:
        return round(self._multiplied_bytes(1))

    def measure_compute(self, beside_reads: bool = True) -> ModelCompute:
        records = [*self._resident, output_record(self._model)]
        reading = self.weight_file if beside_reads else None
        curve, n_first = measure_formats(records, self._n_threads, reading), self.head_bytes
        by_tokens = curve.weighted(lambda n: self._multiplied_bytes(n) / n_first)
        return ModelCompute(curve, n_first, head_per_byte=by_tokens)

    def check_unchanged(self) -> None:
        self._target.check_unchanged()

    def _load(self, loading: Loading) -> Backend:
        if not isinstance(self._owner, GgufBackend):
            raise BackendError("a draft head is loaded after its target")
        options = self._options(
            min(loading.max_context, self.max_context),
            loading.max_nodes,
            loading.max_num_tokens,
            loading.kv_tokens if loading.has_more_tokens else None,
            loading.max_num_seqs,
        )
        self._owner.collect_hidden_states(self.target_layers)
        return GgufHead(
            self._owner, options, only_with_logits=has_states_with_logits_only(self._model)
        )

    def _options(
        self,
        ctx_size: int,
        max_nodes: int,
        max_num_tokens: int | None = None,
        num_kv_slots: int | None = None,
        max_num_seqs: int = 1,
    ) -> ContextOptions:
        return ContextOptions(
            ctx_size,
            max_nodes,
            max_num_tokens,
            self._n_threads,
            exactness=EXACT_OFF,
            num_kv_slots=num_kv_slots,
            max_num_seqs=max_num_seqs,
            follows_load=self._follows_load,
            is_head=True,
        )

    def _memory_of(self, options: ContextOptions) -> ContextMemory:
        if options not in self._memory:
            loaded = self._target.weightless
            self._memory[options] = context_memory(self._model, loaded, options)
        return self._memory[options]

    def _multiplied_bytes(self, num_tokens: int) -> float:
        """Return the bytes of weights that so many tokens are likely to be multiplied with."""
        multiplied = {r.name: r.n_bytes for r in (*self._resident, output_record(self._model))}
        n_bytes: float = sum(multiplied.values())
        if self._experts is not None:
            n_bytes += self._experts.used_bytes(num_tokens) - self._experts.n_bytes
        return n_bytes
