"""LlamaBackend: a GGUF model on llama.cpp whose layers have attention alone.

Sequences and their trees are sequences of llama.cpp in one unified KV cache (cache.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from backends.contract.sequence import SavedTensors, SequenceInput
from backends.contract.store import NewTokens, PassOutput
from backends.llama.base import CellCounts, GgufBackend
from backends.llama.cache import MIN_IN_USE, CellStore
from backends.llama.cells import Cells
from backends.llama.context import ContextOptions
from backends.llama.prefix import LlamaPrefix, SequenceState
from backends.llama.rows import PassRows
from offload.formats.mapped import TensorShape


class LlamaBackend(GgufBackend[CellStore]):
    """See GgufBackend."""

    def _open_sequences(self, options: ContextOptions) -> None:
        is_ordered = options.exactness.is_exact
        state = SequenceState(self._model, self._context)
        self._cells = Cells(
            self._model,
            self._context,
            options.n_sequences - 1,
            self._context.n_cells - options.n_fillers,
            state if is_ordered else None,
        )
        self._prefix = LlamaPrefix(state, is_ordered)

    @property
    def _counts(self) -> CellCounts:
        return self._cells

    def _new_kv(self) -> CellStore:
        return CellStore(self._cells)

    def _fork(self, kv: CellStore, length: int) -> CellStore:
        return kv.fork(length)

    def _capacity_of(self, kv: CellStore, rows: SequenceInput) -> Sequence[int]:
        n_leaves = 0 if rows.parents is None else kv.n_leaves_with(rows.parents)
        return len(rows.token_ids), max(MIN_IN_USE, n_leaves) - kv.n_needed

    def _free_units(self) -> Sequence[int]:
        return self._cells.n_free, self._cells.n_free_sequences

    @property
    def can_save_prefix(self) -> bool:
        return self._model.sliding_window == 0

    def _prefix_tensors(self, kv: CellStore) -> tuple[TensorShape, ...]:
        return self._prefix.tensors(kv.in_use[0])

    def _save_prefix(self, kv: CellStore, buffers: Mapping[str, memoryview]) -> None:
        self._prefix.save(buffers, kv.in_use[0])

    def _load_prefix(self, kv: CellStore, token_ids: list[int], tensors: SavedTensors) -> None:
        self._ensure_capacity(kv, len(token_ids))
        self._prefix.load(token_ids, tensors, kv.in_use[0])
        kv.adopt(token_ids)

    def _compute(self, new: Sequence[NewTokens[CellStore]]) -> list[PassOutput]:
        """Run as many passes as `max_num_tokens` requires; each reads a streamed model once."""
        rows = PassRows(new)
        self._check_outputs(rows.n_outputs)
        self._ensure_capacity(new[0].store, len(rows))
        outputs = []
        for part, batch in rows.batches(
            self.max_num_tokens, self._options.min_batch_tokens, self._cells.scratch
        ):
            outputs.append(self._run(batch))
            self._cells.grow(rows.sequences[part], rows.positions[part])
        return rows.of_sequences(outputs)

    def _ensure_capacity(self, kv: CellStore, n_new: int) -> None:
        """Prepare the cache for `n_new` cells of this sequence and others. Raises BackendError."""
        self._check_capacity(kv, n_new)
        self._cells.arrange(n_new)
