"""A target that remembers: the prompt's last row for further sequences, log-probabilities of rows.

Both come from the contract of a backend alone: `prefill_from` gives the row that the first token is
chosen from, and of an `extend` the rows of the nodes that are committed are those that the next
tokens were chosen from.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from backends.contract.backend import Backend
from specdec.sampling.logprobs import TopLogprobs, log_probs_of, top_logprobs


class WatchedTarget:
    """Stands in for a backend during one generation; what is not here is the backend's own.

    Args:
        n_tokens: of the vocabulary; the rest of a row is padding.
        n_top: likeliest tokens to note for each emitted token; 0 notes none.
    """

    def __init__(self, backend: Backend, n_tokens: int, n_top: int) -> None:
        self._backend = backend
        self._n_tokens, self._n_top = n_tokens, n_top
        self._prompt: list[int] = []
        self._prompt_row: NDArray[np.float32] | None = None
        self._rows: dict[int, NDArray[np.float32]] = {}
        self.top_logprobs: list[TopLogprobs] = []
        """One for each token that was chosen since the last `prefill_from`."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def prefill_from(self, token_ids: Sequence[int]) -> tuple[int, NDArray[np.float32]]:
        """Backend.prefill_from; the prompt of the call before is taken up without a pass."""
        self._rows = {}
        ids = list(token_ids)
        n_kept = len(ids)
        if self._prompt_row is None or ids != self._prompt:
            n_kept, self._prompt_row = self._backend.prefill_from(ids)
            self._prompt = ids
        else:
            self._backend.rollback(n_kept)
        self.top_logprobs = []
        self._note(self._prompt_row)
        return n_kept, self._prompt_row

    def extend(
        self, token_ids: Sequence[int], parents: Sequence[int], rows: Sequence[int] | None = None
    ) -> tuple[list[int], NDArray[np.float32]]:
        node_ids, logits = self._backend.extend(token_ids, parents, rows)
        scored = node_ids if rows is None else [node_ids[row] for row in rows]
        self._rows.update(zip(scored, logits, strict=True))
        return node_ids, logits

    def commit(self, path: Sequence[int], keep: Collection[int] = ()) -> None:
        self._backend.commit(path, keep)
        if self._n_top:
            for node in path:
                self._note(self._rows[node])
        if not keep:
            self._rows = {}

    def _note(self, row: NDArray[np.float32]) -> None:
        if self._n_top:
            log_p = log_probs_of(row[: self._n_tokens])
            self.top_logprobs.append(top_logprobs(log_p, self._n_top))
