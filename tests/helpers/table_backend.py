"""A backend whose logits are a table of its whole prefix: a missing or extra token shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from alone import own
from exact_rules import Rows

from backends.contract.backend import Backend, KvUsage
from backends.contract.nodes import NodeTable
from backends.contract.sequence import SavedTensors, SequenceInput, SequenceKV, SequenceOutput
from offload.formats.mapped import TensorShape


class TableSequence(SequenceKV):
    """The sequence of a TableBackend."""

    def __init__(self, backend: TableBackend) -> None:
        self.backend = backend
        self.table = NodeTable()
        self.tokens: dict[int, int] = {}

    @property
    def committed_ids(self) -> Sequence[int]:
        return self.table.committed

    @property
    def next_node_id(self) -> int:
        return self.table.next_id

    @property
    def num_free_slots(self) -> int:
        limit = self.backend.max_nodes
        return self.backend.max_context if limit is None else limit - len(self.table)

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self.table.commit(path, keep)

    def prune(self, nodes: Collection[int]) -> None:
        self.table.prune(nodes)

    def rollback(self, length: int) -> None:
        self.table.rollback(length)

    def fork(self, length: int | None = None) -> TableSequence:
        other = self.backend.new_sequence()
        other.table.append(self.committed_ids[:length])
        return other

    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        return ()

    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        pass

    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        self.rollback(0)
        self.table.append(token_ids)

    def close(self) -> None:
        self.rollback(0)


class TableBackend(Backend):
    """A backend with logits log rows(prefix): the committed tokens and the node's path."""

    def __init__(self, rows: Rows, vocab: int, max_context: int = 256) -> None:
        self.vocab_size = vocab
        self.max_context = max_context
        self._rows = rows

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        return np.log(self._rows(tuple(prefix))).astype(np.float32)

    def new_sequence(self) -> TableSequence:
        return TableSequence(self)

    @property
    def table(self) -> NodeTable:
        """Return the node table of its only sequence (see `own`)."""
        table: NodeTable = own(self).table
        return table

    def forward(self, batch: Sequence[SequenceInput]) -> list[SequenceOutput]:
        return [self._scores(item) for item in batch]

    def _scores(self, added: SequenceInput) -> SequenceOutput:
        kv = added.kv
        assert isinstance(kv, TableSequence)
        if added.parents is None:
            kv.table.drop_live()
            kv.table.append(added.token_ids)
            ends = range(len(kv.committed_ids) - len(added.token_ids), len(kv.committed_ids))
            prefixes = [kv.committed_ids[: ends[row] + 1] for row in added.logit_positions]
            return SequenceOutput([], self._stack(prefixes))
        ids = kv.table.add(added.parents, added.token_ids)
        kv.tokens.update(zip(ids, added.token_ids, strict=True))
        paths = [[kv.tokens[n] for n in kv.table.path(ids[row])] for row in added.logit_positions]
        return SequenceOutput(ids, self._stack([[*kv.committed_ids, *path] for path in paths]))

    def _stack(self, prefixes: Sequence[Sequence[int]]) -> np.ndarray:
        rows = [self.logits(prefix) for prefix in prefixes]
        return np.stack(rows) if rows else np.zeros((0, self.vocab_size), np.float32)

    @property
    def kv_bytes(self) -> int:
        return 0

    @property
    def n_kv_allocated(self) -> int:
        return 0

    @property
    def kv_usage(self) -> KvUsage:
        return KvUsage(0, 0)

    def close(self) -> None:
        pass
