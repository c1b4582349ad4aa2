"""Layout of the new tokens of one pass, and their rows in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import torch

from backends.attention.batch import BatchLayout
from backends.attention.layout import CausalLayout, ContextLayout, PassLayout
from backends.contract.backend import BackendError
from backends.contract.store import NewTokens
from backends.kv.sequence import BlockStore
from backends.recurrent.passes import PassPart, RecurrentPass


def layout_of(new: NewTokens[BlockStore]) -> PassLayout:
    """Return the attention layout of one sequence's new tokens and those that it has."""
    table, n_live = new.store.table, new.n_live_before
    if new.context is not None:
        n_context = new.context.table.n_committed
        if not n_context:
            raise BackendError("a draft head was given a context without tokens")
        return ContextLayout(n_context, len(new.token_ids))
    if not new.are_nodes:
        return CausalLayout(table.n_committed, len(new.token_ids))
    return PassLayout(table.n_committed, table.positions(), table.visible(n_live))


def take_rows(new: Sequence[NewTokens[BlockStore]], n_more: int) -> tuple[np.ndarray, BatchLayout]:
    """Take blocks for the new tokens and `n_more` padding tokens after the last ones.

    Returns their rows in the pool, int64 [tokens], and the attention layout.
    """
    spans = []
    for tokens in new:
        num_tokens = len(tokens.token_ids) + (n_more if tokens is new[-1] else 0)
        spans.append((tokens.store.table.n_committed + tokens.n_live_before, num_tokens))
    new[0].store.prepare([tokens.store for tokens in new])
    # New blocks come last, since they may be cold: those that change need memory. Nodes' blocks
    # are taken before those of prompts, so that they stay in memory for the commit.
    for tokens, (first, _) in zip(new, spans, strict=True):
        tokens.store.make_writable(first)
    for tokens, span in sorted(zip(new, spans, strict=True), key=lambda x: not x[0].are_nodes):
        tokens.store.take_blocks(*span)
    # Only now: taking a block may have moved others.
    places, parts = [], []
    for tokens, span in zip(new, spans, strict=True):
        places.append(tokens.store.rows(*span))
        parts.append((tokens.context or tokens.store).part(layout_of(tokens)))
    batch = BatchLayout(tuple(parts))
    return np.concatenate(places), batch.padded(n_more) if n_more else batch


def rows_of_pass(new: Sequence[NewTokens[BlockStore]]) -> list[int]:
    """Return the tokens to return logits of, counted over all sequences."""
    return _rows([tokens.logits_at for tokens in new], new)


def hidden_rows_of_pass(new: Sequence[NewTokens[BlockStore]]) -> list[int]:
    """Return the tokens to return hidden states of, counted over all sequences."""
    return _rows([tokens.hidden_states_at for tokens in new], new)


def scored_rows_of_pass(new: Sequence[NewTokens[BlockStore]]) -> list[int]:
    """Return the tokens whose logits are scored, counted over all sequences."""
    return _rows([tokens.scored_at for tokens in new], new)


def _rows(places: Sequence[Sequence[int]], new: Sequence[NewTokens[BlockStore]]) -> list[int]:
    """Return places within each sequence's new tokens as places in the pass."""
    starts = accumulate((len(tokens.token_ids) for tokens in new), initial=0)
    return [start + place for start, own in zip(starts, places, strict=False) for place in own]


def given_hidden_states(
    new: Sequence[NewTokens[BlockStore]], n_more: int, dtype: torch.dtype, device: torch.device
) -> torch.Tensor | None:
    """Return the hidden states [tokens, width] that a draft head takes with a pass's tokens and
    `n_more` padding tokens; None for other models."""
    given = [tokens.hidden_states for tokens in new if tokens.hidden_states is not None]
    if not given:
        return None
    if len(given) < len(new):
        raise BackendError("inputs with and without hidden states cannot share a pass")
    rows = np.concatenate([*given, np.repeat(given[-1][-1:], n_more, axis=0)])
    return torch.from_numpy(rows).to(device, dtype)


def recurrent_pass(new: Sequence[NewTokens[BlockStore]]) -> RecurrentPass:
    """Return the recurrences of a pass over these tokens."""
    parts = []
    for tokens in new:
        store = tokens.store
        assert store.recurrent is not None, "the model has recurrent layers"
        parents = store.table.rows_above() if tokens.are_nodes else None
        parts.append(
            PassPart(store.recurrent, store.table.n_committed, parents, len(tokens.token_ids))
        )
    return RecurrentPass(parts)
