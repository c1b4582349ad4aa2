"""Exact (batch-invariant) attention on the CPU: a row's sums do not depend on the rest of a pass.

A row sums over the keys on its own path, from position 0 to its own. They are taken in blocks of
BLOCK_KEYS positions, aligned to position 0:

    positions   [ 0 .. 63 | 64 .. 127 | 128 .. 191 | 192 .. 201 ]
    output    = ( o(0)   +  o(1)     +  o(2)      +  o(3) ) / l

    m    = the largest score of the row            (a maximum has no order)
    p(k) = exp(score(k) - m)                       0 for a key that the row does not see, and below
                                                   e^MIN_EXPONENT
    o(b) = sum of p(k) v(k) over the keys of block b, by one product of matrices
    l    = the same sums with v(k) = 1: one more column of the values

The blocks are added in the order of positions. Within a block the product adds its terms one after
the other, so the zeros of keys on other branches of a tree change nothing, wherever they are
(backends/hf/self_test.py tests that on this machine).

All of it is float32: products of bf16 numbers are exact before they are added.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from backends.attention.row_groups import SPAN_BYTES, RowGroup
from backends.attention.scores import (
    MAX_BLOCKED_SCORE_BYTES,
    Scores,
    Scratch,
    parts_of,
    value_width,
)
from backends.attention.stored_rows import StoredRows

REVISION = 2
"""Version of the computation, bit for bit: a saved prefix of another version is not reused."""


@dataclass(frozen=True)
class ProductLimits:
    """Limits within which a product of float32 matrices adds its terms one after the other.

    The defaults are those of MKL on AVX2; backends/hf/self_test.py finds a machine's own.
    """

    min_batch_tokens: int = 4
    """Rows are padded to a multiple: for fewer, also as the remainder of one thread, libraries have
    kernels that sum in another order."""
    max_keys: int = 192
    """Maximum number of keys of one block, including other branches: libraries split longer sums
    into parts (MKL: from somewhere between 193 and 256 on)."""


USUAL_LIMITS = ProductLimits()


@dataclass(frozen=True)
class BlockedMask:
    """Mask object passed through a decoder layer in place of a tensor; its groups are all rows."""

    groups: tuple[RowGroup, ...]
    n_keys: int
    """Number of keys that it is for; of a cache, whose rows sequences share, at least as many."""
    is_of_cache: bool = False
    """Whether keys and values are all rows of the cache, or the keys of the pass in order."""
    limits: ProductLimits = USUAL_LIMITS
    scratch: Scratch = field(default_factory=Scratch)
    _cached_parts: dict[tuple[int, int, int, int], list[tuple[RowGroup, slice]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    @property
    def nbytes(self) -> int:
        return sum(group.nbytes for group in self.groups)

    def __getitem__(self, index: object) -> BlockedMask:
        """Return the mask itself: families slice it for an indexer, which does not look at it."""
        return self

    def fits(self, key: torch.Tensor | StoredRows) -> bool:
        """Return whether the mask is for keys of this shape."""
        has_all = key.shape[2] >= self.n_keys if self.is_of_cache else key.shape[2] == self.n_keys
        return key.shape[0] == 1 and has_all

    def attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor | StoredRows,
        value: torch.Tensor | StoredRows,
        scale: float,
        *,
        softcap: float | None = None,
        sinks: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return the output [1, rows, heads, value dim] of queries [1, heads, rows, dim] for keys
        and values [1, kv heads, keys, dim].

        softcap: scores become softcap * tanh(scores / softcap) (Gemma 2).
        sinks [heads]: score of an additional key without a value (gpt-oss).
        bias [heads, keys]: added to the scores of every row (ALiBi).
        """
        _, n_heads, num_tokens, dim = query.shape
        n_kv_heads, value_dim = key.shape[1], value.shape[-1]
        queries = query[0].unflatten(0, (n_kv_heads, -1))
        output = query.new_empty(num_tokens, n_kv_heads, n_heads // n_kv_heads, value_dim)
        keys, values = StoredRows.of(key), StoredRows.of(value)
        for group, heads in self._parts(n_heads // n_kv_heads, n_kv_heads, dim, value_dim):
            part = Scores(
                group,
                keys.heads(heads),
                values.heads(heads),
                self.scratch,
                self.limits.min_batch_tokens,
                scale,
                softcap,
            )
            if sinks is not None:
                part.sinks = sinks.float().view(n_kv_heads, -1, 1)[heads]
            if bias is not None:
                columns = bias.float().index_select(1, group.keys)
                part.bias = columns.view(n_kv_heads, -1, 1, group.n_columns)[heads]
            rows = slice(group.start, group.end)
            part.attend(queries[heads, :, rows], output[rows, heads])
        return output.view(1, num_tokens, n_heads, value_dim)

    def _parts(
        self, n_group: int, n_kv_heads: int, dim: int, value_dim: int
    ) -> list[tuple[RowGroup, slice]]:
        """Return groups and spans of KV heads that are computed together: their scores fit in
        memory, and so does a block of their keys and values. The layers of a model share them."""
        key = n_group, n_kv_heads, dim, value_dim
        if key not in self._cached_parts:
            self._cached_parts[key] = [
                (group, heads)
                for group in self.groups
                for heads in parts_of(n_kv_heads, self._n_heads_at_once(group, *key))
            ]
        return self._cached_parts[key]

    def _n_heads_at_once(
        self, group: RowGroup, n_group: int, n_kv_heads: int, dim: int, value_dim: int
    ) -> int:
        minimum = self.limits.min_batch_tokens
        num_rows = -(-n_group * (group.end - group.start) // minimum) * minimum
        score_bytes = 4 * num_rows * group.n_columns
        block_bytes = 4 * max(group.widths) * (dim + value_width(value_dim))
        return min(MAX_BLOCKED_SCORE_BYTES // score_bytes, SPAN_BYTES // block_bytes, n_kv_heads)
