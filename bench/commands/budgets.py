"""`specdec-bench budgets`: the same prompts at several memory budgets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import NPrompts, OutputFile, Prompts, check_writable, sampling_keywords
from bench.prompts.workloads import BUILT_IN, read_prompts
from specdec.cli import options
from specdec.cli.groups import LoadOptions, SamplingOptions


def budgets_command(
    context: typer.Context,
    load: LoadOptions,
    sampling: SamplingOptions,
    sizes: Annotated[
        str, typer.Option("--budgets", metavar="SIZE,SIZE,...", help="Memory budgets to try.")
    ],
    prompts: Prompts = BUILT_IN,
    n_prompts: NPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    reference: Annotated[
        Path | None,
        typer.Option("--reference", help="Report of `speedup` whose texts these must equal."),
    ] = None,
    output_file: OutputFile = None,
    debug: options.Debug = False,
) -> None:
    """The same prompts at several budgets: nothing killed, and the same texts?"""
    from bench.decode.budgets import format_rows, run_budgets
    from bench.process.results import write_json
    from bench.prompts.lengths import refuse_long
    from offload.units import parse_bytes
    from specdec.models.names import resolve_model

    check_writable("--output-file", output_file)
    names = sizes.split(",")
    for name in names:
        parse_bytes(name)
    path, chosen = resolve_model(load.model), read_prompts(prompts, n_prompts)
    refuse_long(chosen, path, load.ctx_size)
    result = run_budgets(
        {**load.as_keywords(), "model": str(path)},
        chosen,
        sampling_keywords(max_tokens, False, sampling),
        names,
        ["specdec-bench", *context.obj.argv],
        enforce=enforce,
        reference=reference,
        save=lambda found: None if output_file is None else write_json(found, output_file),
    )
    typer.echo(format_rows(result))
