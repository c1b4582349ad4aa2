"""Attention masks for a layout, as tensors.

Additive masks [1, 1, queries, keys]: 0 where a query sees a key, the dtype's most negative value
elsewhere (the convention of transformers' eager attention and SDPA).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from backends.attention.batch import BatchLayout, PartRows
from backends.attention.stored_rows import StoredRows

_MASK_ALIGNMENT = 16
"""Elements to which rows of a mask are padded, as CUDA's memory-efficient kernel requires."""


@dataclass(frozen=True)
class Segment:
    """A `Span` with its mask as a tensor.

    mask [1, 1, rows, end - start]: additive; None if every row sees all keys (or, with
    `is_causal`, row i sees the first i + 1).
    """

    start: int
    end: int
    mask: torch.Tensor | None = None
    is_causal: bool = False


@dataclass(frozen=True)
class SegmentedRows:
    """Rows start..end of a pass, and disjoint segments of the keys that they see.

    Keys outside all segments are hidden from every row.
    """

    start: int
    end: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SegmentedMask:
    """Mask object passed through a decoder layer in place of a tensor; one part per sequence, which
    together are all rows."""

    parts: tuple[SegmentedRows, ...]
    n_keys: int

    def fits(self, key: torch.Tensor | StoredRows) -> bool:
        """Return whether the mask is for keys of this shape."""
        return key.shape[0] == 1 and key.shape[2] == self.n_keys

    @property
    def nbytes(self) -> int:
        masks = (segment.mask for part in self.parts for segment in part.segments)
        return sum(mask.untyped_storage().nbytes() for mask in masks if mask is not None)


def segmented_mask(
    layout: BatchLayout,
    start: int,
    end: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> SegmentedMask:
    """Return the segments of the keys that the new rows start..end see."""

    def segments(rows: PartRows) -> tuple[Segment, ...]:
        return tuple(
            Segment(
                rows.first_key + span.start,
                rows.first_key + span.end,
                None if span.allowed is None else _segment_mask(span.allowed, dtype, device),
                span.is_causal,
            )
            for span in rows.part.layout.spans(rows.start, rows.end, window)
        )

    parts = tuple(
        SegmentedRows(rows.first_row, rows.first_row + rows.end - rows.start, segments(rows))
        for rows in layout.rows(start, end)
    )
    return SegmentedMask(parts, layout.n_keys(end))


def _segment_mask(
    allowed: np.ndarray, dtype: torch.dtype, device: torch.device | None
) -> torch.Tensor:
    """Return the mask [1, 1, rows, keys] of one span, in which a row may see no key."""
    num_tokens, n_keys = allowed.shape
    width = -(-n_keys // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    # Half of the most negative value: kernels multiply it by log2(e), and an infinity would make
    # a row that sees no key of this span NaN.
    mask = torch.full((num_tokens, width), torch.finfo(dtype).min / 2, dtype=dtype, device=device)
    mask[:, :n_keys].masked_fill_(torch.from_numpy(allowed).to(device), 0.0)
    return mask[None, None, :, :n_keys]


def additive_mask(
    layout: BatchLayout,
    start: int,
    end: int,
    window: int | None,
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return the mask [1, 1, end - start, keys] of the new rows start..end in `dtype`."""
    allowed = torch.from_numpy(layout.allowed(start, end, window)).to(device)
    mask = torch.full(allowed.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
    return mask.masked_fill_(allowed, 0.0)[None, None]


def alibi_bias(
    slopes: torch.Tensor, layout: BatchLayout, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """Return the ALiBi bias [heads, 1, keys]: slope x position of the key (Press et al. 2022).

    Softmax does not change when a row is shifted, so the key's position is enough, also for the
    nodes of a tree.
    """
    positions = torch.from_numpy(layout.key_positions(end)).to(slopes.device)
    return (slopes[:, None, None] * positions).to(dtype)
