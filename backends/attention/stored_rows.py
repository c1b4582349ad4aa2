"""Number formats of the KV cache: how rows of keys and values are stored, and read again.

A row is encoded when it is written to the cache. Every reader gets the decoded numbers, the row's
own token included, so a token's logits do not depend on how its prompt or tree is cut into passes.
Encoding and decoding a head of a row use that head's numbers alone.

    q8_0   per block of 32 numbers of a head: a float16 scale d and int8 numbers q, read as d * q;
           d is the largest magnitude / 127 (ggml's block_q8_0: quantize_row_q8_0_ref)
    fp8    float8 e4m3 (Micikevicius et al. 2022), without a scale; larger numbers become 448
    bf16, f16   converted; larger numbers become the format's largest

A stored row of a head in q8_0 has its scales first, then its numbers; the last block of a head that
32 does not divide is shorter.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from backends.contract.backend import UnsupportedModel

FORMATS_REVISION = 1
"""Version of the stored bytes: a saved prefix of another version is not reused."""
Q8_0_BLOCK = 32
_Q8_0_LARGEST = 127
PART_BYTES = 1 << 20
"""Size of the float32 numbers that are decoded at a time: they stay in the processor's cache."""


class RowFormat(ABC):
    """A number format of keys or values in the KV cache.

    Attributes:
        name: as in the options; "" for the dtype of the model.
    """

    name = ""

    @abstractmethod
    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        """Return the bytes of one head of a row of `dim` numbers, in a model of `dtype`."""

    @abstractmethod
    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Return the stored form [..., width] of states [..., dim]."""

    @abstractmethod
    def decode(self, stored: torch.Tensor, columns: torch.Tensor) -> None:
        """Fill float32 columns [..., dim] with the numbers of stored rows [..., width]."""


class ModelDtype(RowFormat):
    """The states as the model computes them."""

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        return dim * dtype.itemsize

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        return states

    def decode(self, stored: torch.Tensor, columns: torch.Tensor) -> None:
        columns.copy_(stored)


class Converted(RowFormat):
    """Numbers of another dtype; those of one byte are stored as bytes, which all of torch's
    operations can move."""

    def __init__(self, name: str, dtype: torch.dtype) -> None:
        self.name, self._dtype = name, dtype
        self._limit = torch.finfo(dtype).max

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        return dim * self._dtype.itemsize

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        if states.dtype == self._dtype:
            return states
        stored = states.float().clamp(-self._limit, self._limit).to(self._dtype)
        return stored.view(torch.uint8) if self._dtype.itemsize == 1 else stored

    def decode(self, stored: torch.Tensor, columns: torch.Tensor) -> None:
        columns.copy_(stored.view(self._dtype))


class Q8_0(RowFormat):
    """Blocks of int8 numbers with a scale."""

    name = "q8_0"

    def row_bytes(self, dim: int, dtype: torch.dtype) -> int:
        n_bytes = 2 * _n_blocks(dim) + dim
        return n_bytes + n_bytes % 2  # scales of the next row have an even address

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        dim, n_blocks = states.shape[-1], _n_blocks(states.shape[-1])
        width = self.row_bytes(dim, states.dtype)
        stored = states.new_zeros(*states.shape[:-1], width, dtype=torch.uint8)
        if not dim:
            return stored
        numbers = pad(states.float(), (0, n_blocks * Q8_0_BLOCK - dim))
        blocks = numbers.unflatten(-1, (n_blocks, Q8_0_BLOCK))
        scales = blocks.abs().amax(-1) / _Q8_0_LARGEST
        inverses = torch.where(scales > 0, 1 / scales, 0.0)
        blocks = (blocks * inverses.unsqueeze(-1)).round_()
        blocks = blocks.clamp_(-_Q8_0_LARGEST, _Q8_0_LARGEST)
        stored_scales, stored_numbers = self._parts(stored, dim)
        stored_scales.copy_(scales.clamp_max(torch.finfo(torch.float16).max))
        stored_numbers.copy_(blocks.flatten(-2)[..., :dim])
        return stored

    def decode(self, stored: torch.Tensor, columns: torch.Tensor) -> None:
        if not columns.numel():  # no rotary part (Mistral Large 4)
            return
        scales, numbers = self._parts(stored, columns.shape[-1])
        columns.copy_(numbers)
        blocks = columns.split(Q8_0_BLOCK, -1)
        for block, scale in zip(blocks, scales.float().split(1, -1), strict=True):
            block.mul_(scale)

    def _parts(self, stored: torch.Tensor, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the scales, float16 [..., blocks], and the numbers, int8 [..., dim]."""
        n_bytes = 2 * _n_blocks(dim)
        scales = stored[..., :n_bytes].view(torch.float16)
        return scales, stored[..., n_bytes : n_bytes + dim].view(torch.int8)


