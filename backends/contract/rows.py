"""Logits of a pass, wherever they are: an array in host memory, or rows on a device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

import numpy as np


class LogitRows(Protocol):
    """Logits float32 [n, vocab] that may be brought to the host a row at a time.

    A numpy array is one. Rows on a device are brought each time they are asked for: who needs one
    again keeps it, and who needs all of them takes `numpy.asarray`.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """(n, vocab)"""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> np.ndarray:
        """Row `index`, float32 [vocab], in host memory."""

    def __iter__(self) -> Iterator[np.ndarray]: ...

    def __array__(self, dtype: Any = None, /, *, copy: bool | None = None) -> np.ndarray:
        """All rows, in host memory."""
