"""StateBuffer: the target's hidden states that a draft head has not used yet, by position."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from backends.contract.source import MAX_PROMPT_STATES


class StateBuffer:
    """Hidden states [n, width] of consecutive tokens of a context.

    Attributes:
        start: position of the first of these tokens.
    """

    def __init__(self) -> None:
        self.start = 0
        self._states: list[NDArray[np.float32]] = []

    def __len__(self) -> int:
        return len(self._states)

    @property
    def end(self) -> int:
        """Position after the last of these tokens."""
        return self.start + len(self._states)

    def add(self, position: int, states: NDArray[np.float32]) -> None:
        """Append states [n, width] of tokens from `position` on; begin anew after a gap. Of more
        than MAX_PROMPT_STATES, which steps without the draft leave, the last ones stay."""
        if position != self.end:
            self._states, self.start = [], position
        self._states += list(states)
        self.keep_last(MAX_PROMPT_STATES)

    def stacked(self) -> NDArray[np.float32]:
        """Return all states, [n, width]."""
        return np.stack(self._states)

    def keep_last(self, n_states: int) -> None:
        """Drop all but the last `n_states`."""
        n_dropped = max(0, len(self._states) - n_states)
        del self._states[:n_dropped]
        self.start += n_dropped

    def mark_used(self) -> None:
        """Drop all states: the head has taken them."""
        self.start, self._states = self.end, []

    def clear(self) -> None:
        """Forget the context."""
        self.start, self._states = 0, []
