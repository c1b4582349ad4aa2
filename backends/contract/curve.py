"""ComputeCurve: seconds of a computation by its number of tokens, interpolated linearly.

A product for N tokens takes about as long as reading its weights from memory, and from some N on as
long as its arithmetic; in between, and with kernels that differ by N, only a measurement tells.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class ComputeCurve:
    """Measured seconds of a product or a forward pass, by its number of tokens."""

    num_tokens: tuple[int, ...]
    """Numbers of tokens that were timed, ascending from 1."""
    alone: tuple[float, ...]
    """Seconds for each of `num_tokens`, nothing else running."""
    beside_reads: tuple[float, ...]
    """Seconds for each of `num_tokens`, while storage is read."""

    def __post_init__(self) -> None:
        sizes = self.num_tokens
        if not (sizes and len(sizes) == len(self.alone) == len(self.beside_reads)):
            raise ValueError("a compute curve needs a value of each kind for every num_tokens")
        if sizes[0] != 1 or list(sizes) != sorted(set(sizes)):
            raise ValueError(f"the num_tokens of a compute curve ascend from 1, not {sizes}")

    @classmethod
    def linear(cls, fixed_seconds: float, seconds_per_token: float) -> ComputeCurve:
        """Return fixed + per_token * num_tokens, whether storage is read or not."""
        ends = (fixed_seconds + seconds_per_token, fixed_seconds + 2 * seconds_per_token)
        return cls((1, 2), ends, ends)

    def seconds(self, num_tokens: int) -> float:
        """Return the seconds with nothing else running."""
        return _interpolate(self.num_tokens, self.alone, num_tokens)

    def beside_factor(self, num_tokens: int) -> float:
        """Return how many times as long it takes while storage is read, 1 or more."""
        beside = _interpolate(self.num_tokens, self.beside_reads, num_tokens)
        return max(1.0, beside / max(self.seconds(num_tokens), 1e-12))

    @property
    def max_tokens_per_second(self) -> float:
        """Maximum tokens per second over all numbers of tokens, nothing else running."""
        return max(n / max(self.seconds(n), 1e-15) for n in self.num_tokens)

    @property
    def seconds_per_token(self) -> float:
        """Seconds of one more token, at the end of the curve."""
        if len(self.num_tokens) == 1:
            return self.alone[0]
        before, last = self.num_tokens[-2:]
        rise = self.seconds(last) - self.seconds(before)
        if rise <= 0.0:  # disturbed timings: take the mean over all tokens
            return self.seconds(last) / last
        return rise / (last - before)

    def times(self, factor: float) -> ComputeCurve:
        """Return the curve multiplied by `factor`, for example by bytes."""
        alone, beside = ([value * factor for value in kind] for kind in self._kinds)
        return ComputeCurve(self.num_tokens, tuple(alone), tuple(beside))

    def weighted(self, weight: Callable[[int], float]) -> ComputeCurve:
        """Return the curve multiplied by a weight that depends on the number of tokens."""
        alone, beside = (
            tuple(value * weight(n) for n, value in zip(self.num_tokens, kind, strict=True))
            for kind in self._kinds
        )
        return ComputeCurve(self.num_tokens, alone, beside)

    def padded_to(self, min_batch_tokens: int) -> ComputeCurve:
        """Return the curve of passes that are padded to `min_batch_tokens`: fewer take as long."""
        if min_batch_tokens == 1:
            return self
        sizes = tuple(sorted({*self.num_tokens, min_batch_tokens}))
        at = [max(n, min_batch_tokens) for n in sizes]
        alone = tuple(self.seconds(n) for n in at)
        beside = tuple(self.seconds(n) * self.beside_factor(n) for n in at)
        return ComputeCurve(sizes, alone, beside)

    @classmethod
    def mixed(cls, parts: Sequence[tuple[float, ComputeCurve]]) -> ComputeCurve:
        """Return the weighted sum of curves; `parts` are pairs (weight, curve)."""
        sizes = tuple(sorted({n for _, curve in parts for n in curve.num_tokens}))

        def total(kind: int, num_tokens: int) -> float:
            return sum(
                weight * _interpolate(curve.num_tokens, curve._kinds[kind], num_tokens)
                for weight, curve in parts
            )

        alone, beside = (tuple(total(kind, n) for n in sizes) for kind in (0, 1))
        return cls(sizes, alone, beside)

    @property
    def is_slowed_by_reads(self) -> bool:
        """Whether reads were found to slow the computation down."""
        return self.beside_reads != self.alone

    def beside_fewer_reads(self, share: float) -> ComputeCurve:
        """Return the curve beside reads with `share` of the measured bandwidth, 1 at most.

        A byte that is read slows the computation down as much as before. The cost of more
        bandwidth than was measured is not known.
        """
        beside = tuple(
            seconds + share * (other - seconds)
            for seconds, other in zip(self.alone, self.beside_reads, strict=True)
        )
        return ComputeCurve(self.num_tokens, self.alone, beside)

    @property
    def _kinds(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        return self.alone, self.beside_reads


def _interpolate(sizes: Sequence[int], seconds: Sequence[float], num_tokens: int) -> float:
    """Return the linear interpolation of the points, extrapolated after the last one.

    More tokens never take less: a value above a later one was disturbed; the later one is used.
    """
    corrected = [min(seconds[i:]) for i in range(len(sizes))]
    if len(sizes) == 1 or num_tokens <= sizes[0]:
        return corrected[0]
    high = next((i for i, n in enumerate(sizes) if n >= num_tokens), len(sizes) - 1)
    slope = (corrected[high] - corrected[high - 1]) / (sizes[high] - sizes[high - 1])
    on_line = corrected[high - 1] + slope * (num_tokens - sizes[high - 1])
    # `on_line` may be above the next point by rounding.
    return min(on_line, corrected[high]) if num_tokens <= sizes[high] else on_line
