"""The llama.cpp backend: a GGUF model, held in memory or streamed from storage.

Trees are sequences of one unified KV cache (`llama_tree`); a streamed model's passes walk its
layers (`llama_stream`). A pass that takes long runs on a thread of its own, so that Ctrl-C reaches
Python meanwhile and ends it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from backends.base import Backend, BackendError, ContextFull, StreamUse, UnsupportedModel
from backends.gguf_model import GgufModel
from backends.llama_batch import Batch
from backends.llama_lib import (
    MAX_SEQUENCES,
    ContextOptions,
    LlamaContext,
    LlamaModel,
    Progress,
    default_threads,
)
from backends.llama_passes import PassThread
from backends.llama_stream import StreamedLayers, mapped_ranges
from backends.llama_tree import TreeSequences
from offload.plan import ResidencyPlan

PREFILL_ROWS = 512
"""Tokens of a prompt that go through the layers together. A streamed model is read once for so
many; llama.cpp's compute buffers grow with it."""
MAX_LEAVES = MAX_SEQUENCES - 1  # one sequence is for looking at a graph
_LOAD_MODES = ("stream", "mmap", "ram")
_QUICK_BYTES = 4e9  # weights times rows that take less than about a second: no thread for those


class LlamaBackend(Backend):
    """A GGUF model on llama.cpp.

    Args:
        max_context: most tokens of a sequence; None takes what the model was trained for.
        max_nodes: most live nodes at a time; a tree may have min(max_nodes, MAX_LEAVES) leaves.
        cache_type_k, cache_type_v: f16, f32, bf16, q8_0 or q4_0.
        flash_attention: None takes llama.cpp's default, which is on: it needs little memory for a
            long context, and rounds differently for one row and for several (about 3e-4).
        residency: which tensors of the layers stay in memory; only for load_mode "stream".
        load_mode: "stream" reads the layers of `residency` through a ring of slots in every pass;
            "mmap" leaves the file to the page cache; "ram" reads it into memory, in the layouts
            that are fastest for this processor (its logits differ from the others' by rounding).

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
        n_threads: int | None = None,
        cache_type_k: str = "f16",
        cache_type_v: str = "f16",
        flash_attention: bool | None = None,
        residency: ResidencyPlan | None = None,
        load_mode: str = "stream",
        n_readers: int | None = None,
        progress: Progress | None = None,
    ) -> None:
        _check(model, max_nodes, residency, load_mode)
        self.max_context = min(max_context or model.max_context, model.max_context)
        self.max_nodes = max_nodes
        options = context_options(
            self.max_context, max_nodes, n_threads, cache_type_k, cache_type_v, flash_attention
        )
        self._closing: list[Callable[[], None]] = []
        try:
            self._open(model, options, residency, load_mode, n_readers, progress)
        except BaseException:
            self.close()
            raise
        self._kv_bytes_per_token = model.kv_bytes_per_token(
            cache_type_k, cache_type_v, flash_attention=flash_attention is not False
        )

    def _open(
        self,
        model: GgufModel,
        options: ContextOptions,
        residency: ResidencyPlan | None,
        load_mode: str,
        n_readers: int | None,
        progress: Progress | None,
    ) -> None:
        """What needs closing is registered as soon as it exists; the last one is closed first."""
        is_streamed = load_mode == "stream" and residency is not None and residency.n_slots > 0
        own_mode = load_mode if load_mode != "stream" else "mmap" if is_streamed else "ram"
        before = mapped_ranges(model) if is_streamed else ()
        self._model = LlamaModel(model.path, own_mode, None if is_streamed else progress)
        self._closing.append(self._model.close)
        self.vocab_size = self._model.vocab_size
        if self._model.is_recurrent:
            raise UnsupportedModel(_RECURRENT.format(model.path, model.architecture))
        self._stream = None
        if is_streamed and residency is not None:
            self._stream = StreamedLayers(self._model, model, residency.layers, before)
        callback = self._stream.callback if self._stream else None
        self._context = LlamaContext(self._model, options, callback)
        self._closing.append(self._context.close)
        self.max_rows = options.max_rows
        self._tree = TreeSequences(self._model, self._context, options.n_sequences - 1)
        if self._stream and residency is not None:
            self._closing.append(self._stream.close)
            self._stream.start(self._context, residency.n_slots, n_readers, progress)
        self._thread = PassThread(self._context)
        self._closing.append(self._thread.close)

    # --- the contract ----------------------------------------------------------------------

    @property
    def n_committed(self) -> int:
        return self._tree.table.n_committed

    @property
    def next_node_id(self) -> int:
        return self._tree.table.next_id

    @property
    def stream_use(self) -> StreamUse:
        return self._stream.use if self._stream else StreamUse()

    @property
    def kv_bytes(self) -> int:
        return self._kv_bytes_per_token * self.n_kv_allocated

    @property
    def n_kv_allocated(self) -> int:
        return self._context.n_cells if self._closing else 0

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        """See Backend.prefill; the model is read once for every PREFILL_ROWS tokens."""
        if not token_ids:
            raise ValueError("prefill needs at least one token")
        self._check_open()
        table, n_tokens = self._tree.table, len(token_ids)
        with self._repaired_on_error():
            self._tree.abort()
            if self.n_committed + n_tokens > self.max_context:
                raise ContextFull(n_tokens, self.n_committed, self.max_context)
            sequences = self._tree.in_use
            logits = np.zeros((0, self.vocab_size), dtype=np.float32)
            for start in range(0, n_tokens, self.max_rows):
                chunk = token_ids[start : start + self.max_rows]
                first, is_last = table.n_committed + start, start + len(chunk) == n_tokens
                positions = np.arange(first, first + len(chunk))
                rows = [len(chunk) - 1] if is_last else []
                logits = self._run(Batch(chunk, positions, [sequences] * len(chunk), rows))
            table.n_committed += n_tokens
            self._tree.check_integrity()
        return logits[0]

    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        self._check_open()
        table, n_tokens = self._tree.table, len(token_ids)
        if n_tokens != len(parents):
            raise ValueError(f"{n_tokens} tokens have {len(parents)} parents")
        wanted = list(range(n_tokens) if rows is None else rows)
        if n_tokens == 0:
            return [], np.zeros((0, self.vocab_size), dtype=np.float32)
        with self._repaired_on_error():
            n_live = len(table)
            if n_live + n_tokens > self.max_nodes:
                raise BackendError(
                    f"{n_live + n_tokens} live nodes are more than the {self.max_nodes} that this "
                    "backend was made for: draft fewer tokens or raise max_nodes"
                )
            node_ids, sequences = self._tree.extend(parents)
            if self.n_committed + table.max_depth > self.max_context:
                raise ContextFull(n_tokens, self.n_committed, self.max_context)
            batch = Batch(token_ids, table.positions(n_live), sequences, wanted)
            logits = self._run(batch)
            self._tree.check_integrity()
        order = {row: i for i, row in enumerate(sorted(set(wanted)))}
        if wanted != list(order):
            logits = logits[[order[row] for row in wanted]]
        return node_ids, logits

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self._check_open()
        with self._repaired_on_error():
            self._tree.commit(path, keep)

    def prune(self, nodes: Collection[int]) -> None:
        self._check_open()
        with self._repaired_on_error():
            self._tree.prune(nodes)

    def rollback(self, length: int) -> None:
        self._check_open()
        with self._repaired_on_error():
            self._tree.rollback(length)

    def request_cancel(self) -> None:
        """End a running pass soon with PassCancelled; any thread may call this."""
        self._thread.cancel()

    def close(self) -> None:
        while self._closing:
            self._closing.pop()()

    # --- parts -----------------------------------------------------------------------------

    def _run(self, batch: Batch) -> np.ndarray:
        """One pass; float32 logits [outputs, vocab] in the order of the rows."""
        decode = self._decode_streamed if self._stream else self._context.decode
        is_quick = self._stream is None and self._model.n_bytes * batch.n_tokens < _QUICK_BYTES
        self._thread.run(lambda: decode(batch), is_quick=is_quick)
        return self._context.logits(batch.n_outputs, self.vocab_size)

    def _decode_streamed(self, batch: Batch) -> int:
        assert self._stream is not None
        return self._stream.decode(batch)

    def _check_open(self) -> None:
        if not self._closing:
            raise BackendError("the backend is closed; load the model again")

    @contextmanager
    def _repaired_on_error(self) -> Iterator[None]:
        """Leave the committed prefix, and a ring that starts at layer 0, after any failure."""
        n_committed = self.n_committed
        try:
            yield
        except BaseException:
            self._tree.table.n_committed = min(n_committed, self.n_committed)
            self._tree.abort()
            if self._stream is not None:
                self._stream.restart()
            raise


_RECURRENT = (
    "{} ({}) keeps a recurrent state, which cannot be rolled back to an earlier token: "
    "use a model with attention in every layer"
)


def _check(
    model: GgufModel, max_nodes: int, residency: ResidencyPlan | None, load_mode: str
) -> None:
    if load_mode not in _LOAD_MODES:
        raise ValueError(f"load_mode {load_mode!r} is not one of {', '.join(_LOAD_MODES)}")
    if residency is not None and residency.n_slots and load_mode != "stream":
        raise ValueError(f"load_mode {load_mode!r} holds the whole model: it takes no residency")
    if max_nodes < 1:
        raise ValueError(f"max_nodes must be 1 or more, not {max_nodes}")
    if model.is_recurrent:
        raise UnsupportedModel(_RECURRENT.format(model.path, model.architecture))


def context_options(
    max_context: int,
    max_nodes: int,
    n_threads: int | None = None,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    flash_attention: bool | None = None,
) -> ContextOptions:
    """The llama.cpp context of a backend: a cell per token of the context and per live node."""
    n_rows = max(max_nodes, min(max_context, PREFILL_ROWS))
    return ContextOptions(
        n_cells=max_context + max_nodes,
        max_rows=n_rows,
        max_outputs=max_nodes,
        n_sequences=min(max(max_nodes, 2), MAX_LEAVES) + 1,
        n_threads=n_threads or default_threads(),
        cache_type_k=cache_type_k,
        cache_type_v=cache_type_v,
        flash_attention=flash_attention,
    )
