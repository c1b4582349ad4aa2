"""Plan of a grown model's tensor: parts of the source's, zeros and random numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

EXPERTS = ".experts."
"""Part of the name of a routed expert's tensor, before its number."""


class Fill(Enum):
    """Contents of a new tensor outside its patches."""

    ZERO = "zero"
    RANDOM = "random"  # like a trained matrix: normal, small
    GAIN = "gain"  # like a norm weight: near `TensorPlan.gain`


@dataclass(frozen=True)
class Patch:
    """Rectangle copied from a tensor of the source, times `scale`, plus `offset`.

    Rows and columns are half-open; a norm weight counts as one row. `source` None writes random
    values instead; a scale of 0 writes zeros.
    """

    row: int
    column: int
    num_tokens: int
    n_columns: int
    source: str | None = None
    source_row: int = 0
    source_column: int = 0
    scale: float = 1.0
    offset: float = 0.0

    @property
    def end_column(self) -> int:
        return self.column + self.n_columns


@dataclass(frozen=True)
class TensorPlan:
    """Plan of one tensor of the grown model."""

    name: str
    shape: tuple[int, ...]
    fill: Fill
    patches: tuple[Patch, ...] = ()
    gain: float = 1.0
    offset: float = 0.0  # added to gains

    @property
    def n_weights(self) -> int:
        return math.prod(self.shape)

    @property
    def rows_and_columns(self) -> tuple[int, int]:
        """Shape with two dimensions: a vector is one row."""
        return math.prod(self.shape[:-1]), self.shape[-1]
