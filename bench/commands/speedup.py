"""`specdec-bench speedup`: plain streamed decoding against speculative decoding."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import options
from bench.commands.shared import check_enforced, model_and_prompts, show
from bench.options import UsageMistake
from bench.prompts.workloads import BUILT_IN
from specdec.cli.groups import LOAD, Load, Sampling

# Refused with the name of the command that replaced it.
Peer = Annotated[
    str | None,
    typer.Option("--peer", "--peer-prompts", "--peer-tokens", "--peer-cpu-memory", hidden=True),
]


def speedup_command(
    context: typer.Context,
    load: Load,
    sampling: Sampling,
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.NPrompts = 16,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    ignore_eos: options.IgnoreEos = False,
    peer: Peer = None,
    output: options.Output = "table",
    output_file: options.OutputFile = None,
    log: options.Log = None,
) -> None:
    """Compare plain streamed decoding with speculative decoding of the same target."""
    from bench.checks.equal_outputs import check_equal_outputs
    from bench.decode.measure import MeasureSpec
    from bench.decode.speedup import run_speedup
    from bench.process.results import SPEEDUP

    if peer is not None:
        raise UsageMistake("--peer is now: specdec-bench peers --peers accelerate,specdec,...")
    if not load.spec.drafters:
        raise UsageMistake("without drafts there is no speedup: leave out --spec-type none")
    options.check_output(output)
    check_enforced(load, enforce)
    options.check_writable("--output-file", output_file)
    options.check_writable("--log", log)
    keywords, chosen = model_and_prompts(load.keywords(LOAD), prompts, n_prompts)
    spec = MeasureSpec(
        keywords,
        chosen,
        options.sampling_keywords(max_tokens, ignore_eos, sampling),
        str(log.resolve()) if log else None,
    )
    result = run_speedup(spec, ["specdec-bench", *context.obj.argv], enforce=enforce)
    show(SPEEDUP, result, output, output_file)
    check_equal_outputs(result["records"])
