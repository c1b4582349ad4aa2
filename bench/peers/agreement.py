"""Do two runs of `specdec-bench peers` agree in their ratios?

    python -m bench.peers.agreement FIRST.json AGAIN.json --within 15

How far a program comes within its time differs from run to run, and ratios over other tokens
compare texts. So each pair is taken over the places of the prompts' texts that both programs came
to in both runs. Prints every pair's ratio in both, and exits with 1 where one is off by more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.figures import describe_ratio, seconds_by_position
from bench.options import OutputFile, check_writable
from bench.peers.compare import label
from bench.process.results import PEERS, ResultsError, read_results, write_json
from specdec.cli.errors import run_app

Seconds = dict[tuple[str, int], float]
"""(prompt, position in the text) -> of this token."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


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
        places = set.intersection(*(set(run[one]) for run in runs for one in (name, other)))
        seconds = [sum(run[one][at] for at in places) for run in runs for one in (other, name)]
        if all(seconds):
            n_prompts = len({prompt for prompt, _ in places})
            found, repeated = seconds[0] / seconds[1], seconds[2] / seconds[3]
            yield Agreement(name, other, found, repeated, n_prompts, len(places))


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


@app.command()
def main(
    first: Annotated[Path, typer.Argument(help="JSON of specdec-bench peers.")],
    again: Annotated[Path, typer.Argument(help="JSON of the same command, run again.")],
    within: Annotated[
        float, typer.Option("--within", min=0.0, help="Percent that a ratio may differ by.")
    ] = 15.0,
    output_file: OutputFile = None,
) -> None:
    """Compare the ratios of two runs over the tokens of both."""
    check_writable("--output-file", output_file)
    found = list(agreements(_read(first), _read(again)))
    if not found:
        raise ResultsError(f"{first} and {again} have no pair of programs with the same tokens")
    width = max(len(f"{one.name} / {one.other}") for one in found)
    for one in found:
        pair = f"{one.name} / {one.other}"
        typer.echo(
            f"{pair:<{width}} {one.first:8.2f} {one.again:8.2f} {one.difference:7.1%} "
            f"({describe_ratio(vars(one))})"
        )
    largest = max(found, key=lambda one: one.difference)
    typer.echo(f"largest difference {largest.difference:.1%}: {largest.name} / {largest.other}")
    if output_file is not None:
        pairs = [{**vars(one), "difference": one.difference} for one in found]
        write_json({"agreement": pairs, "largest": largest.difference}, output_file)
    raise typer.Exit(int(largest.difference > within / 100))


def _read(path: Path) -> Mapping[str, Any]:
    results = read_results(path)
    if results.kind != PEERS:
        raise ResultsError(f"{path} holds results of {results.kind}: give JSON of peers")
    return results.value


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.peers.agreement", sys.argv[1:]))
