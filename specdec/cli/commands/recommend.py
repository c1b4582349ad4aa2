"""`specdec recommend`: well-known models that run within a memory budget."""

from __future__ import annotations

from typing import Annotated

import typer

from offload.units import UnitError, parse_bytes
from specdec.cli import options
from specdec.cli.output import write_json, write_text
from specdec.cli.progress import waiting

Budget = Annotated[
    str,
    typer.Option("--memory-budget", metavar="BYTES", help="Memory that a run may take, as 12GiB."),
]
Device = Annotated[
    str, typer.Option("--on", metavar="DEVICE", help="Device to predict the speed for.")
]
Table = Annotated[
    bool, typer.Option("--markdown", help="Print the table of README.md, for several budgets.")
]


def recommend(
    memory_budget: Budget = "auto",
    on: Device = "laptop",
    markdown: Table = False,
    json: options.Json = False,
    debug: options.Debug = False,
) -> None:
    """List well-known models that run within a memory budget, streamed where they are larger, and
    their predicted speed."""
    from specdec.planning.memory.base import budget_of_run
    from specdec.planning.what_if import recommend as advice

    if markdown and json:
        raise options.OptionError("--markdown and --json are two formats: give one of them")
    if markdown:
        with waiting("planning for eight machines"):
            table = advice.markdown_table()
        write_text(table)
        return
    if memory_budget == "auto":
        n_bytes = budget_of_run(memory_budget)[0]
    else:  # that of another machine may be larger than this one's memory
        n_bytes = _parsed(memory_budget)
    planned = ""

    def report(name: str) -> None:
        nonlocal planned
        planned = name

    with waiting("planning", lambda: planned):
        items = advice.recommend(n_bytes, on, report)
    if not items:
        raise options.OptionError(advice.refusal(n_bytes, on))
    if json:
        write_json({"memory_bytes": n_bytes, "device": on, **advice.to_dict(items)})
    else:
        write_text("\n".join(advice.lines(items, n_bytes, on)) + "\n")


def _parsed(memory_budget: str) -> int:
    try:
        return parse_bytes(memory_budget)
    except UnitError as error:
        raise options.OptionError(f"--memory-budget: {error}") from error
