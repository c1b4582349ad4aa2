"""PassRows: the new tokens of all sequences in a pass, as llama.cpp's batches."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from backends.contract.store import NewTokens, PassOutput
from backends.llama.batch import Batch
from backends.llama.cache import CellStore


class _RequestedRows:
    """Tokens of a pass whose logits (or hidden states) each sequence asks for.

    Args:
        of_sequences: for each sequence, indices among all tokens of the pass, in any order.
    """

    def __init__(self, of_sequences: Sequence[np.ndarray]) -> None:
        self._of_sequences = of_sequences
        self.rows = np.unique(np.concatenate(of_sequences))

    def within(self, part: slice) -> np.ndarray:
        """Return the indices within a part of the tokens, ascending."""
        return self.rows[(self.rows >= part.start) & (self.rows < part.stop)] - part.start

    def split(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return each sequence's rows, from those of the parts, which have each row once."""
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        places = [np.searchsorted(self.rows, rows) for rows in self._of_sequences]
        if len(places) == 1 and np.array_equal(places[0], np.arange(len(whole))):
            return [whole]  # the usual case: no copy
        return [whole[rows] for rows in places]


class PassRows:
    """The new tokens of all sequences, one sequence after the other."""

    def __init__(self, new: Sequence[NewTokens[CellStore]]) -> None:
        self.token_ids = [token for tokens in new for token in tokens.token_ids]
        self.sequences = [tokens.store for tokens in new for _ in tokens.token_ids]
        self.positions = [p for tokens in new for p in _positions(tokens).tolist()]
        self._sequences = [names for tokens in new for names in _sequences(tokens)]
        ends = np.cumsum([len(tokens.token_ids) for tokens in new])
        starts = [0, *ends[:-1].tolist()]
        self._logits, self._states = (
            _RequestedRows(
                [
                    start + np.array(at, dtype=np.int64)
                    for start, at in zip(starts, rows, strict=True)
                ]
            )
            for rows in zip(*((x.logits_at, x.hidden_states_at) for x in new), strict=True)
        )
        given = [tokens.hidden_states for tokens in new if tokens.hidden_states is not None]
        self._hidden_states = np.concatenate(given) if given else None

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def n_outputs(self) -> int:
        """Number of rows of logits to return."""
        return len(self._logits.rows)

    def batches(
        self, max_num_tokens: int, min_count: int, scratch: int
    ) -> Iterator[tuple[slice, Batch]]:
        """Yield batches of at most `max_num_tokens`, and which of the tokens each has."""
        for start in range(0, len(self), max_num_tokens):
            part = slice(start, start + max_num_tokens)
            batch = Batch(
                self.token_ids[part],
                self.positions[part],
                self._sequences[part],
                self._logits.within(part),
                min_count,
                scratch,
                state_rows=self._states.within(part),
                hidden_states=None if self._hidden_states is None else self._hidden_states[part],
            )
            yield part, batch

    def of_sequences(self, outputs: Sequence[PassOutput]) -> list[PassOutput]:
        """Return each sequence's results, from those of the batches."""
        logits = self._logits.split([output.logits for output in outputs])
        if not len(self._states.rows):
            return [PassOutput(rows) for rows in logits]
        states = self._states.split([x.hidden_states for x in outputs if len(x.hidden_states)])
        return list(map(PassOutput, logits, states))


def _positions(new: NewTokens[CellStore]) -> np.ndarray:
    table = new.store.table
    if new.are_nodes:
        return table.positions(new.n_live_before)
    return table.n_committed + np.arange(len(new.token_ids))


def _sequences(new: NewTokens[CellStore]) -> Sequence[list[int]]:
    return new.store.new if new.are_nodes else [new.store.in_use] * len(new.token_ids)
