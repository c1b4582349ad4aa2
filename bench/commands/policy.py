"""`specdec-bench policy`: automatic against fixed sizes of trees."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import options
from bench.commands.shared import check_enforced, model_and_prompts, show
from bench.prompts.workloads import BUILT_IN
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
            help="Fixed trees: draft tokens x depth[:on|off] (parallel drafting).",
        ),
    ] = "2x2,4x4,8x4,8x8,16x8,32x8,64x16",
    with_plain: Annotated[
        bool,
        typer.Option("--plain/--no-plain", help="Also decode plainly, which may take long."),
    ] = True,
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.NPrompts = 2,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    ignore_eos: options.IgnoreEos = False,
    output_file: options.OutputFile = None,
    log: options.Log = None,
) -> None:
    """Compare the automatic size of trees with fixed ones, in one process."""
    from bench.checks.equal_outputs import check_equal_outputs
    from bench.decode.modes import parse_sizes
    from bench.decode.policy import run_policy
    from bench.process.provenance import collect
    from bench.process.results import POLICY

    trees = parse_sizes(sizes)
    check_enforced(load, enforce)
    options.check_writable("--output-file", output_file)
    options.check_writable("--log", log)
    keywords, chosen = model_and_prompts(load.keywords(LOAD), prompts, n_prompts)
    provenance = collect(["specdec-bench", *context.obj.argv], Path(keywords["model"]))
    result = run_policy(
        keywords,
        chosen,
        options.sampling_keywords(max_tokens, ignore_eos, sampling),
        trees,
        with_plain=with_plain,
        log=str(log.resolve()) if log else None,
        enforce=enforce,
    )
    result["provenance"] = provenance
    show(POLICY, result, "table", output_file)
    check_equal_outputs(result["records"])
