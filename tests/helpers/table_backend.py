"""A backend whose logits are a table of its whole prefix: a token too few or too many shows."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from exact_rules import Rows

from backends.contract.backend import Backend, SavedTensors
from backends.contract.nodes import NodeTable
from offload.formats.mapped import TensorShape


class TableBackend(Backend):
    """Logits log rows(prefix), where the prefix is what was committed and the node's path."""

    def __init__(self, rows: Rows, vocab: int, max_context: int = 256) -> None:
        self.vocab_size = vocab
        self.max_context = max_context
        self._rows = rows
        self.table = NodeTable()
        self._tokens: dict[int, int] = {}

    @property
    def committed_ids(self) -> Sequence[int]:
        return self.table.committed

    @property
    def next_node_id(self) -> int:
        return self.table.next_id

    def logits(self, prefix: Sequence[int]) -> np.ndarray:
        return np.log(self._rows(tuple(prefix))).astype(np.float32)

    def prefill(self, token_ids: Sequence[int]) -> np.ndarray:
        if not token_ids:
            raise ValueError("prefill needs at least one token")
        self.table.drop_live()
        self.table.append(token_ids)
        return self.logits(self.committed_ids)

    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], np.ndarray]:
        assert rows is None
        ids = self.table.add(parents, token_ids)
        self._tokens.update(zip(ids, token_ids, strict=True))
        paths = ([self._tokens[n] for n in self.table.path(node)] for node in ids)
        return ids, np.stack([self.logits([*self.committed_ids, *path]) for path in paths])

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self.table.commit(path, keep)

    def prune(self, nodes: Collection[int]) -> None:
        self.table.prune(nodes)

    def rollback(self, length: int) -> None:
        self.table.rollback(length)

    def prefix_tensors(self) -> tuple[TensorShape, ...]:
        return ()

    def save_prefix(self, buffers: Mapping[str, memoryview]) -> None:
        pass

    def load_prefix(self, token_ids: Sequence[int], tensors: SavedTensors) -> None:
        self.rollback(0)
        self.table.append(token_ids)

    @property
    def kv_bytes(self) -> int:
        return 0

    @property
    def n_kv_allocated(self) -> int:
        return 0

    def close(self) -> None:
        pass