def _n_blocks(dim: int) -> int:
    return -(-dim // Q8_0_BLOCK)


MODEL_DTYPE = ModelDtype()
ROW_FORMATS: dict[str, RowFormat] = {
    row_format.name: row_format
    for row_format in (
        Converted("f16", torch.float16),
        Converted("bf16", torch.bfloat16),
        Converted("fp8", torch.float8_e4m3fn),
        Q8_0(),
    )
}
"""Formats by the names of the options."""


class KvFormats(NamedTuple):
    """Formats of the keys and of the values."""

    keys: RowFormat = MODEL_DTYPE
    values: RowFormat = MODEL_DTYPE

    def token_bytes(
        self, heads: tuple[tuple[int, int], tuple[int, int]], dtype: torch.dtype
    ) -> tuple[int, int]:
        """Return the bytes of one token's keys and of its values in a layer of these heads (number,
        dim), in a model of `dtype`."""
        of_keys, of_values = heads
        return (
            of_keys[0] * self.keys.row_bytes(of_keys[1], dtype),
            of_values[0] * self.values.row_bytes(of_values[1], dtype),
        )


OWN_FORMATS = KvFormats()
"""Keys and values in the dtype of the model."""


def kv_formats(cache_type_k: str | None, cache_type_v: str | None) -> KvFormats:
    """Return the formats of these names; None: the dtype of the model.

    Raises UnsupportedModel for a format that only llama.cpp has.
    """
    return KvFormats(_format_of(cache_type_k), _format_of(cache_type_v))


def _format_of(name: str | None) -> RowFormat:
    if name is None:
        return MODEL_DTYPE
    if name not in ROW_FORMATS:
        raise UnsupportedModel(
            f"the KV cache of a checkpoint cannot be {name}: {', '.join(ROW_FORMATS)} can, and "
            f"{name} in a GGUF file of the model"
        )
    return ROW_FORMATS[name]


@dataclass(frozen=True)
class StoredRows:
    """Keys or values as the cache stores them; takes the place of a tensor [1, heads, rows, dim].

    stored [1, heads, rows, width]; `row_format` reads them as rows of `dim` numbers.
    staged [blocks, heads, rows of a block, width]: the rows after those, read from a file by block.
    """

    stored: torch.Tensor
    row_format: RowFormat
    dim: int
    staged: torch.Tensor | None = None

    @classmethod
    def of(cls, rows: torch.Tensor | StoredRows) -> StoredRows:
        """Return stored rows; a tensor is taken as it is."""
        if isinstance(rows, StoredRows):
            return rows
        return cls(rows, MODEL_DTYPE, rows.shape[-1])

    @property
    def shape(self) -> torch.Size:
        n_heads, num_rows = self.stored.shape[1:3]
        if self.staged is not None:
            num_rows += self.staged.shape[0] * self.staged.shape[2]
        return torch.Size((1, n_heads, num_rows, self.dim))

    def heads(self, heads: slice) -> StoredRows:
        staged = None if self.staged is None else self.staged[:, heads]
        return StoredRows(self.stored[:, heads], self.row_format, self.dim, staged)

    def read(self, rows: slice, columns: torch.Tensor) -> None:
        """Fill float32 columns [heads, rows, dim] with consecutive rows, a part at a time."""
        for stored, part in self._runs(rows, columns):
            self._decode(stored, part)

    def read_stored(self, rows: slice, columns: torch.Tensor) -> None:
        """Fill columns [heads, rows, width] with consecutive rows as they are stored."""
        for stored, part in self._runs(rows, columns):
            part.copy_(stored)

    def pick(self, rows: torch.Tensor, columns: torch.Tensor) -> None:
        """Fill float32 columns [heads, rows, dim] with the rows of these numbers."""
        self._decode(self._select(rows), columns)

    def take(self, rows: torch.Tensor) -> StoredRows:
        """Return the rows of these numbers."""
        return StoredRows(self._select(rows)[None], self.row_format, self.dim)

    def decoded(self, dtype: torch.dtype) -> torch.Tensor:
        """Return all rows as a tensor [1, heads, rows, dim] of `dtype`; none may be staged."""
        if self.row_format is MODEL_DTYPE:
            return self.stored
        rows = torch.empty(self.shape, dtype=dtype, device=self.stored.device)
        for part in _parts(self.stored, self.dim):
            decoded = torch.empty(rows[0, :, part].shape, device=rows.device, dtype=torch.float32)
            self.row_format.decode(self.stored[0, :, part], decoded)
            rows[0, :, part] = decoded
        return rows

    def _select(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the rows of these numbers as they are stored, [heads, rows, width]."""
        if self.staged is None:
            return self.stored[0].index_select(1, rows)
        num_stored, size = self.stored.shape[2], self.staged.shape[2]
        is_staged = rows >= num_stored
        selected = self.stored.new_empty(self.stored.shape[1], len(rows), self.stored.shape[3])
        selected[:, ~is_staged] = self.stored[0].index_select(1, rows[~is_staged])
        of_blocks = rows[is_staged] - num_stored
        blocks = self.staged[of_blocks // size, :, of_blocks % size]
        selected[:, is_staged] = blocks.transpose(0, 1)
        return selected

    def _runs(
        self, rows: slice, columns: torch.Tensor
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Yield stored rows [heads, (blocks,) rows, width] and their columns, in order."""
        start, end, num_stored = rows.start, rows.stop, self.stored.shape[2]
        middle = min(max(start, num_stored), end)
        if start < middle:
            yield self.stored[0, :, start:middle], columns[:, : middle - start]
        if self.staged is None:
            return
        size, at = self.staged.shape[2], middle
        while at < end:
            block, row = divmod(at - num_stored, size)
            n_whole = 0 if row else (end - at) // size
            if n_whole:
                part = columns[:, at - start : at - start + n_whole * size]
                blocks = self.staged[block : block + n_whole].transpose(0, 1)
                yield blocks, part.unflatten(1, (n_whole, size))
                at += n_whole * size
            else:
                n = min(size - row, end - at)
                part = columns[:, at - start : at - start + n]
                yield self.staged[block, :, row : row + n], part
                at += n

    def _decode(self, stored: torch.Tensor, columns: torch.Tensor) -> None:
        if self.row_format is MODEL_DTYPE:
            columns.copy_(stored)
            return
        if stored.ndim > 3:
            for block in range(stored.shape[1]):
                self._decode(stored[:, block], columns[:, block])
            return
        for part in _parts(stored, self.dim):
            self.row_format.decode(stored[:, part], columns[:, part])


def _parts(stored: torch.Tensor, dim: int) -> list[slice]:
    """Return spans of the rows [..., heads, rows, width] that are decoded at a time."""
    n_heads, num_tokens = stored.shape[-3:-1]
    step = max(1, PART_BYTES // max(1, 4 * n_heads * dim))
    return [slice(at, min(at + step, num_tokens)) for at in range(0, num_tokens, step)]
