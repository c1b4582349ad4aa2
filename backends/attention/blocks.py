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

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from backends.attention.batch import BLOCK_SIZE
from backends.attention.stored_rows import StoredRows
from offload.units import MIB

REVISION = 2
"""Version of the computation, bit for bit: a saved prefix of another version is not reused."""
BLOCK_KEYS = BLOCK_SIZE
MIN_PRODUCTS = 2
"""Minimum products of a batch: the rows of a single one would be divided among threads."""
VALUE_COLUMNS = 16
"""Columns of the values are padded to a multiple: with 5 to 11 columns, also as the remainder of
one thread, libraries sum in another order (MKL on AVX2)."""
MIN_EXPONENT = -87.0
"""Minimum exponent: exponentials below it would be denormals, which libraries compute ten times
slower and multiply slowly; they become 0. A sum over the keys is at least 1."""
_LARGEST_OF_NONE = 1.01 * math.exp(MIN_EXPONENT)
MAX_SCRATCH_BYTES = 32 * MIB
"""Maximum size of the float32 keys and values together, and of the scores."""


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
class RowGroup:
    """Rows start..end of a pass, and the keys that any of them sees, as columns of scores.

    The keys are of one sequence. Keys that all rows see come first, in cache order; then single
    keys, along every path in the order of positions.

    runs: (first column, first row of the cache, count) of the first columns.
    picked int64 [columns]: rows of the cache for the columns after them.
    widths: columns of each block, multiples of BLOCK_KEYS; columns beyond its keys are hidden.
    keys int64 [columns]: the key of the pass in each column; any key for hidden columns.
    hidden bool [rows, columns]: which of the last columns a row does not see.
    edge_hidden bool [rows, edge]: the same for the first columns, if a window ends there.
    """

    start: int
    end: int
    runs: tuple[tuple[int, int, int], ...]
    picked: torch.Tensor | None
    widths: tuple[int, ...]
    keys: torch.Tensor
    hidden: torch.Tensor
    edge_hidden: torch.Tensor | None

    @property
    def n_columns(self) -> int:
        return sum(self.widths)

    @property
    def nbytes(self) -> int:
        tensors = (self.picked, self.keys, self.hidden, self.edge_hidden)
        return sum(tensor.nbytes for tensor in tensors if tensor is not None)

    def fill(self, columns: torch.Tensor, rows: StoredRows) -> None:
        """Copy rows of the cache, [1, heads, rows, dim], to the columns [heads, columns, dim].

        Hidden columns without a key are set to zero.
        """
        end = 0
        for first, row, num_tokens in self.runs:
            end = first + num_tokens
            rows.read(slice(row, row + num_tokens), columns[:, first:end])
        if self.picked is None:
            columns[:, end:] = 0.0
        else:
            rows.pick(self.picked, columns[:, end:])


class Scratch:
    """float32 buffers by name, shared by the layers of a model, which run one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._views: dict[str, torch.Tensor] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the buffer with its last contents if the shape is the same, else filled with 1."""
        view = self._views.get(name)
        if view is None or view.shape != shape:
            view, n_numbers = None, math.prod(shape)
            if name not in self._buffers or len(self._buffers[name]) < n_numbers:
                self._views.pop(name, None)
                self._buffers.pop(name, None)
                # Explicit: building a model changes torch's default dtype.
                self._buffers[name] = torch.empty(n_numbers, dtype=torch.float32)
            view = self._buffers[name][:n_numbers].view(shape).fill_(1.0)
            self._views[name] = view
        return view


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
        for group in self.groups:
            bytes_per_head = 4 * group.n_columns * (dim + value_width(value_dim))
            for heads in _parts(n_kv_heads, bytes_per_head):
                part = Scores(group, self.scratch, self.limits.min_batch_tokens, scale, softcap)
                part.fetch(keys.heads(heads), values.heads(heads))
                if sinks is not None:
                    part.sinks = sinks.float().view(n_kv_heads, -1, 1)[heads]
                if bias is not None:
                    columns = bias.float().index_select(1, group.keys)
                    part.bias = columns.view(n_kv_heads, -1, 1, group.n_columns)[heads]
                rows = slice(group.start, group.end)
                part.attend(queries[heads, :, rows], output[rows, heads])
        return output.view(1, num_tokens, n_heads, value_dim)


