"""What sequences add in one pass, and where in the pool it goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from backends.attention.batch import BatchLayout
from backends.attention.layout import CausalLayout, PassLayout
from backends.kv.sequence import SequenceKv


@dataclass(frozen=True)
class NewRows:
    """What one sequence adds in a pass, and of which of these rows logits are wanted."""

    text: SequenceKv
    token_ids: Sequence[int]
    layout: PassLayout
    rows: list[int]


def prompt_rows(text: SequenceKv, token_ids: Sequence[int], rows: list[int]) -> NewRows:
    """Tokens that follow the prefix."""
    return NewRows(text, token_ids, CausalLayout(text.table.n_committed, len(token_ids)), rows)


def node_rows(
    text: SequenceKv, token_ids: Sequence[int], parents: Sequence[int], rows: list[int]
) -> tuple[list[int], NewRows]:
    """Nodes that are live from here on, with their ids. Raises BackendError for a parent that is
    none."""
    table = text.table
    n_live = len(table)
    node_ids = table.add(parents, token_ids)
    layout = PassLayout(table.n_committed, table.positions(), table.visible(n_live))
    return node_ids, NewRows(text, token_ids, layout, rows)


def take_rows(new: Sequence[NewRows], n_more: int) -> tuple[np.ndarray, BatchLayout]:
    """Blocks for the new rows, and `n_more` behind the last ones, which fill the pass up.

    Returns where in the pool they lie, int64 [rows], and who sees whom.
    """
    places, parts = [], []
    for one in new:
        n_rows = len(one.token_ids) + (n_more if one is new[-1] else 0)
        first = one.layout.prefix + one.layout.first_new
        places.append(one.text.make_room(first, n_rows))
        parts.append(one.text.part(one.layout))
    batch = BatchLayout(tuple(parts))
    return np.concatenate(places), batch.padded(n_more) if n_more else batch


def rows_of_pass(new: Sequence[NewRows]) -> list[int]:
    """The rows whose logits are wanted, counted over all sequences."""
    found: list[int] = []
    first = 0
    for one in new:
        found += [first + row for row in one.rows]
        first += len(one.token_ids)
    return found
