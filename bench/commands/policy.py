"""`specdec-bench policy`: the automatic size of trees against fixed ones."""

from __future__ import annotations

from typing import Annotated

import typer

from bench.options import (
    IgnoreEos,
    Log,
    NPrompts,
    OutputFile,
    Prompts,
    UsageMistake,
    check_writable,
    sampling_keywords,
)
from bench.prompts.workloads import BUILT_IN, read_prompts
from specdec.cli import options
from specdec.cli.groups import LOAD, Load, Sampling


def policy_command(
    context: typer.Context,
    load: Load,
    sampling: Sampling,
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
    enforce: options.Enforce = False,
    ignore_eos: IgnoreEos = False,
    output_file: OutputFile = None,
    log: Log = None,
) -> None:
    """The automatic size of trees against fixed ones, in one process."""
    from bench.decode.policy import PolicySpec, parse_sizes, sweep_in_child
    from bench.process.results import POLICY, write_json
    from bench.prompts.lengths import refuse_long
    from bench.report.tables import tables
    from bench.table import text_of
    from specdec.models.names import resolve_model

    if enforce and load.memory_budget == "auto":
        raise UsageMistake("--enforce needs a --memory-budget with a size, e.g. 3.5GiB")
    check_writable("--output-file", output_file)
    check_writable("--log", log)
    path, chosen = resolve_model(load.model), read_prompts(prompts, n_prompts)
    refuse_long(chosen, path, load.ctx_size)
    spec = PolicySpec(
        load={**load.keywords(LOAD), "model": str(path)},
        prompts=tuple(chosen),
        sampling=sampling_keywords(max_tokens, ignore_eos, sampling),
        sizes=parse_sizes(sizes),
        with_plain=with_plain,
        log=str(log.resolve()) if log else None,
    )
    result = sweep_in_child(spec, ["specdec-bench", *context.obj.argv], enforce=enforce)
    if output_file is not None:
        write_json(result, output_file)
    typer.echo(text_of(tables(POLICY, result)))
