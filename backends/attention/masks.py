"""Attention masks for a layout, as tensors.

Additive masks [1, 1, queries, keys]: 0 where a query may look, the dtype's most negative value
elsewhere (the convention of transformers, which eager attention and SDPA share).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from backends.attention.batch import BatchLayout, PartRows

_MASK_ALIGNMENT = 16
"""Elements to which rows of a mask are padded: the memory-efficient kernel of CUDA wants it."""


@dataclass(frozen=True)
class Segment:
    """A `Span` as attention computes with it.

    mask [1, 1, rows, end - start]: additive; None where every row sees all keys (or, with
    `is_causal`, as many as its number).
    """

    start: int
    end: int
    mask: torch.Tensor | None = None
    is_causal: bool = False


@dataclass(frozen=True)
class SegmentedRows:
    """Rows start..end of a pass, and disjoint segments of its keys that they look at.

    Keys in none of them are hidden from every row.
    """

    start: int
    end: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True)
class SegmentedMask:
    """Takes the mask's place on the way through a decoder layer; its parts are all the rows, those
    of each sequence by themselves."""

    parts: tuple[SegmentedRows, ...]
    n_keys: int

    def fits(self, key: torch.Tensor) -> bool:
        """Whether it is made for keys of this shape."""
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
    """The segments of the keys that the new rows start..end may look at."""

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
    """Mask [1, 1, rows, keys] of one span, in which a row may see nothing at all."""
    num_tokens, n_keys = allowed.shape
    width = -(-n_keys // _MASK_ALIGNMENT) * _MASK_ALIGNMENT
    # Half of the most negative value: kernels multiply it by log2(e), and an infinity would make
    # a row that sees nothing of this span a row of NaN.
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
    """Mask [1, 1, end - start, keys] of the new rows start..end in `dtype`."""
    allowed = torch.from_numpy(layout.allowed(start, end, window)).to(device)
    mask = torch.full(allowed.shape, torch.finfo(dtype).min, dtype=dtype, device=device)
    return mask.masked_fill_(allowed, 0.0)[None, None]


def alibi_bias(
    slopes: torch.Tensor, layout: BatchLayout, end: int, dtype: torch.dtype
) -> torch.Tensor:
    """ALiBi bias [heads, 1, keys]: slope x position of the key (Press et al. 2022).

    Softmax does not change when a row is shifted, so the key's position alone serves, and
    each node of a tree gets its own depth's.
    """
    positions = torch.from_numpy(layout.key_positions(end)).to(slopes.device)
    return (slopes[:, None, None] * positions).to(dtype)
