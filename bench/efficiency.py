"""How much of what speculation promises arrives. Pure functions of times of passes.

A pass of N rows that emits L tokens, in the place of L passes of one row, promises a speedup of
L · T(1) / T(N). What drafting, acceptance and the rest of the loop take is what is missing to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from statistics import median
from typing import Any

from specdec.decoding.stats import PassTime, ratio


def pass_times_of(records: Iterable[Mapping[str, Any]]) -> list[PassTime]:
    """Of all passes of `bench.decode.measure.Record`s, also of those read from JSON."""
    return [
        PassTime(int(one[0]), float(one[1]), bool(one[2]))
        for record in records
        for one in record["pass_times"]
    ]


def median_pass_seconds(times: Iterable[PassTime], n_rows: int) -> float | None:
    """Of the passes with exactly so many rows; None without any."""
    seconds = [one.seconds for one in times if one.n_rows == n_rows]
    return median(seconds) if seconds else None


def typical_pass_seconds(times: Iterable[PassTime]) -> float | None:
    """Of passes of several sizes: the mean of the medians of each size, weighted by its passes.

    A stray slow pass does not count, where there are others of its size. None without any pass.
    """
    by_rows: dict[int, list[float]] = defaultdict(list)
    for one in times:
        by_rows[one.n_rows].append(one.seconds)
    n_passes = sum(map(len, by_rows.values()))
    if not n_passes:
        return None
    return sum(len(seconds) * median(seconds) for seconds in by_rows.values()) / n_passes


def efficiency(
    speedup: float, tokens_per_pass: float, seconds_1: float | None, seconds_n: float | None
) -> float | None:
    """speedup / (tokens per pass · T(1) / T(N)); None where a time is not known."""
    if not seconds_1 or not seconds_n:
        return None
    return ratio(speedup, tokens_per_pass * seconds_1 / seconds_n)
