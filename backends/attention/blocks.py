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
from functools import lru_cache
from typing import NamedTuple

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
MAX_BLOCKED_SCORE_BYTES = 32 * MIB
"""Maximum size of the scores of the rows and heads that are computed together."""
SPAN_BYTES = 8 * MIB
"""Size of the float32 keys and values that are in memory together."""


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

    def fill(self, columns: torch.Tensor, rows: StoredRows, first: int = 0) -> None:
        """Copy rows of the cache, [1, heads, rows, dim], to columns [heads, columns, dim], which
        begin with the group's column `first`.

        Hidden columns without a key are set to zero.
        """
        end, of_runs = first + columns.shape[1], 0
        for start, row, num_tokens in self.runs:
            of_runs = start + num_tokens
            a, b = max(start, first), min(of_runs, end)
            if a < b:
                rows.read(
                    slice(row + a - start, row + b - start), columns[:, a - first : b - first]
                )
        start = max(of_runs, first)
        if start >= end:
            return
        if self.picked is None:
            columns[:, start - first :] = 0.0
        else:
            picked = self.picked[start - of_runs : end - of_runs]
            rows.pick(picked, columns[:, start - first :])


class BlockSpan(NamedTuple):
    """Consecutive blocks: columns first..end of a group, and the columns of each block."""

    first: int
    end: int
    widths: tuple[int, ...]


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
            for heads in self._head_parts(group, queries.shape[1], keys.shape, value_dim):
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

    def _head_parts(
        self, group: RowGroup, n_group: int, shape: torch.Size, value_dim: int
    ) -> Iterator[slice]:
        """Yield spans of KV heads whose scores fit in memory, and one of whose blocks does."""
        minimum = self.limits.min_batch_tokens
        num_rows = -(-n_group * (group.end - group.start) // minimum) * minimum
        n_fitting = MAX_BLOCKED_SCORE_BYTES // (4 * num_rows * group.n_columns)
        block_bytes = 4 * max(group.widths) * (shape[3] + value_width(value_dim))
        return _parts(shape[1], min(n_fitting, SPAN_BYTES // block_bytes))


class Scores:
    """Attention of one group of rows over the keys and values of some KV heads."""

    sinks: torch.Tensor | None = None
    """Scores of the sinks [heads, query heads, 1]; None without sinks."""
    bias: torch.Tensor | None = None
    """Bias of the scores [heads, query heads, 1, columns]; None without one."""

    def __init__(
        self,
        group: RowGroup,
        keys: StoredRows,
        values: StoredRows,
        scratch: Scratch,
        min_rows: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        self._group, self._keys, self._values = group, keys, values
        self._scratch, self._min_rows = scratch, min_rows
        self._scale, self._softcap = scale, softcap
        self._spans = _spans(group.widths, 4 * keys.shape[1] * (keys.shape[3] + self._value_width))
        self._fetched: dict[str, int] = {}

    @property
    def _value_width(self) -> int:
        return value_width(self._values.shape[3])

    def _columns_of(self, name: str, rows: StoredRows, span: BlockSpan, width: int) -> torch.Tensor:
        """Return a span's columns of keys or values, float32 [heads, columns, width]; ones follow a
        value. They stay until another span of the same name is fetched."""
        _, n_heads, _, dim = rows.shape
        columns = self._scratch.take(name, n_heads, span.end - span.first, width)
        if self._fetched.get(name) != span.first:
            self._group.fill(columns[..., :dim], rows, span.first)
            self._fetched[name] = span.first
        return columns

    def attend(self, queries: torch.Tensor, output: torch.Tensor) -> None:
        """Fill output [rows, heads, query heads, dim] for queries [heads, query heads, rows, dim].

        Takes as many rows at a time as the memory for scores allows.
        """
        n_heads, n_group, num_tokens, _ = queries.shape
        bytes_per_row = 4 * n_heads * n_group * self._group.n_columns
        for rows in _parts(num_tokens, MAX_BLOCKED_SCORE_BYTES // bytes_per_row):
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
        scores, maxima = [], []
        for span, part in zip(self._spans, self._score_buffers(n_products, n_each), strict=True):
            keys = self._columns_of("keys", self._keys, span, dim).expand(n_products, -1, -1)
            part.baddbmm_(flat, keys.transpose(1, 2), beta=0, alpha=self._scale)
            self._finish(of_rows(part), rows, span)
            scores.append(part)
            maxima.append(part.amax(-1, keepdim=True))
        largest = maxima[0] if len(maxima) == 1 else torch.stack(maxima).amax(0)
        share = None
        if self.sinks is not None:
            own, sinks = of_rows(largest), self.sinks.unsqueeze(-1)
            torch.maximum(own, sinks, out=own)
            share = torch.exp(sinks - own)
        sums = of_rows(self._sums(scores, largest))
        total = sums[..., -1:]
        output = sums[..., : self._values.shape[3]]
        return output / (total if share is None else total + share)

    def _score_buffers(self, n_products: int, n_each: int) -> list[torch.Tensor]:
        """Return memory for the scores of each span, [products, rows of each, columns]."""
        num_rows = n_products * n_each
        buffer = self._scratch.take("scores", num_rows * self._group.n_columns)
        parts = buffer.split([num_rows * (span.end - span.first) for span in self._spans])
        return [part.view(n_products, n_each, -1) for part in parts]

    def _finish(self, scores: torch.Tensor, rows: slice, span: BlockSpan) -> None:
        """Apply softcap, bias and mask to a span's scores [heads, query heads, rows, columns]."""
        group, (first, end, _) = self._group, span
        if self._softcap is not None:
            scores.div_(self._softcap).tanh_().mul_(self._softcap)
        if self.bias is not None:
            scores += self.bias[..., first:end]
        hidden = group.hidden[rows]
        first_hidden = group.n_columns - hidden.shape[1]
        a = max(first, first_hidden)
        if a < end:
            columns = hidden[:, a - first_hidden : end - first_hidden]
            scores[..., a - first :].masked_fill_(columns, -torch.inf)
        if group.edge_hidden is not None and first < group.edge_hidden.shape[1]:
            edge = group.edge_hidden[rows, first:end]
            scores[..., : edge.shape[1]].masked_fill_(edge, -torch.inf)

    def _sums(self, scores: list[torch.Tensor], largest: torch.Tensor) -> torch.Tensor:
        """Sum the values weighted by exponentials of the spans' scores [products, rows, columns],
        block by block."""
        sums = scores[0].new_zeros(*scores[0].shape[:2], self._value_width)
        for of_block, of_values in self.blocks(scores, largest):
            sums.baddbmm_(of_block, of_values)
        return sums

    def blocks(
        self, scores: list[torch.Tensor], largest: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield the shares and values of every block, in the order of positions; the values are
        overwritten after the last block of a span."""
        for span, part in zip(self._spans, scores, strict=True):
            values = self._columns_of("values", self._values, span, self._value_width)
            of_blocks = values.expand(len(part), -1, -1).split(span.widths, dim=1)
            shares = _exponentials(part.sub_(largest)).split(span.widths, dim=2)
            yield from zip(shares, of_blocks, strict=True)


def _exponentials(scores: torch.Tensor) -> torch.Tensor:
    """Exponentiate scores <= 0 in place; results that would be denormal become 0."""
    scores.clamp_min_(MIN_EXPONENT).exp_()
    return nn.functional.threshold_(scores, _LARGEST_OF_NONE, 0.0)


def value_width(value_dim: int) -> int:
    """Number of columns for values and the 1 in the last; columns in between are unused."""
    return -(-(value_dim + 1) // VALUE_COLUMNS) * VALUE_COLUMNS


@lru_cache(maxsize=64)
def _spans(widths: tuple[int, ...], bytes_per_column: int) -> list[BlockSpan]:
    """Return spans of as many blocks as fit in SPAN_BYTES, but at least one."""
    limit = max(1, SPAN_BYTES // bytes_per_column)
    spans, first, end, start = [], 0, 0, 0
    for block, width in enumerate(widths):
        if end > first and end + width - first > limit:
            spans.append(BlockSpan(first, end, widths[start:block]))
            first, start = end, block
        end += width
    return [*spans, BlockSpan(first, end, widths[start:])]


def _parts(n_items: int, n_each: int) -> Iterator[slice]:
    """Yield spans of `n_each` items, but at least one."""
    step = max(1, n_each)
    return (slice(start, min(start + step, n_items)) for start in range(0, n_items, step))
