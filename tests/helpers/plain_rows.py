"""The row of logits that each sequence of tokens has alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from alone import own

from backends.contract.backend import PREFIX, Backend


class Plain:
    """Rows of logits by one token per pass, cached by their tokens."""

    def __init__(self, backend: Backend) -> None:
        self.backend = backend
        self.rows: dict[tuple[int, ...], np.ndarray] = {}

    def row(self, token_ids: Sequence[int]) -> np.ndarray:
        backend, token_ids = self.backend, tuple(token_ids)
        if token_ids not in self.rows:
            n_shared = next(
                n for n in range(len(token_ids), -1, -1) if self.is_committed(token_ids[:n])
            )
            own(backend).rollback(min(n_shared, len(token_ids) - 1))
            for n in range(own(backend).n_committed, len(token_ids)):
                ids, rows = own(backend).extend([token_ids[n]], [PREFIX])
                own(backend).commit(ids)
                self.rows[token_ids[: n + 1]] = rows[0]
        return self.rows[token_ids]

    def is_committed(self, token_ids: tuple[int, ...]) -> bool:
        return tuple(own(self.backend).committed_ids[: len(token_ids)]) == token_ids


class Fresh(Plain):
    """Rows by a pass over the whole sequence."""

    def row(self, token_ids: Sequence[int]) -> np.ndarray:
        token_ids = tuple(token_ids)
        if token_ids not in self.rows:
            own(self.backend).rollback(0)
            self.rows[token_ids] = own(self.backend).prefill(token_ids)
        return self.rows[token_ids]
