"""Exact attention of rows over keys and values in blocks: scores, exponentials and sums."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TypeAlias

import torch
from torch import nn

from backends.attention.row_groups import BlockSpan, RowGroup, spans_of
from backends.attention.stored_rows import StoredRows
from offload.units import MIB

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


Shape: TypeAlias = tuple[int, ...]


class Scratch:
    """float32 buffers by name, shared by the layers of a model, which run one after the other."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}
        self._taken: dict[str, tuple[list[Shape], list[torch.Tensor]]] = {}

    def take(self, name: str, *shape: int) -> torch.Tensor:
        """Return the buffer with its last contents if the shape is the same, else filled with 1."""
        return self.take_parts(name, [shape])[0]

    def take_parts(self, name: str, shapes: list[Shape]) -> list[torch.Tensor]:
        """Return tensors of these shapes in one buffer, as `take` does."""
        taken, parts = self._taken.get(name, ([], []))
        if taken != shapes:
            sizes = list(map(math.prod, shapes))
            if name not in self._buffers or len(self._buffers[name]) < sum(sizes):
                parts.clear()
                self._taken.pop(name, None)
                self._buffers.pop(name, None)
                # Explicit: building a model changes torch's default dtype.
                self._buffers[name] = torch.empty(sum(sizes), dtype=torch.float32)
            flat = self._buffers[name][: sum(sizes)].fill_(1.0).split(sizes)
            parts = [part.view(shape) for part, shape in zip(flat, shapes, strict=True)]
            self._taken[name] = shapes, parts
        return parts


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
        _, n_heads, _, dim = keys.shape
        self._value_dim = values.shape[3]
        self._value_width = value_width(self._value_dim)
        self._spans = spans_of(group.widths, 4 * n_heads * (dim + self._value_width))
        self._fetched: dict[str, int] = {}

    def _columns_of(self, name: str, rows: StoredRows, span: BlockSpan, width: int) -> torch.Tensor:
        """Return a span's columns of keys or values, float32 [heads, columns, width]; ones follow a
        value. They stay until another span of the same name is fetched."""
        _, n_heads, _, dim = rows.shape
        columns = self._scratch.take(name, n_heads, span.end - span.first, width)
        if self._fetched.get(name) != span.first:
            numbers = columns if width == dim else columns[..., :dim]
            self._group.fill(numbers, rows, span.first)
            self._fetched[name] = span.first
        return columns

    def attend(self, queries: torch.Tensor, output: torch.Tensor) -> None:
        """Fill output [rows, heads, query heads, dim] for queries [heads, query heads, rows, dim].

        Takes as many rows at a time as the memory for scores allows.
        """
        n_heads, n_group, num_tokens, _ = queries.shape
        bytes_per_row = 4 * n_heads * n_group * self._group.n_columns
        for rows in parts_of(num_tokens, MAX_BLOCKED_SCORE_BYTES // bytes_per_row):
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
        shapes: list[Shape] = [(n_products, n_each, span.end - span.first) for span in self._spans]
        scores, maxima = self._scratch.take_parts("scores", shapes), []
        for part, span in zip(scores, self._spans, strict=True):
            keys = self._columns_of("keys", self._keys, span, dim).expand(n_products, -1, -1)
            part.baddbmm_(flat, keys.transpose(1, 2), beta=0, alpha=self._scale)
            self._finish(of_rows(part), rows, span)
            maxima.append(part.amax(-1, keepdim=True))
        largest = maxima[0] if len(maxima) == 1 else torch.stack(maxima).amax(0)
        share = None
        if self.sinks is not None:
            own, sinks = of_rows(largest), self.sinks.unsqueeze(-1)
            torch.maximum(own, sinks, out=own)
            share = torch.exp(sinks - own)
        sums = of_rows(self._sums(scores, largest))
        total = sums[..., -1:]
        output = sums[..., : self._value_dim]
        return output / (total if share is None else total + share)

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


def parts_of(n_items: int, n_each: int) -> Iterator[slice]:
    """Yield spans of `n_each` items, but at least one."""
    step = max(1, n_each)
    return (slice(start, min(start + step, n_items)) for start in range(0, n_items, step))
