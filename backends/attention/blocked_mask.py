"""Masks for exact attention: the keys of each row in blocks (backends/attention/blocks.py)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from backends.attention.batch import BatchLayout, PartRows, rows_in_pool, runs_of
from backends.attention.blocks import USUAL_LIMITS, BlockedMask, ProductLimits
from backends.attention.row_groups import BLOCK_KEYS, RowGroup
from backends.attention.scores import Scratch


def blocked_mask(
    layout: BatchLayout,
    start: int,
    end: int,
    window: int | None,
    limits: ProductLimits = USUAL_LIMITS,
    scratch: Scratch | None = None,
    *,
    is_of_cache: bool = False,
) -> BlockedMask:
    """Return the mask for the new rows start..end of a pass.

    scratch: buffers shared by the masks of a model.
    is_of_cache: keys are all rows of the cache instead of the keys of the pass in order.
    """
    groups = [
        group
        for rows in layout.rows(start, end)
        for group in _groups_of_sequence(rows, window, limits.max_keys, is_of_cache)
    ]
    n_keys = max(map(_num_rows, groups)) if is_of_cache else layout.n_keys(end)
    return BlockedMask(tuple(groups), n_keys, is_of_cache, limits, scratch or Scratch())


def _groups_of_sequence(
    rows: PartRows, window: int | None, max_keys: int, is_of_cache: bool
) -> Iterator[RowGroup]:
    layout, start, end = rows.part.layout, rows.start, rows.end
    whole = layout.n_in_order(start) // BLOCK_KEYS * BLOCK_KEYS
    positions = layout.new_positions[start:end]
    oldest = np.zeros_like(positions) if window is None else positions - window + 1
    first = min(max(0, int(oldest.min())) // BLOCK_KEYS * BLOCK_KEYS, whole)
    edge = np.arange(first, max(first, min(whole, int(oldest.max()))))
    edge_hidden = edge[None, :] < oldest[:, None]
    allowed = layout.allowed(start, end, window, whole)
    blocks = layout.key_positions(end)[whole:] // BLOCK_KEYS
    for a, b in _row_spans(allowed, blocks, max_keys):
        own, widths, hidden = _own_columns(allowed[a:b], blocks)
        shared = np.arange(first, whole)
        # Keys in cache order if they are consecutive, else along each path.
        is_run = np.array_equal(own[: len(blocks)], np.arange(len(blocks)))
        in_order = np.arange(first, whole + len(blocks)) if is_run else shared
        key_rows, picked = _in_cache(rows, in_order), _in_cache(rows, whole + own)
        if not is_of_cache:
            key_rows, picked = rows.first_key + in_order, rows.first_key + whole + own
        yield RowGroup(
            rows.first_row + a,
            rows.first_row + b,
            tuple(runs_of(key_rows)),
            None if is_run else torch.from_numpy(picked),
            (*[BLOCK_KEYS] * (len(shared) // BLOCK_KEYS), *widths),
            torch.from_numpy(rows.first_key + np.concatenate([shared, whole + own])),
            torch.from_numpy(hidden),
            torch.from_numpy(edge_hidden[a:b]) if edge_hidden[a:b].size else None,
        )


def _num_rows(group: RowGroup) -> int:
    """Return the number of first rows of the cache that hold all keys of a group. It is no sum over
    the sequences, which share rows."""
    ends = [row + num_tokens for _, row, num_tokens in group.runs]
    return max(ends if group.picked is None else [*ends, int(group.picked.max()) + 1])


def _in_cache(rows: PartRows, of_sequence: np.ndarray) -> np.ndarray:
    return rows_in_pool(rows.part.table, of_sequence)


def _row_spans(allowed: np.ndarray, blocks: np.ndarray, max_keys: int) -> Iterator[tuple[int, int]]:
    """Yield the longest spans of rows that see at most `max_keys` keys of any one block.

    allowed bool [rows, keys]; blocks [keys]: the block of each key.
    """
    if np.unique(blocks, return_counts=True)[1].max() <= max_keys:
        yield 0, len(allowed)
        return
    start, seen = 0, np.zeros(allowed.shape[1], dtype=bool)
    for row, keys in enumerate(allowed):
        both = seen | keys
        if np.unique(blocks[both], return_counts=True)[1].max() > max_keys:
            yield start, row
            start, both = row, keys
        seen = both
    yield start, len(allowed)


def _own_columns(
    allowed: np.ndarray, blocks: np.ndarray
) -> tuple[np.ndarray, tuple[int, ...], np.ndarray]:
    """Return (keys of the columns, widths of the blocks, hidden) of rows; see RowGroup."""
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
