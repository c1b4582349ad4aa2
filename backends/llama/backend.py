"""The llama.cpp backend: a GGUF model, held in memory or streamed from storage.

Trees are sequences of one unified KV cache (cache.py); a streamed model's passes walk its
layers (stream.py). A pass that takes long runs on a thread of its own, so that Ctrl-C reaches
Python meanwhile and ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from backends.contract.backend import BackendError, ContextFull, StreamUse
from backends.contract.exactness import NOT_ASKED, Exactness
from backends.contract.mending import MendingBackend
from backends.contract.sequence import SavedTensors
from backends.contract.text_kv import NewRows
from backends.ggml.library import LlamaModel
from backends.llama.batch import Batch
from backends.llama.cache import TreeSequences
from backends.llama.context import ContextOptions, LlamaContext
from backends.llama.model import GgufModel, recurrent_model
from backends.llama.passes import PassThread
from backends.llama.prefix import LlamaPrefix, SequenceState
from backends.llama.stream import StreamedLayers, mapped_ranges
from backends.llama.unread import map_unread
from offload.formats.mapped import TensorShape
from offload.paging.address_space import PAGE_BYTES
from offload.process.interruptible import uninterrupted
from offload.residency.placement import Placement
from offload.units import Progress

LOAD_MODES = ("stream", "mmap", "ram")
_VALUE_BYTES = 2  # of the KV cache's values without flash attention: f16, never quantized
_QUICK_BYTES = 4e9  # weights times rows that take less than about a second: no thread for those


class LlamaBackend(MendingBackend[TreeSequences]):
    """A GGUF model on llama.cpp.

    Args:
        max_context: most tokens of a sequence; None takes what the model was trained for.
        max_nodes: most live nodes at a time; a tree may have min(max_nodes, MAX_LEAVES) leaves.
        max_outputs: most rows of logits of one call; max_nodes when None.
        cache_type_k, cache_type_v: f16, f32, bf16, q8_0 or q4_0.
        flash_attention: None takes llama.cpp's default, which is on: it needs little memory for a
            long context; with a cache of f16 a row of several and one alone differ (about 3e-4).
        residency: which tensors of the layers stay in memory; only for load_mode "stream".
        load_mode: "stream" reads the layers of `residency` through a ring of slots in every pass;
            "mmap" leaves the file to the page cache; "ram" reads it into memory, in the layouts
            that are fastest for this processor (its logits differ from the others' by rounding),
            or in the file's where the backend is exact.
        exactness: what `find_exact_run` found out, for the types of the cache that it chose.

    Raises:
        LlamaError: llama.cpp is missing or refuses the model.
        UnsupportedModel: the model cannot be rolled back (recurrent), or not be streamed.
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
        residency: Placement | None = None,
        load_mode: str = "stream",
        n_readers: int | None = None,
        progress: Progress | None = None,
        exactness: Exactness = NOT_ASKED,
    ) -> None:
        super().__init__()
        _check_options(model, max_nodes, residency, load_mode)
        options = ContextOptions(
            min(max_context or model.max_context, model.max_context),
            max_nodes,
            max_outputs,
            n_threads,
            cache_type_k,
            cache_type_v,
            flash_attention,
            exactness,
        )
        self._closing: list[Callable[[], None]] = []
        self._kv_bytes_per_token = model.kv_bytes_per_token(
            cache_type_k, cache_type_v, flash_attention=flash_attention is not False
        )
        try:
            self._open(model, options, residency, load_mode, n_readers, progress)
        except BaseException:
            self.close()
            raise

    @uninterrupted
    def _open(
        self,
        model: GgufModel,
        options: ContextOptions,
        residency: Placement | None,
        load_mode: str,
        n_readers: int | None,
        progress: Progress | None,
    ) -> None:
        """What needs closing is registered as soon as it exists; the last one is closed first."""
        is_streamed = load_mode == "stream" and residency is not None and residency.n_slots > 0
        before = mapped_ranges(model) if is_streamed else ()
        self._model = (
            map_unread(model)
            if is_streamed
            else LlamaModel(
                model.path,
                "ram" if load_mode == "stream" else load_mode,
                progress,
                is_repacked=not options.exactness.is_exact,
            )
        )
        self._closing.append(self._model.close)
        self.vocab_size = self._model.vocab_size
        if self._model.is_recurrent:
            raise recurrent_model(model)
        self._stream = None
        if is_streamed and residency is not None:
            self._stream = StreamedLayers(self._model, model, residency.layers, before)
        self._open_context(options)
        if self._stream and residency is not None:
            self._closing.append(self._stream.close)
            self._stream.start(self._context, residency.n_slots, n_readers, progress)
        self._open_thread()

    def _open_context(self, options: ContextOptions) -> None:
        callback = self._stream.callback if self._stream else None
        self._options, self.max_rows = options, options.max_rows
        self.max_context, self.max_nodes = options.max_context, options.max_nodes
        self._context = LlamaContext(self._model, options, callback)
        self._closing.append(self._context.close)
        is_ordered = options.exactness.is_exact
        state = SequenceState(self._model, self._context)
        self._tree = TreeSequences(
            self._model, self._context, options.n_sequences - 1, state if is_ordered else None
        )
        self._prefix = LlamaPrefix(state, is_ordered)

    def _open_thread(self) -> None:
        self._thread = PassThread(self._context)
        self._closing.append(self._thread.close)

    def sibling(self, *, max_context: int, max_nodes: int, max_rows: int) -> LlamaBackend:
        """See Backend.sibling."""
        if self._stream is not None:
            raise BackendError("a streamed model cannot share its weights")
        other = self._without_texts()
        other._closing = []
        try:
            other._open_context(
                replace(
                    self._options,
                    max_context=min(max_context, self.max_context),
                    max_nodes=max_nodes,
                    max_outputs=max_rows,
                )
            )
            other._open_thread()
        except BaseException:
            other.close()
            raise
        return other

    # --- the contract ----------------------------------------------------------------------

    def _new_kv(self) -> TreeSequences:
        if self._sequences:
            raise BackendError("the llama.cpp backend holds one text")
        return self._tree

    def _fork(self, kv: TreeSequences, length: int) -> TreeSequences:
        return self._new_kv()

    def _free_rows(self, kv: TreeSequences) -> int:
        return self._context.n_cells - self._options.n_fillers - kv.table.n_rows

    @property
    def stream_use(self) -> StreamUse:
        return self._stream.use if self._stream else StreamUse()

    def kv_growth_bytes(self, n_tokens: int) -> int:
        """A streamed model's cells take memory once they are written; page by page, without flash
        attention, each of which has the values of so many cells."""
        if self._stream is None:
            return 0
        n_rows = max(0, n_tokens - self._tree.table.n_committed)
        n_rows += max(self.max_nodes, self._options.n_least_rows)
        if not self._context.has_flash_attention:
            n_rows = max(n_rows, PAGE_BYTES // _VALUE_BYTES)
        return n_rows * self._kv_bytes_per_token

    @property
    def unread_bytes(self) -> int:
        return self._stream.unread_bytes if self._stream else 0

    @property
    def held_bytes(self) -> int:
        return self._stream.held_bytes if self._stream else 0

    def hold(self, n_bytes: int) -> None:
        if self._stream:
            self._stream.hold(n_bytes)

    @property
    def kv_bytes(self) -> int:
        return self._kv_bytes_per_token * self.n_kv_allocated

    @property
    def n_kv_allocated(self) -> int:
        return 0 if self._is_closed else self._context.n_cells

    @property
    def can_save_prefix(self) -> bool:
        return self._model.sliding_window == 0

    def _prefix_tensors(self, kv: TreeSequences) -> tuple[TensorShape, ...]:
        return self._prefix.tensors()

    def _save_prefix(self, kv: TreeSequences, buffers: Mapping[str, memoryview]) -> None:
        self._prefix.save(buffers)

    def _load_prefix(self, kv: TreeSequences, token_ids: list[int], tensors: SavedTensors) -> None:
        self._prefix.load(token_ids, tensors)
        kv.adopt(token_ids)

    def request_cancel(self) -> None:
        """End a running pass soon with PassCancelled; any thread may call this."""
        self._thread.cancel()

    def close(self) -> None:
        self._is_closed = True
        while self._closing:
            self._closing[-1]()
            self._closing.pop()

    # --- parts -----------------------------------------------------------------------------

    def _run(
        self,
        token_ids: Sequence[int],
        positions: np.ndarray,
        sequences: Sequence[Sequence[int]],
        rows: Sequence[int],
    ) -> np.ndarray:
        """One pass; float32 logits [wanted, vocab] in the order of the rows."""
        n_least, spare = self._options.n_least_rows, self._tree.spare
        batch = Batch(token_ids, positions, sequences, rows, n_least, spare)
        decode = self._decode_streamed if self._stream else self._context.decode
        is_quick = self._stream is None and self._model.n_bytes * batch.n_tokens < _QUICK_BYTES
        self._thread.run(lambda: decode(batch), is_quick=is_quick)
        if batch.n_fillers:
            self._tree.empty_spare()
        return self._context.logits(batch, self.vocab_size)

    def _decode_streamed(self, batch: Batch) -> int:
        assert self._stream is not None
        return self._stream.decode(batch)

    def _compute(self, new: Sequence[NewRows[TreeSequences]]) -> list[np.ndarray]:
        (one,) = new
        if one.are_nodes:
            return [self._run_nodes(one.token_ids, one.rows)]
        return [self._run_prompt(one.token_ids, one.rows)]

    def _run_prompt(self, token_ids: Sequence[int], rows: list[int]) -> np.ndarray:
        """A streamed model is read once for every PREFILL_ROWS tokens."""
        n_tokens, sequences = len(token_ids), self._tree.in_use
        found = []
        for start in range(0, n_tokens, self.max_rows):
            chunk = token_ids[start : start + self.max_rows]
            positions = self._tree.table.n_committed + start + np.arange(len(chunk))
            wanted = [row - start for row in rows if 0 <= row - start < len(chunk)]
            found.append(self._run(chunk, positions, [sequences] * len(chunk), wanted))
        return np.concatenate(found)

    def _run_nodes(self, token_ids: Sequence[int], rows: list[int]) -> np.ndarray:
        table = self._tree.table
        n_live = len(table) - len(token_ids)
        self._check_room(len(table), len(token_ids), len(rows))
        logits = self._run(token_ids, table.positions(n_live), self._tree.new, rows)
        # llama.cpp gives each row once, in the batch's order.
        order = {row: i for i, row in enumerate(sorted(set(rows)))}
        return logits if rows == list(order) else logits[[order[row] for row in rows]]

    def _check_room(self, n_nodes: int, n_new: int, n_outputs: int) -> None:
        n_committed = self._tree.table.n_committed
        if n_nodes > self._context.n_cells - self._options.n_fillers - n_committed:
            raise ContextFull(n_new, n_committed, self.max_context)
        most = self._options.n_outputs
        if n_outputs > most:
            raise BackendError(
                f"{n_outputs} rows of logits are more than the {most} that this "
                "backend was made for: ask for fewer rows or raise max_outputs"
            )

    def _room_of(self, kv: TreeSequences, n_tokens: int) -> int:
        return n_tokens

    def _n_free_units(self) -> int:
        return self._free_rows(self._tree)

    def _restart(self) -> None:
        if self._stream is not None:
            self._stream.restart()


def _check_options(
    model: GgufModel, max_nodes: int, residency: Placement | None, load_mode: str
) -> None:
    """Raise for a backend that cannot be."""
    if load_mode not in LOAD_MODES:
        raise ValueError(f"load_mode {load_mode!r} is not one of {', '.join(LOAD_MODES)}")
    if residency is not None and residency.n_slots and load_mode != "stream":
        raise ValueError(f"load_mode {load_mode!r} holds the whole model: it takes no residency")
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be 1 or more, not {max_nodes}")
    if model.is_recurrent:
        raise recurrent_model(model)
