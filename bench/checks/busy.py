"""Decoding speed beside other programs that compute.

    python -m bench.checks.busy -m pair:target --loops 0,1,2,4

Loads the model once and decodes for some seconds beside each number of busy loops, in turns. The
fair share of a process with a thread for each of n processors beside k loops is n / (n + k) of its
idle speed. Prints a table, then one JSON line with provenance. The environment decides how threads
wait (GOMP_SPINCOUNT, OMP_WAIT_POLICY), so settings are compared by running this once for each.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.process.provenance import collect
from offload.process.cpus import usable_cpus
from specdec.cli.errors import run_app

if TYPE_CHECKING:
    from specdec.api import LLM

PROMPT = "def fibonacci(n):\n    "
REST_SECONDS = 1.5
"""Time for the scheduler to spread the loops, and for the load to be noticed."""

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@contextmanager
def busy_loops(n_loops: int) -> Iterator[None]:
    """Run programs that compute and never wait, for the time of the block."""
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(n_loops)]
    try:
        time.sleep(REST_SECONDS)
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def tokens_per_second(llm: LLM, max_tokens: int, seconds: float) -> float:
    """Return the decode speed, measured over about so many seconds."""
    n_tokens, decode_seconds, began = 0, 0.0, time.monotonic()
    while time.monotonic() - began < seconds:
        stats = llm.generate(PROMPT, max_tokens=max_tokens, ignore_eos=True).stats
        n_tokens += stats.generated_tokens - 1
        decode_seconds += stats.decode_seconds
    return n_tokens / decode_seconds


@app.command()
def main(
    model: Annotated[str, typer.Option("-m", "--model")],
    draft_model: Annotated[str | None, typer.Option("-md", "--draft-model")] = None,
    memory_budget: Annotated[str | None, typer.Option("--memory-budget")] = None,
    loops: Annotated[str, typer.Option("--loops", help="Numbers of busy loops.")] = "0,1,2,4",
    max_tokens: Annotated[int, typer.Option("-n", "--max-tokens")] = 64,
    seconds: Annotated[float, typer.Option("--seconds", help="Seconds of each measurement.")] = 4.0,
    n_turns: Annotated[int, typer.Option("--turns", help="Runs, whose median counts.")] = 3,
) -> None:
    """Measure tokens per second beside busy loops."""
    import specdec

    load: dict[str, Any] = {"model": model, "draft_model": draft_model, "ctx_size": 512}
    load |= {"memory_budget": memory_budget} if memory_budget else {}
    load |= {} if draft_model else {"spec_type": "none"}
    numbers = [int(number) for number in loops.split(",")]
    speeds: dict[int, list[float]] = {number: [] for number in numbers}
    with specdec.load(**load) as llm:
        tokens_per_second(llm, max_tokens, 1.0)
        for _ in range(n_turns):
            for number in numbers:
                with busy_loops(number):
                    speeds[number].append(tokens_per_second(llm, max_tokens, seconds))
    n_cpus = usable_cpus()
    medians = {number: statistics.median(values) for number, values in speeds.items()}
    typer.echo("loops  tokens/s  of the fair share")
    for number, value in medians.items():
        fair = medians.get(0, 0.0) * n_cpus / (n_cpus + number)
        typer.echo(f"{number:5}  {value:8.1f}  {value / fair if fair else 0:17.2f}")
    typer.echo(json.dumps({"tokens_per_second": speeds, "load": load, **collect(sys.argv)}))


if __name__ == "__main__":
    sys.exit(run_app(app, "bench.checks.busy", sys.argv[1:]))
