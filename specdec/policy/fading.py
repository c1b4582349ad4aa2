"""Means in which older measurements fade, and what of them another process may begin with."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

RECENT, LASTING = 0.9, 2.0 ** (-1 / 32)
"""Weight of a measurement after the next one: of the last ten steps, so that a change is followed
within as many; and of the last 45, where single steps scatter by their own size, or where nothing
newer is known."""
_LARGEST_KEPT = 1e9
"""Of a number in a file: no second, token or count comes near it."""
MAX_RETAINED = 16
"""Entries of a kind in a file: ways of choosing tokens, combinations of drafters, doublings of the
number of sequences in a pass."""


class FadingMean:
    """Means of one or several numbers that are measured together.

    Args:
        fade: weight of a measurement after the next one.
        expected: before anything is measured.
        weight: measurements that this counts as; so does what another process saw.
    """

    def __init__(self, fade: float, expected: Sequence[float], weight: float = 1.0) -> None:
        self._fade, self._weight = fade, weight
        self._sums = weight * np.array([1.0, *expected])

    def add(self, *values: float, n: int = 1) -> None:
        """So many measurements, of which these are the means."""
        self._sums = self._fade**n * self._sums + n * np.array([1.0, *values])

    @property
    def means(self) -> tuple[float, ...]:
        return tuple((self._sums[1:] / self._sums[0]).tolist())

    def cached(self) -> list[float]:
        result: list[float] = self._sums.tolist()
        return result

    def restore(self, cached: object) -> None:
        """Raises ValueError."""
        sums = saved_numbers(cached, self._sums.shape)
        if sums[0] <= 0.0:
            raise ValueError("no mean")
        self._sums = sums * min(1.0, self._weight / sums[0])


def saved_numbers(value: object, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """What a file holds, as numbers of this shape. Raises ValueError where it is anything else."""
    try:
        numbers = np.array(value, dtype=np.float64)
    except TypeError as error:
        raise ValueError(str(error)) from error
    if numbers.shape != shape or not (np.abs(numbers) < _LARGEST_KEPT).all():
        raise ValueError(f"not {shape} numbers")
    return numbers
