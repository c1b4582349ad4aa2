"""What sequences add in one pass, and where in the pool it goes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from backends.attention.batch import BatchLayout
from backends.attention.layout import CausalLayout, PassLayout
from backends.contract.store import NewTokens
from backends.kv.sequence import BlockStore


def layout_of(new: NewTokens[BlockStore]) -> PassLayout:
    """Who sees whom among one sequence's new rows and those that it has."""
    table, n_live = new.store.table, new.n_live_before
    if not new.are_nodes:
        return CausalLayout(table.n_committed, len(new.token_ids))
    return PassLayout(table.n_committed, table.positions(), table.visible(n_live))


def take_rows(new: Sequence[NewTokens[BlockStore]], n_more: int) -> tuple[np.ndarray, BatchLayout]:
    """Blocks for the new rows, and `n_more` behind the last ones, which fill the pass up.

    Returns where in the pool they lie, int64 [rows], and who sees whom.
    """
    places, parts = [], []
    for item in new:
        num_tokens = len(item.token_ids) + (n_more if item is new[-1] else 0)
        layout = layout_of(item)
        places.append(item.store.make_capacity(layout.prefix + layout.first_new, num_tokens))
        parts.append(item.store.part(layout))
    batch = BatchLayout(tuple(parts))
    return np.concatenate(places), batch.padded(n_more) if n_more else batch


def rows_of_pass(new: Sequence[NewTokens[BlockStore]]) -> list[int]:
    """The rows whose logits are wanted, counted over all sequences."""
    result: list[int] = []
    first = 0
    for item in new:
        result += [first + row for row in item.logits_at]
        first += len(item.token_ids)
    return result
