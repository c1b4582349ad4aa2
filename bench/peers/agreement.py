"""Do two runs of `specdec-bench peers` agree in their ratios? `specdec-bench report --within`.

How far a program comes within its time differs from run to run, and ratios over other tokens
compare sequences. So each pair is taken over the places of the prompts' sequences that both programs came
to in both runs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from bench.peers.compare import label
from bench.results import seconds_by_position

Seconds = dict[tuple[str, int], float]
"""(prompt, position in the text) -> of this token."""


@dataclass(frozen=True)
class Agreement:
    """Speed of `name` over that of `other`, in two runs."""

    name: str
    other: str
    first: float
    again: float
    n_prompts: int
    n_tokens: int

    @property
    def difference(self) -> float:
        """By how much the larger ratio exceeds the smaller one, as a fraction: the same whichever
        run is the first, and whichever program is above the line."""
        return max(self.first, self.again) / min(self.first, self.again) - 1


def agreements(first: Mapping[str, Any], again: Mapping[str, Any]) -> Iterator[Agreement]:
    """Every pair of programs that decoded the same tokens in both results of `peers`."""
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
