"""Which keys a row of a pass looks at, as blocks of positions (backends/attention/blocks.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from backends.attention.blocks import (
    BLOCK_KEYS,
    USUAL_LIMITS,
    BlockedMask,
    ProductLimits,
    RowGroup,
    Scratch,
)
from backends.attention.layout import PassLayout


def blocked_mask(
    layout: PassLayout,
    start: int,
    end: int,
    window: int | None,
    limits: ProductLimits = USUAL_LIMITS,
    scratch: Scratch | None = None,
) -> BlockedMask:
    """The keys that the new rows start..end of a pass may look at.

    scratch: what the masks of a model share.
    """
    n_keys = layout.prefix + layout.first_new + end
    whole = layout.n_in_order(start) // BLOCK_KEYS * BLOCK_KEYS
    positions = layout.new_positions[start:end]
    oldest = np.zeros_like(positions) if window is None else positions - window + 1
    first = min(max(0, int(oldest.min())) // BLOCK_KEYS * BLOCK_KEYS, whole)
    edge = np.arange(first, max(first, min(whole, int(oldest.max()))))
    edge_hidden = edge[None, :] < oldest[:, None]
    allowed = layout.allowed(start, end, window, whole)
    blocks = layout.key_positions(end)[whole:] // BLOCK_KEYS
    shared = slice(first, whole)
    groups = [
        _group(a, b, shared, allowed[a:b], blocks, edge_hidden[a:b])
        for a, b in _row_spans(allowed, blocks, limits.most_keys)
    ]
    return BlockedMask(tuple(groups), n_keys, limits, scratch or Scratch())


def _group(
    start: int,
    end: int,
    shared: slice,
    allowed: np.ndarray,
    blocks: np.ndarray,
    edge_hidden: np.ndarray,
) -> RowGroup:
    """Rows start..end, which see `shared` and, as `allowed` [rows, keys] says, the keys behind it.

    blocks [keys]: the block of each key behind `shared`.
    """
    own, widths, hidden = _own_columns(allowed, blocks)
    is_run = np.array_equal(own[: len(blocks)], np.arange(len(blocks)))
    return RowGroup(
        start,
        end,
        slice(shared.start, shared.stop + len(blocks)) if is_run else shared,
        None if is_run else torch.from_numpy(shared.stop + own),
        (*[BLOCK_KEYS] * ((shared.stop - shared.start) // BLOCK_KEYS), *widths),
        torch.from_numpy(hidden),
        torch.from_numpy(edge_hidden) if edge_hidden.size else None,
    )


def _row_spans(
    allowed: np.ndarray, blocks: np.ndarray, most_keys: int
) -> Iterator[tuple[int, int]]:
    """Spans of rows, each as long as its keys of any one block are not too many.

    allowed bool [rows, keys]; blocks [keys]: the block of each key.
    """
    if np.unique(blocks, return_counts=True)[1].max() <= most_keys:
        yield 0, len(allowed)
        return
    start, seen = 0, np.zeros(allowed.shape[1], dtype=bool)
    for row, keys in enumerate(allowed):
        both = seen | keys
        if np.unique(blocks[both], return_counts=True)[1].max() > most_keys:
            yield start, row
            start, both = row, keys
        seen = both
    yield start, len(allowed)


def _own_columns(
    allowed: np.ndarray, blocks: np.ndarray
) -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """(keys of the columns, widths of the blocks, hidden) of rows; see RowGroup."""
    keys: list[np.ndarray] = []
    is_real: list[np.ndarray] = []
    seen = np.flatnonzero(allowed.any(axis=0))
    for block in np.unique(blocks[seen]):
        of_block = seen[blocks[seen] == block]
        n_more = -len(of_block) % BLOCK_KEYS
        keys.append(np.pad(of_block, (0, n_more), mode="edge"))
        is_real.append(np.arange(len(keys[-1])) < len(of_block))
    columns = np.concatenate(keys)
    return columns, tuple(map(len, keys)), ~(allowed[:, columns] & np.concatenate(is_real))
