"""Exponential moving averages, and their state in files."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RECENT, LASTING = 0.9, 2.0 ** (-1 / 32)
"""Decay of a measurement per later one. RECENT averages the last ten steps, so that a change shows
within as many; LASTING the last 45, for values whose single steps scatter by their own size, or
that are seldom measured."""
_MAX_SAVED_VALUE = 1e9
"""Bound on numbers in a file: no time, token count or weight comes near it."""
MAX_SAVED_ENTRIES = 16
"""Maximum entries of a kind in a file: modes of choosing tokens, combinations of drafters,
doublings of the number of sequences in a pass."""


class MovingAverage:
    """Means of one or several numbers that are measured together.

    Args:
        decay: of a measurement's weight per later one.
        expected: values before anything is measured.
        weight: measurements that `expected` counts as; also the maximum weight of restored state.
    """

    def __init__(self, decay: float, expected: Sequence[float], weight: float = 1.0) -> None:
        self._decay, self._weight = decay, weight
        self._sums = weight * np.array([1.0, *expected])

    def add(self, *values: float, n: float = 1) -> None:
        """Add `n` measurements whose means are `values`."""
        self._sums = self._decay**n * self._sums + n * np.array([1.0, *values])

    @property
    def means(self) -> tuple[float, ...]:
        return tuple((self._sums[1:] / self._sums[0]).tolist())

    def state_dict(self) -> list[float]:
        result: list[float] = self._sums.tolist()
        return result

    def load_state_dict(self, state_dict: object) -> None:
        """Restore the output of `state_dict`. Raises ValueError."""
        sums = saved_numbers(state_dict, self._sums.shape)
        if sums[0] <= 0.0:
            raise ValueError("no mean")
        self._sums = sums * min(1.0, self._weight / sums[0])


def saved_numbers(value: object, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Return a value from a file as numbers of this shape. Raises ValueError if it is not that."""
    try:
        numbers = np.array(value, dtype=np.float64)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if numbers.shape != shape or not (np.abs(numbers) < _MAX_SAVED_VALUE).all():
        raise ValueError(f"not {shape} numbers")
    return numbers
