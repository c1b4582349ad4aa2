"""`specdec-bench demo`, which `specdec demo` runs: the speedup on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from bench.commands.shared import show


def demo_command(
    size: Annotated[str, typer.Option("--size", help="Size of the grown target.")] = "auto",
    memory_budget: Annotated[
        str, typer.Option("--memory-budget", help="At most half the target.")
    ] = "auto",
    directory: Annotated[
        Path | None,
        typer.Option("--dir", help="Folder for the target.", show_default="the cache folder"),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the grown target.")] = False,
    format: Annotated[
        str, typer.Option("--format", metavar="hf|gguf", help="Format of the target and draft.")
    ] = "hf",
) -> None:
    """Compare plain and speculative decoding of a grown target of at least twice its budget."""
    from bench.checks.equal_outputs import check_equal_outputs, percent_equal
    from bench.demo import next_steps, run_demo, text_of_first_prompt
    from bench.process.results import SPEEDUP
    from bench.report.tables import VERDICT_WIDTH
    from bench.table import labelled

    started = time.monotonic()
    result = run_demo(
        size=size, memory_budget=memory_budget, directory=directory, keep=keep, format=format
    )
    typer.echo(text_of_first_prompt(result))
    show(SPEEDUP, result, "table", None)
    equal, seconds = percent_equal(result["token_match"]), time.monotonic() - started
    summary = f"tokens equal {equal}, {seconds:.0f} s in all"
    typer.echo(labelled([("demo", summary)], VERDICT_WIDTH)[0])
    check_equal_outputs(result["records"])
    typer.echo("\n" + next_steps(format))
