"""`specdec-bench policy`: the automatic size of trees against fixed ones."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.options import IgnoreEos, NPrompts, OutputFile, Prompts, sampling_keywords
from bench.workloads import BUILT_IN, read_prompts
from specdec import cli_options as options
from specdec.cli_groups import LoadOptions, SamplingOptions


def policy_command(
    context: typer.Context,
    load: LoadOptions,
    sampling: SamplingOptions,
    sizes: Annotated[
        str,
        typer.Option(
            "--sizes",
            metavar="NxD,NxD,...",
            help="Fixed trees: draft tokens x levels[:on|off] (drafting ahead).",
        ),
    ] = "2x2,4x4,8x4,8x8,16x8,32x8,64x16",
    with_plain: Annotated[
        bool,
        typer.Option("--plain/--no-plain", help="Also plain decoding, which may take long."),
    ] = True,
    prompts: Prompts = BUILT_IN,
    n_prompts: NPrompts = 2,
    max_tokens: options.MaxTokens = 64,
    ignore_eos: IgnoreEos = False,
    output_file: OutputFile = None,
    debug: options.Debug = False,
) -> None:
    """The automatic size of trees against fixed ones, in one process."""
    from bench.policy_sweep import format_sweep, parse_sizes, run_sweep
    from bench.results import write_json
    from specdec.models import resolve_model

    result = run_sweep(
        {**load.as_keywords(), "model": str(resolve_model(load.model))},
        read_prompts(prompts, n_prompts),
        sampling_keywords(max_tokens, ignore_eos, sampling),
        parse_sizes(sizes),
        with_plain,
        ["specdec-bench", *context.obj.argv],
    )
    if output_file is not None:
        write_json(result, output_file)
    typer.echo(format_sweep(result))
