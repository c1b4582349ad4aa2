"""A transformers `Cache` whose rows are a committed prefix followed by live tree nodes.

Each layer holds keys and values in buffers [1, heads, capacity, dim] that grow by whole blocks,
so that memory follows use and not the context limit. On a GPU, where a part of the memory was set
aside for it in any case, a cache has its full size at once: growing would leave the old buffers in
the allocator's hands. Sliding-window layers keep their full length as well: the mask applies the
window, so a rollback never needs what was thrown away.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

from backends.contract.backend import BackendError
from backends.contract.nodes import NodeTable

BLOCK_ROWS = 256


class TreeCacheLayer(CacheLayerMixin):
    """Keys and values of one decoder layer; `n_rows` of the capacity are in use."""

    is_sliding = False

    def __init__(self, least_rows: int = 0) -> None:
        super().__init__()
        self._least_rows = least_rows
        self.n_rows = 0
        self.n_expected = 0
        """Rows to make room for at the next growth, so that a long prompt grows it once."""

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take the head counts, widths and dtype from the first states; hold no rows yet."""
        self.keys = _empty_rows(key_states, 0)
        self.values = _empty_rows(value_states, 0)
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: object, **kwargs: object
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [1, heads, n, dim]; return all rows in use, [1, heads, n_rows, dim]."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        end = self.n_rows + key_states.shape[-2]
        assert self.keys is not None
        assert self.values is not None
        _check_shape(self.keys, key_states)
        _check_shape(self.values, value_states)
        self.ensure_capacity(end)
        self.keys[:, :, self.n_rows : end] = key_states
        self.values[:, :, self.n_rows : end] = value_states
        self.n_rows = end
        return self.keys[:, :, :end], self.values[:, :, :end]

    def restore(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Let these states [1, heads, n, dim] be all rows, whatever was known of their shape."""
        self.lazy_initialization(key_states, value_states)
        self.n_rows = 0
        self.update(key_states, value_states)

    def get_seq_length(self) -> int:
        return self.n_rows

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.n_rows + query_length, 0

    def get_max_length(self) -> int:
        return -1  # grows without bound; the backend enforces the context limit

    def select(self, prefix: int, order: torch.Tensor) -> None:
        """Keep `prefix` rows, then those at prefix + order [n], in that order."""
        if self.keys is None or self.values is None:
            return
        end = prefix + len(order)
        for rows in (self.keys, self.values):
            rows[:, :, prefix:end] = rows[:, :, prefix:].index_select(2, order)
        self.n_rows = end

    @property
    def n_bytes(self) -> int:
        return sum(t.nbytes for t in (self.keys, self.values) if t is not None)

    @property
    def capacity(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return min(self.keys.shape[-2], self.values.shape[-2])  # an error may leave one longer

    def ensure_capacity(self, n_rows: int) -> None:
        if n_rows <= self.capacity:
            return
        assert self.keys is not None
        assert self.values is not None
        capacity = whole_blocks(max(n_rows, self.n_expected, self._least_rows))
        self.keys = self._regrown(self.keys, capacity)
        self.values = self._regrown(self.values, capacity)

    def _regrown(self, rows: torch.Tensor, capacity: int) -> torch.Tensor:
        grown = _empty_rows(rows, capacity)
        grown[:, :, : self.n_rows] = rows[:, :, : self.n_rows]
        return grown


class TreeCache(Cache):
    """One `TreeCacheLayer` per decoder layer, kept in step with a `NodeTable`.

    A forward appends rows layer by layer, of nodes that the table knows already; when it fails,
    `abort` brings every layer back to the committed prefix.

    Args:
        least_rows: room that a layer has from its first row on; it grows where that is too little.
    """

    def __init__(self, n_layers: int, least_rows: int = 0) -> None:
        super().__init__(layers=[TreeCacheLayer(least_rows) for _ in range(n_layers)])
        self.table = NodeTable()

    def expect(self, n_rows: int) -> None:
        """The next forward will bring the cache to `n_rows` rows."""
        for layer in self.layers:
            layer.n_expected = n_rows

    def append(self, token_ids: Sequence[int]) -> None:
        """Count the rows that a forward of these tokens appended to the prefix as committed."""
        self.table.append(token_ids)
        self.check_integrity()

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        """Raises BackendError, and changes nothing, when `path` is no chain from the prefix."""
        prefix = self.table.n_committed
        self._select(prefix, self.table.commit(path, keep))

    def prune(self, nodes: Collection[int]) -> None:
        self._select(self.table.n_committed, self.table.prune(nodes))

    def rollback(self, length: int) -> None:
        self.table.rollback(length)
        self.truncate(self.table.n_rows)

    def abort(self, n_intact: int | None = None) -> None:
        """Drop every live node, and rows that a broken forward left in some layers only.

        Args:
            n_intact: rows that an interrupted operation did not touch; no more stay committed.
        """
        if n_intact is not None:
            self.table.cut(n_intact)
        self.table.drop_live()
        self.truncate(self.table.n_rows)

    def free(self) -> None:
        """Give the memory back; the cache is empty afterwards."""
        self.table.rollback(0)  # the ids of nodes are never used twice
        for layer in self.layers:
            layer.keys = layer.values = None
            layer.is_initialized, layer.n_rows = False, 0

    def check_integrity(self) -> None:
        """Every layer holds exactly the rows that the table knows."""
        for i, layer in enumerate(self.layers):
            if layer.n_rows != self.table.n_rows:
                raise RuntimeError(
                    f"KV cache layer {i} holds {layer.n_rows} rows, expected {self.table.n_rows}"
                )

    @property
    def n_bytes(self) -> int:
        return sum(layer.n_bytes for layer in self.layers)

    @property
    def capacity(self) -> int:
        return max((layer.capacity for layer in self.layers), default=0)

    def _select(self, prefix: int, order: list[int]) -> None:
        """Let every layer keep its prefix and these live rows, in this order."""
        if order == list(range(len(order))):  # rows already lie where they belong
            self.truncate(self.table.n_rows)
            return
        initialized = [layer for layer in self.layers if layer.is_initialized]
        if initialized:  # all on one device, to which the order goes once
            index = torch.tensor(order, dtype=torch.long, device=initialized[0].device)
            for layer in initialized:
                layer.select(prefix, index)

    def truncate(self, n_rows: int) -> None:
        """Drop the rows after the first n_rows."""
        for layer in self.layers:
            layer.n_rows = min(layer.n_rows, n_rows)


def whole_blocks(n_rows: int) -> int:
    """Rows that a cache of `n_rows` has memory for."""
    return -(-n_rows // BLOCK_ROWS) * BLOCK_ROWS


def _check_shape(rows: torch.Tensor, states: torch.Tensor) -> None:
    """Restored rows may be of another shape than the model's: their file was made by hand."""
    if (rows.shape[1], rows.shape[3]) != (states.shape[1], states.shape[3]):
        raise BackendError(
            f"the KV cache holds {rows.shape[1]} heads of {rows.shape[3]} numbers, the model has "
            f"{states.shape[1]} of {states.shape[3]}: remove the prompt cache file"
        )


def _empty_rows(like: torch.Tensor, n_rows: int) -> torch.Tensor:
    batch, heads, _, dim = like.shape
    return torch.empty((batch, heads, n_rows, dim), dtype=like.dtype, device=like.device)
