"""Agreement of the ratios of two runs of `specdec-bench peers`: `specdec-bench report --within`.

The number of tokens that a program decodes within its time differs from run to run, and ratios
over different tokens are not comparable. So each pair of programs is compared over the tokens that
both decoded in both runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from bench.peers.compare import label
from bench.results import seconds_by_position

Seconds = dict[tuple[str, int], float]
"""(prompt, position in the output) -> seconds of this token."""


@dataclass(frozen=True)
class Agreement:
    """Ratio of the speed of `name` to that of `other`, in two runs."""

    name: str
    other: str
    first: float
    again: float
    n_prompts: int
    n_tokens: int

    @property
    def difference(self) -> float:
        """Relative excess of the larger ratio over the smaller one, independent of the order of the
        runs and of the programs."""
        return max(self.first, self.again) / min(self.first, self.again) - 1


def agreements(first: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[Agreement]:
    """Yield every pair of programs that decoded the same tokens in both results of `peers`."""
    runs = _seconds(first), _seconds(again)
    names = [name for name in runs[0] if name in runs[1]]
    for other, name in combinations(names, 2):  # specdec's own rows are the last ones
        places = set.intersection(*(set(run[item]) for run in runs for item in (name, other)))
        seconds = [sum(run[item][at] for at in places) for run in runs for item in (other, name)]
        if all(seconds):
            n_prompts = len({prompt for prompt, _ in places})
            result, repeated = seconds[0] / seconds[1], seconds[2] / seconds[3]
            yield Agreement(name, other, result, repeated, n_prompts, len(places))


def _seconds(result: Mapping[str, Any]) -> dict[str, Seconds]:
    rows = result["peers"]
    return {
        label(row, rows): {
            (record["prompt"], position): seconds
            for record in row["prompts"]
            for position, seconds in seconds_by_position(record).items()
        }
        for row in rows
        if row.get("prompts")
    }
