"""LlamaContext: a KV cache and compute buffers of llama.cpp for one loaded model.

It knows nothing of trees or streaming.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from backends.contract.backend import LAST_HIDDEN_STATE, BackendError
from backends.contract.exactness import EXACT_OFF, Exactness
from backends.contract.sequence import NO_HIDDEN_STATES
from backends.ggml.layer_outputs import LayerOutputs
from backends.ggml.library import LOG, LlamaError, LlamaModel, listen
from backends.ggml.nextn import HiddenStateFunctions, hidden_state_functions
from backends.llama.batch import Batch
from offload.process.cpus import threads_for_load, usable_cpus
from offload.process.signals import delayed_interrupt

CACHE_TYPES = {"f32": 0, "f16": 1, "bf16": 30, "q8_0": 8, "q4_0": 2}
"""KV cache types and their numbers in ggml.h."""
PREFILL_TOKENS = 512
"""Tokens of a prefill chunk. A streamed model is read once per chunk; llama.cpp's compute buffers
grow with it."""
_MAX_SEQUENCES = 256  # LLAMA_MAX_SEQ
MAX_LEAVES = _MAX_SEQUENCES - 1  # one sequence is scratch, for recording graphs
_CELL_STEP = 256
_STATES = (3, 1)
"""Recurrent states of a sequence that runs (base, live, checkpoint), and of one that is cached."""


MAX_ROLLBACK_TOKENS = 32
"""Maximum tokens at the beginning of a pass that recurrent states are rolled back to: the inputs of
32 take 128 MB for a 27B of Qwen3.5's shape. More accepted tokens are computed once more."""


class WithoutFlashAttention(LlamaError):
    """llama.cpp does not use flash attention for a model that was to be exact."""