class Scores:
    """Attention of one group of rows over the keys and values of some KV heads."""

    sinks: torch.Tensor | None = None
    """Scores of the sinks [heads, query heads, 1]; None without sinks."""
    bias: torch.Tensor | None = None
    """Bias of the scores [heads, query heads, 1, columns]; None without one."""

    def __init__(
        self,
        group: RowGroup,
        scratch: Scratch,
        min_rows: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        self._group, self._scratch, self._min_rows = group, scratch, min_rows
        self._scale, self._softcap = scale, softcap

    def fetch(self, keys: StoredRows, values: StoredRows) -> None:
        """Copy keys and values [1, heads, rows of the cache, dim] to columns; ones follow a
        value."""
        group, (_, n_heads, _, dim) = self._group, keys.shape
        self._value_dim = values.shape[-1]
        width = value_width(self._value_dim)
        self._keys = self._scratch.take("keys", n_heads, group.n_columns, dim)
        self._values = self._scratch.take("values", n_heads, group.n_columns, width)
        group.fill(self._keys, keys)
        group.fill(self._values[..., : self._value_dim], values)

    def attend(self, queries: torch.Tensor, output: torch.Tensor) -> None:
        """Fill output [rows, heads, query heads, dim] for queries [heads, query heads, rows, dim].

        Takes as many rows at a time as the memory for scores allows.
        """
        n_heads, n_group, num_tokens, _ = queries.shape
        for rows in _parts(num_tokens, 4 * n_heads * n_group * self._group.n_columns):
            output[rows] = self._attend(queries[:, :, rows], rows).permute(2, 0, 1, 3)

    def _attend(self, queries: torch.Tensor, rows: slice) -> torch.Tensor:
        n_heads, n_group, num_tokens, dim = queries.shape
        n_flat, shape = n_group * num_tokens, (n_heads, n_group, num_tokens)
        n_parts = -(-MIN_PRODUCTS // n_heads)  # products of one head's rows
        minimum = self._min_rows
        n_each = -(-n_flat // (n_parts * minimum)) * minimum  # else one thread may have fewer rows
        n_products = n_heads * n_parts

        def of_rows(products: torch.Tensor) -> torch.Tensor:
            """View [products, rows of each, ...] as [heads, query heads, rows, ...]."""
            return products.view(n_heads, n_parts * n_each, -1)[:, :n_flat].view(*shape, -1)

        flat = queries.new_zeros(n_products, n_each, dim, dtype=torch.float32)
        of_rows(flat).copy_(queries)
        keys = self._keys.expand(n_products, -1, -1).transpose(1, 2)
        scores = self._scratch.take("scores", n_products, n_each, self._group.n_columns)
        scores.baddbmm_(flat, keys, beta=0, alpha=self._scale)
        self._finish(of_rows(scores), rows)
        largest = scores.amax(-1, keepdim=True)
        share = None
        if self.sinks is not None:
            own, sinks = of_rows(largest), self.sinks.unsqueeze(-1)
            torch.maximum(own, sinks, out=own)
            share = torch.exp(sinks - own)
        sums = of_rows(self._sums(_exponentials(scores.sub_(largest))))
        total = sums[..., -1:]
        return sums[..., : self._value_dim] / (total if share is None else total + share)

    def _finish(self, scores: torch.Tensor, rows: slice) -> None:
        """Apply softcap, bias and mask to scores [heads, query heads, rows, columns]."""
        group = self._group
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if self.bias is not None:
            scores += self.bias
        hidden = group.hidden[rows]
        scores[..., -hidden.shape[1] :].masked_fill_(hidden, -torch.inf)
        if group.edge_hidden is not None:
            edge = group.edge_hidden[rows]
            scores[..., : edge.shape[1]].masked_fill_(edge, -torch.inf)

    def _sums(self, shares: torch.Tensor) -> torch.Tensor:
        """Sum the values weighted by `shares` [heads, rows, columns], block by block."""
        sums = shares.new_zeros(*shares.shape[:2], self._values.shape[2])
        for of_block, values in self.blocks(shares):
            sums.baddbmm_(of_block, values)
        return sums

    def blocks(self, shares: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return the shares and values of every block, in the order of positions."""
        widths, values = self._group.widths, self._values.expand(len(shares), -1, -1)
        return zip(shares.split(widths, dim=2), values.split(widths, dim=1), strict=True)


def _exponentials(scores: torch.Tensor) -> torch.Tensor:
    """Exponentiate scores <= 0 in place; results that would be denormal become 0."""
    scores.clamp_min_(MIN_EXPONENT).exp_()
    return nn.functional.threshold_(scores, _LARGEST_OF_NONE, 0.0)


def value_width(value_dim: int) -> int:
    """Number of columns for values and the 1 in the last; columns in between are unused."""
    return -(-(value_dim + 1) // VALUE_COLUMNS) * VALUE_COLUMNS


def _parts(n_items: int, bytes_each: int) -> Iterator[slice]:
    """Yield spans of as many items as fit in MAX_SCRATCH_BYTES, but at least one."""
    limit = max(1, MAX_SCRATCH_BYTES // max(1, bytes_each))
    return (slice(start, min(start + limit, n_items)) for start in range(0, n_items, limit))
