"""Seconds of something that computes, by its rows: what was timed, and straight lines between.

A product with N rows takes about as long as reading its weights from memory, and from some N on as
long as its arithmetic; in between, and with kernels that differ by N, only a measurement tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeCurve:
    """Seconds of something that computes, by its rows: a product, or all of a pass."""

    rows: tuple[int, ...]
    """Ascending, the first is 1."""
    alone: tuple[float, ...]
    """Seconds with so many rows, nothing else running."""
    beside_reads: tuple[float, ...]
    """The same while storage is read."""

    def __post_init__(self) -> None:
        if not (self.rows and len(self.rows) == len(self.alone) == len(self.beside_reads)):
            raise ValueError("a compute curve needs a figure of each kind for every number of rows")
        if self.rows[0] != 1 or list(self.rows) != sorted(set(self.rows)):
            raise ValueError(f"the rows of a compute curve ascend from 1, not {self.rows}")

    @classmethod
    def linear(cls, fixed_seconds: float, seconds_per_row: float) -> ComputeCurve:
        """fixed + per_row * rows, whether storage is read or not."""
        ends = (fixed_seconds + seconds_per_row, fixed_seconds + 2 * seconds_per_row)
        return cls((1, 2), ends, ends)

    def seconds(self, n_rows: int) -> float:
        """Alone."""
        return _interpolate(self.rows, self.alone, n_rows)

    def beside_factor(self, n_rows: int) -> float:
        """How many times as long it takes while storage is read, 1 or more."""
        beside = _interpolate(self.rows, self.beside_reads, n_rows)
        return max(1.0, beside / max(self.seconds(n_rows), 1e-12))

    @property
    def most_rows_per_second(self) -> float:
        """Alone, with as many rows at once as are the fastest."""
        return max(n / max(self.seconds(n), 1e-15) for n in self.rows)

    @property
    def seconds_of_a_row(self) -> float:
        """Of a further row, where rows are many."""
        if len(self.rows) == 1:
            return self.alone[0]
        last = self.rows[-1]
        rise = self.seconds(last) - self.seconds(self.rows[-2])
        if rise <= 0.0:  # timings that were disturbed tell only how long all of the rows take
            return self.seconds(last) / last
        return rise / (last - self.rows[-2])

    def times(self, factor: float) -> ComputeCurve:
        """So many times as much to compute, or seconds for bytes."""
        alone, beside = ([value * factor for value in kind] for kind in self._kinds)
        return ComputeCurve(self.rows, tuple(alone), tuple(beside))

    def filled_up(self, n_least_rows: int) -> ComputeCurve:
        """Of passes that are filled up to so many rows: fewer take as long."""
        if n_least_rows == 1:
            return self
        rows = tuple(sorted({*self.rows, n_least_rows}))
        at = [max(n, n_least_rows) for n in rows]
        alone = tuple(self.seconds(n) for n in at)
        beside = tuple(self.seconds(n) * self.beside_factor(n) for n in at)
        return ComputeCurve(rows, alone, beside)

    @classmethod
    def mixed(cls, parts: Sequence[tuple[float, ComputeCurve]]) -> ComputeCurve:
        """Of work that is made up of `parts`: (how many times, curve)."""
        rows = tuple(sorted({n for _, curve in parts for n in curve.rows}))

        def total(kind: int, n_rows: int) -> float:
            return sum(
                times * _interpolate(curve.rows, curve._kinds[kind], n_rows)
                for times, curve in parts
            )

        alone, beside = (tuple(total(kind, n) for n in rows) for kind in (0, 1))
        return cls(rows, alone, beside)

    @property
    def is_slowed(self) -> bool:
        """Whether reads were found to cost the arithmetic anything."""
        return self.beside_reads != self.alone

    def beside_fewer_reads(self, share: float) -> ComputeCurve:
        """Beside reads with `share` of the bandwidth that was measured: a byte read costs the
        arithmetic as much as before. What more bandwidth would cost is not known: 1 at most."""
        beside = tuple(
            one + share * (other - one)
            for one, other in zip(self.alone, self.beside_reads, strict=True)
        )
        return ComputeCurve(self.rows, self.alone, beside)

    @property
    def _kinds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.alone, self.beside_reads


def _interpolate(rows: Sequence[int], seconds: Sequence[float], n_rows: int) -> float:
    """On straight lines through the points; the last one goes on.

    More rows never take less: a figure above a later one was disturbed, and is taken for that one.
    """
    mended = [min(seconds[i:]) for i in range(len(rows))]
    if len(rows) == 1 or n_rows <= rows[0]:
        return mended[0]
    high = next((i for i, n in enumerate(rows) if n >= n_rows), len(rows) - 1)
    slope = (mended[high] - mended[high - 1]) / (rows[high] - rows[high - 1])
    on_line = mended[high - 1] + slope * (n_rows - rows[high - 1])
    return min(on_line, mended[high]) if n_rows <= rows[high] else on_line  # it may be rounded up