@dataclass(frozen=True)
class ContextOptions:
    """Sizes and formats of a context."""

    max_context: int
    """Maximum number of tokens of a sequence; each takes a cell of the KV cache."""
    max_nodes: int
    """Maximum number of live nodes, which use the cells that prefixes leave free."""
    max_outputs: int | None = None
    """Maximum number of rows of logits; None: max_nodes."""
    n_threads: int | None = None
    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attention: bool | None = None
    """None: llama.cpp's default, on if it can."""
    exactness: Exactness = EXACT_OFF
    """Pad passes and require flash attention, if exact."""
    num_kv_slots: int | None = None
    """Tokens and nodes of all sequences together; None: enough for one sequence."""
    max_num_seqs: int = 1
    """Maximum number of sequences at a time."""
    follows_load: bool = False
    """Whether passes use fewer threads while other programs compute."""
    is_recurrent: bool = False
    """Whether layers have a recurrent state."""
    is_head: bool = False
    """Whether passes run the model's MTP head instead of the model."""

    def __post_init__(self) -> None:
        for name in (self.cache_type_k, self.cache_type_v):
            if name not in CACHE_TYPES:
                raise ValueError(f"cache type {name!r} is not one of {', '.join(CACHE_TYPES)}")

    @property
    def n_cells(self) -> int:
        """Cells of the KV cache, as padded by llama.cpp."""
        num_tokens = self.max_context if self.num_kv_slots is None else self.num_kv_slots
        n_used = max(num_tokens, self.max_nodes) + self.n_fillers
        return -(-n_used // _CELL_STEP) * _CELL_STEP

    @property
    def min_batch_tokens(self) -> int:
        """Minimum number of tokens of a pass; smaller ones are padded."""
        return self.exactness.min_batch_tokens if self.exactness.is_exact else 1

    @property
    def n_fillers(self) -> int:
        """Maximum number of padding tokens of a pass; each takes a cell during the pass."""
        return self.min_batch_tokens - 1

    @property
    def max_rollback_tokens(self) -> int:
        """Maximum tokens at the beginning of a pass that recurrent states are rolled back to."""
        return min(MAX_ROLLBACK_TOKENS, max(self.max_nodes, self.min_batch_tokens))

    @property
    def max_num_tokens(self) -> int:
        widest_chunk = min(self.max_context, PREFILL_TOKENS)
        return max(self.max_nodes, widest_chunk, self.min_batch_tokens)

    @property
    def n_outputs(self) -> int:
        return max(self.max_outputs or self.max_nodes, self.max_num_seqs)

    @property
    def n_states(self) -> int:
        """Recurrent states; half of the sequences run at a time, the others are cached."""
        return min(sum(_STATES) * max(1, self.max_num_seqs // 2), MAX_LEAVES - 1)

    @property
    def n_sequences(self) -> int:
        """llama.cpp sequences: one per leaf, two per other sequence, and the scratch one; of a
        recurrent model one per state, a graveyard of cells, and the scratch one."""
        if self.is_recurrent:
            return self.n_states + 2
        return min(max(self.max_nodes, 2) + 2 * (self.max_num_seqs - 1), MAX_LEAVES) + 1


class LlamaContext:
    """A KV cache and compute buffers for one model.

    Args:
        eval_callback: ggml's callback for every node of a graph (`ggml_backend_sched_eval_callback`
            of the library), or None.
        outputs: takes outputs of layers, from `eval_callback`; None: passes return none.
    """

    def __init__(
        self,
        model: LlamaModel,
        options: ContextOptions,
        eval_callback: Any = None,
        outputs: LayerOutputs | None = None,
    ) -> None:
        self._model, self._library = model, model.library
        self._max_threads = options.n_threads or usable_cpus()
        self._follows_load = options.follows_load
        params = self._params(options)
        if eval_callback is not None:
            params.cb_eval = eval_callback
        # ggml asks after each node whether to stop, a thousand times per pass. strlen of one byte
        # answers without taking Python's lock.
        self._stop = ctypes.create_string_buffer(2)
        self.is_stopping = False
        strlen = ctypes.CDLL(None).strlen
        params.abort_callback = ctypes.cast(strlen, self._library.ggml_abort_callback)
        params.abort_callback_data = ctypes.cast(self._stop, ctypes.c_void_p)
        listen(self._library)
        LOG.clear()
        self._handle: Any = None
        self._hidden_states: HiddenStateFunctions | None = None
        self._only_with_logits = False
        self._outputs = outputs
        self._layers: tuple[int, ...] = (LAST_HIDDEN_STATE,)
        try:
            self._open(params)
        except BaseException:
            self.close()
            raise
        self.log = LOG.lines()
        if self._handle and options.exactness.is_exact:
            self._check_attention()
        if not self._handle:
            raise LlamaError(
                f"llama.cpp cannot make a context of {options.n_cells} tokens with a "
                f"{options.cache_type_k}/{options.cache_type_v} cache: {LOG.reason()}"
            )
        self.memory: Any = self._library.llama_get_memory(self._handle)
        self.n_cells: int = self._library.llama_n_ctx(self._handle)

    def _open(self, params: Any) -> None:
        with delayed_interrupt():
            self._handle = self._library.llama_init_from_model(self._model.handle, params)

    def _params(self, options: ContextOptions) -> Any:
        params = self._library.llama_context_default_params()
        params.n_ctx = options.n_cells
        params.n_batch = params.n_ubatch = options.max_num_tokens
        params.n_seq_max = options.n_sequences
        params.n_outputs_max = max(options.n_outputs, options.n_sequences, options.min_batch_tokens)
        params.n_threads = params.n_threads_batch = self._max_threads
        params.type_k = CACHE_TYPES[options.cache_type_k]
        params.type_v = CACHE_TYPES[options.cache_type_v]
        if options.flash_attention is not None:
            params.flash_attn_type = int(options.flash_attention)
        if options.exactness.is_exact:
            params.flash_attn_type = 1
        params.kv_unified = True  # the sequences of a tree share the cells of their prefix
        params.swa_full = True  # so that a rollback finds all cells
        params.offload_kqv = params.op_offload = False
        if options.is_head:
            params.ctx_type = self._library.LLAMA_CONTEXT_TYPE_MTP
        return params

    @property
    def has_flash_attention(self) -> bool:
        """Whether llama.cpp uses flash attention, as requested or by its own decision."""
        pattern = r"flash_attn += enabled|Flash Attention enabled"
        return any(re.search(pattern, line) for line in self.log)

    def _check_attention(self) -> None:
        """Raise WithoutFlashAttention if llama.cpp has turned it off."""
        if not self.has_flash_attention:
            self.close()
            raise WithoutFlashAttention(
                "llama.cpp runs this model without flash attention, which sums in an order that "
                "depends on the pass"
            )

    def decode(self, batch: Batch) -> int:
        """Run one pass; return 0, or 2 if it was stopped. Raises BackendError otherwise."""
        LOG.clear()
        if self._follows_load:
            n_threads = threads_for_load(self._max_threads)
            self._library.llama_set_n_threads(self.handle, n_threads, n_threads)
        if self._outputs is not None:
            self._outputs.begin(batch.n_tokens, batch.state_rows)
        with delayed_interrupt():
            code = self._library.llama_decode(self.handle, batch.as_struct(self._library))
        if self._outputs is not None and self._outputs.error is not None:
            raise self._outputs.error
        if code not in (0, 2):
            raise BackendError(f"llama.cpp could not run {batch.n_tokens} tokens: {LOG.reason()}")
        return code

    def logits(self, batch: Batch, vocab_size: int) -> np.ndarray:
        """Return a copy of the last pass's requested logits, float32 [n, vocab], in batch order."""
        if batch.n_outputs == 0:
            return np.zeros((0, vocab_size), dtype=np.float32)
        pointer = self._library.llama_get_logits(self.handle)
        if not pointer:
            raise BackendError("llama.cpp has no logits of the last pass")
        rows: np.ndarray = np.ctypeslib.as_array(pointer, (batch.n_outputs, vocab_size))
        return rows[batch.requested]

    def collect_hidden_states(
        self, layers: Sequence[int] = (LAST_HIDDEN_STATE,), *, only_with_logits: bool = False
    ) -> None:
        """Let passes return outputs of these layers; they may have other graphs then.

        only_with_logits: the last hidden state, of tokens with logits instead of all.

        Raises LlamaError where this llama.cpp cannot.
        """
        of_layers = [layer for layer in layers if layer != LAST_HIDDEN_STATE]
        if of_layers and self._outputs is None:
            raise BackendError(
                "outputs of layers are returned by a model that was loaded for them: load it with "
                f"hidden_state_layers={tuple(layers)}"
            )
        if self._outputs is not None:
            self._outputs.collect(of_layers)
        if LAST_HIDDEN_STATE in layers:
            functions = hidden_state_functions()
            functions.enable(self.handle, only_with_logits=only_with_logits)
            self._hidden_states, self._only_with_logits = functions, only_with_logits
        self._layers = tuple(layers)

    def hidden_states(self, batch: Batch) -> np.ndarray:
        """Return a copy of the last pass's requested hidden states, float32 [n, layers * width].

        Raises BackendError or LlamaError where the model has none.
        """
        if not len(batch.state_rows):
            return NO_HIDDEN_STATES
        joined = None if self._outputs is None else self._outputs.joined(self._layers)
        if joined is not None:
            return joined
        parts = [self._states_of(layer, batch) for layer in self._layers]
        return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1)

    def _states_of(self, layer: int, batch: Batch) -> np.ndarray:
        if layer == LAST_HIDDEN_STATE or self._outputs is None:
            return self._last_hidden_states(batch)
        return self._outputs.states(layer)

    def _last_hidden_states(self, batch: Batch) -> np.ndarray:
        if self._hidden_states is None:
            raise BackendError("hidden states were not asked for before the pass")
        width = self._library.llama_model_n_embd(self._model.handle)
        if self._only_with_logits:
            num_rows, places = batch.n_outputs, batch.outputs_of(batch.state_rows)
        else:
            num_rows, places = batch.n_tokens, batch.state_rows
        rows = self._hidden_states.rows(self.handle, num_rows, width)[places]
        if not rows.any():  # llama.cpp's buffer, which this architecture's graph does not write
            raise BackendError(
                "llama.cpp returns no hidden states of this architecture, which draft heads need: "
                "use a draft model"
            )
        return rows

    def request_stop(self, stop: bool = True) -> None:
        """Let a running pass end after its current node; any thread may call this."""
        self.is_stopping = stop
        self._stop[0] = b"\1" if stop else b"\0"

    @contextmanager
    def stopping_at_once(self) -> Iterator[None]:
        """Stop passes within the block after their first node."""
        self._stop[0] = b"\1"
        try:
            yield
        finally:
            self._stop[0] = b"\1" if self.is_stopping else b"\0"

    @property
    def handle(self) -> Any:
        if not self._handle:
            raise LlamaError("the context is closed; load the model again")
        return self._handle

    def close(self) -> None:
        handle, self._handle = self._handle, None
        if handle:
            with delayed_interrupt():
                self._library.llama_free(handle)
