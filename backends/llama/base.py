"""GgufBackend: a GGUF model on llama.cpp, in memory or streamed from storage.

Its subclasses keep the sequences: `LlamaBackend` (backend.py) trees, `RecurrentLlamaBackend`
(recurrent_backend.py) those of models with recurrent layers. Streamed layers are read during each
pass (stream.py).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Generic, Protocol

from backends.contract.backend import (
    LAST_HIDDEN_STATE,
    BackendError,
    ContextFull,
    KvUsage,
    TransferStats,
)
from backends.contract.exactness import EXACT_OFF, Exactness
from backends.contract.recovery import RecoveringBackend
from backends.contract.store import PassOutput, Store
from backends.ggml.layer_outputs import LayerOutputs
from backends.ggml.library import LlamaModel
from backends.gguf.model import GgufModel
from backends.llama.batch import Batch
from backends.llama.context import ContextOptions, LlamaContext
from backends.llama.loading import check_options, load_llama_model
from backends.llama.passes import QUICK_HANDOVER, CancellablePasses
from backends.llama.stream import StreamedLayers, mapped_ranges
from backends.llama_states.state_inputs import StateInputs
from offload.placement.placement import Placement
from offload.storage.aligned import PAGE_BYTES
from offload.storage.page_cache import drop_files
from offload.units import Progress

_VALUE_BYTES = 2  # f16: without flash attention the KV cache's values cannot be quantized


class CellCounts(Protocol):
    """The cells of a context, as far as all kinds of sequences need them."""

    n_cells: int
    """Maximum number of cells in use."""

    @property
    def n_free(self) -> int:
        """Cells that can be written."""

    @property
    def use(self) -> KvUsage:
        """Cells that sequences use."""

    def n_growth(self, num_tokens: int) -> int:
        """Return how many cells are written for the first time until users have `num_tokens`."""

    def empty_scratch(self) -> None:
        """Remove the padding tokens of a pass."""


class GgufBackend(RecoveringBackend[Store], Generic[Store]):
    """A GGUF model on llama.cpp.

    Args:
        max_context: maximum number of tokens of a sequence; None: what the model was trained for.
        max_nodes: maximum number of live nodes; trees may have min(max_nodes, MAX_LEAVES) leaves.
        max_outputs: maximum number of rows of logits of one call; None: max_nodes.
        num_kv_slots: tokens and nodes of all sequences together; None: enough for one sequence.
        max_num_seqs: maximum number of sequences at a time, if each has a tree of one leaf.
        cache_type_k, cache_type_v: f16, f32, bf16, q8_0 or q4_0.
        flash_attention: None is llama.cpp's default, on: it needs little memory for a long context;
            with an f16 cache the logits of a token in a batch and alone differ (about 3e-4).
        placement: which tensors of the layers stay in memory, and the memory for experts; only for
            load_mode "stream".
        load_mode: "stream" reads the layers of `placement` through a ring of slots in every pass;
            "mmap" leaves the file to the page cache; "ram" reads it into memory, in the layouts
            that are fastest for this processor (its logits differ from the others' by rounding),
            or in the file's if the backend is exact.
        exactness: result of `find_exact_run` for these cache types.
        has_head: whether a draft will use the model's MTP head, which then stays in memory.
        hidden_state_layers: layers whose outputs a draft head will take: `collect_hidden_states`.

    Raises:
        LlamaError: llama.cpp is missing or refuses the model.
        UnsupportedModel: the model cannot be streamed.
    """

    max_nodes: int

    def __init__(
        self,
        model: GgufModel,
        *,
        max_context: int | None = None,
        max_nodes: int = 64,
        max_outputs: int | None = None,
        n_threads: int | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        flash_attention: bool | None = None,
        placement: Placement | None = None,
        load_mode: str = "stream",
        n_readers: int | None = None,
        progress: Progress | None = None,
        exactness: Exactness = EXACT_OFF,
        num_kv_slots: int | None = None,
        max_num_seqs: int = 1,
        follows_load: bool = False,
        has_head: bool = False,
        hidden_state_layers: Sequence[int] = (),
    ) -> None:
        super().__init__()
        options = ContextOptions(
            min(max_context or model.max_context, model.max_context),
            max_nodes,
            max_outputs,
            n_threads,
            cache_type_k,
            cache_type_v,
            flash_attention,
            exactness,
            num_kv_slots,
            max_num_seqs,
            follows_load,
            model.is_recurrent,
        )
        check_options(model, options, placement, load_mode)
        self._closing: list[Callable[[], None]] = []
        self._has_head = has_head
        self._outputs: LayerOutputs | None = None
        has_outputs = any(layer != LAST_HIDDEN_STATE for layer in hidden_state_layers)
        self._kv_bytes_per_token = model.kv_bytes_per_token(
            cache_type_k, cache_type_v, flash_attention=flash_attention is not False
        )
        try:
            self._open(model, options, placement, load_mode, n_readers, progress, has_outputs)
        except BaseException:
            self.close()
            raise

    def _open(
        self,
        model: GgufModel,
        options: ContextOptions,
        placement: Placement | None,
        load_mode: str,
        n_readers: int | None,
        progress: Progress | None,
        has_outputs: bool,
    ) -> None:
        """Open the parts; each registers its `close` at once, to be called in reverse order."""
        is_streamed = load_mode == "stream" and placement is not None and placement.streams
        before = mapped_ranges(model) if is_streamed else ()
        self._model = load_llama_model(
            model,
            load_mode,
            options,
            progress,
            is_streamed=is_streamed,
            has_head=self._has_head,
        )
        self._stream: StreamedLayers | None = None
        self._closing.append(self._close_model)
        self.vocab_size = self._model.vocab_size
        if has_outputs:
            self._outputs = LayerOutputs(
                self._model.library, model.architecture, model.hidden_size, model.vocab_size
            )
        if is_streamed and placement is not None:
            self._stream = StreamedLayers(
                self._model,
                model,
                placement,
                before,
                has_head=self._has_head,
                outputs=self._outputs,
                inputs=self._new_state_inputs(model, options),
            )
        self._open_context(options)
        if self._stream and placement is not None:
            self._closing.append(self._stream.close)
            self._stream.start(self._context, placement.n_slots, n_readers, progress)
            drop_files(model.index.paths)  # llama.cpp may have read them: see unread.py
        self._open_passes()

    def _open_context(self, options: ContextOptions) -> None:
        watching = self._stream or self._outputs
        callback = None if watching is None else watching.callback
        self._options, self.max_num_tokens = options, options.max_num_tokens
        self.max_context, self.max_nodes = options.max_context, options.max_nodes
        self._context = LlamaContext(self._model, options, callback, self._outputs)
        self._closing.append(self._context.close)
        self._open_sequences(options)

    def _new_state_inputs(self, model: GgufModel, options: ContextOptions) -> StateInputs | None:
        """Return what keeps the inputs of recurrent states; None for models without them."""
        return None

    @abstractmethod
    def _open_sequences(self, options: ContextOptions) -> None:
        """Make what the sequences of the new context share."""

    @property
    @abstractmethod
    def _counts(self) -> CellCounts:
        """The context's cells."""

    def _open_passes(self) -> None:
        self._passes = CancellablePasses(self._context)
        self._closing.append(self._passes.cancel)

    @property
    def loaded(self) -> LlamaModel:
        """The model in llama.cpp, for another context over its weights."""
        return self._model

    def read_embeddings(self, token_ids: Sequence[int]) -> None:
        """Read the embeddings of these tokens, where they are not in memory, for a pass of another
        context; not during one of this context."""
        if self._stream is not None:
            self._stream.read_embeddings(token_ids)

    def collect_hidden_states(self, layers: Sequence[int]) -> None:
        """See Backend.collect_hidden_states. Outputs of layers need `hidden_state_layers`, and
        LAST_HIDDEN_STATE is that of models with MTP heads alone."""
        self._context.collect_hidden_states(layers)
        if self._stream is not None:
            self._stream.forget_graphs()

    # --- Backend and RecoveringBackend -----------------------------------------------------

    def _num_free_slots(self, kv: Store) -> int:
        return self._counts.n_free

    @property
    def limits_sequences(self) -> bool:
        return True

    @property
    def max_scored_tokens(self) -> int:  # type: ignore[override]
        """See Backend. llama.cpp's graph has the logits of a pass at once."""
        return self._options.n_outputs

    @property
    def transfer_stats(self) -> TransferStats:
        return self._stream.use if self._stream else TransferStats()

    def kv_growth_bytes(self, n_tokens: int, num_new_seqs: int = 0) -> int:
        """See Backend.kv_growth_bytes. Cells take memory once they are written: without flash
        attention in pages that each span the values of many cells."""
        n_nodes = max(self.max_nodes, self._options.min_batch_tokens)
        num_tokens = self._counts.n_growth(n_tokens + n_nodes)
        if not self._context.has_flash_attention:
            num_tokens = max(num_tokens, PAGE_BYTES // _VALUE_BYTES)
        return num_tokens * self._kv_bytes_per_token

    @property
    def unread_bytes(self) -> int:
        return self._stream.unread_bytes if self._stream else 0

    @property
    def pinned_bytes(self) -> int:
        return self._stream.pinned_bytes if self._stream else 0

    def set_pinned_bytes(self, n_bytes: int) -> None:
        if self._stream:
            self._stream.set_pinned_bytes(n_bytes)

    @property
    def kv_bytes(self) -> int:
        return self._kv_bytes_per_token * self.n_kv_allocated

    @property
    def n_kv_allocated(self) -> int:
        return 0 if self._is_closed else self._context.n_cells

    @property
    def kv_usage(self) -> KvUsage:
        return KvUsage(0, 0) if self._is_closed else self._counts.use

    def request_cancel(self) -> None:
        """End a running pass soon with PassCancelled; any thread may call this."""
        self._passes.cancel()

    def close(self) -> None:
        self._is_closed = True
        while self._closing:
            self._closing[-1]()
            self._closing.pop()

    def _close_model(self) -> None:
        """Free the model, unless a read hangs that would write to its memory later."""
        if self._stream is None or not self._stream.has_hung_reads:
            self._model.close()

    # --- parts -----------------------------------------------------------------------------

    def _run(self, batch: Batch) -> PassOutput:
        """Run one pass; return logits and hidden states in the order of the tokens."""
        self._passes.run(lambda: self._decode(batch))
        if batch.n_fillers:
            self._counts.empty_scratch()
        logits = self._context.logits(batch, self.vocab_size)
        return PassOutput(logits, self._context.hidden_states(batch))

    def _decode(self, batch: Batch) -> int:
        if self._stream is not None:
            return self._stream.decode(batch)
        if self._outputs is None:
            return self._context.decode(batch)
        with QUICK_HANDOVER:  # it calls back, as streaming does
            return self._context.decode(batch)

    @property
    def output_weight(self) -> int | None:
        """Address of the ggml_tensor of the output head, for products of a draft head; known after
        a pass of a model that was loaded with `hidden_state_layers`."""
        return None if self._is_closed or self._outputs is None else self._outputs.output_weight

    def _check_capacity(self, kv: Store, n_new: int) -> None:
        """Raise BackendError unless there are `n_new` cells for this sequence and others."""
        n_free = self._counts.n_free
        if n_new > n_free:
            if len(self._sequences) == 1:
                raise ContextFull(n_new, kv.table.n_committed, self.max_context)
            raise BackendError(
                f"the KV cache is full: {n_new} more tokens do not fit in the {n_free} of "
                f"{self._counts.n_cells} that {len(self._sequences)} sequences leave: "
                "end a sequence, or load the model with a larger context"
            )

    def _check_outputs(self, n_outputs: int) -> None:
        limit = self._options.n_outputs
        if n_outputs > limit:
            raise BackendError(
                f"{n_outputs} rows of logits are more than the {limit} that this "
                "backend was made for: ask for fewer rows or raise max_outputs"
            )

    def _restart(self) -> None:
        if self._stream is not None:
            self._stream.restart()
