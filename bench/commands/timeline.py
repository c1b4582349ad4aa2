"""`specdec-bench timeline`: one run as a Gantt chart."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import IgnoreEos, Prompts, UsageMistake, check_writable, sampling_keywords
from bench.prompts.workloads import BUILT_IN, read_prompts
from specdec.cli import options
from specdec.cli.groups import LOAD, Load, Sampling


def timeline_command(
    context: typer.Context,
    load: Load,
    sampling: Sampling,
    picture: Annotated[
        Path | None,
        typer.Option("-o", "--output", metavar="PNG", help="PNG file of the picture."),
    ] = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace", metavar="JSON", help="Write all events for chrome://tracing or Perfetto."
        ),
    ] = None,
    prompts: Prompts = BUILT_IN,
    max_tokens: options.MaxTokens = 32,
    steps: Annotated[
        int,
        typer.Option("--steps", min=0, help="Steps to draw, from the middle; 0 draws all."),
    ] = 3,
    plain: Annotated[bool, typer.Option("--plain", help="Decode without speculation.")] = False,
    ignore_eos: IgnoreEos = False,
) -> None:
    """Draw one run as a Gantt chart: reads, target layers, drafting, acceptance."""
    from bench.timeline.run import run_timeline

    if picture is None and trace is None:
        raise UsageMistake("nowhere to draw: give -o PICTURE.png, --trace EVENTS.json or both")
    for option, path in (("--output", picture), ("--trace", trace)):
        if path is not None:
            check_writable(option, path)
    lines = run_timeline(
        load.keywords(LOAD),
        read_prompts(prompts, 1)[0],
        {**sampling_keywords(max_tokens, ignore_eos, sampling), "speculative": not plain},
        picture,
        trace,
        steps,
        ["specdec-bench", *context.obj.argv],
    )
    typer.echo("\n".join(lines))
