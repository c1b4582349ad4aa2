"""`specdec-bench curve`: the speedup of any acceptance rate on this machine."""

from __future__ import annotations

from typing import Annotated

import typer

from bench import options
from bench.commands.shared import check_enforced, model_and_prompts, show
from bench.options import UsageMistake
from bench.prompts.workloads import BUILT_IN
from specdec.cli.groups import TARGET, Target
from specdec.config import MAX_DRAFT_TOKENS

Rates = Annotated[
    str,
    typer.Option("--rates", metavar="P,P,...", help="Probabilities that a draft token is right."),
]
Sizes = Annotated[
    str, typer.Option("--sizes", metavar="N,N,...", help="Draft tokens of the chains.")
]
GuessSeed = Annotated[int, typer.Option("--seed", min=0, help="Seed of the simulated drafts.")]


def curve_command(
    context: typer.Context,
    load: Target,
    rates: Rates = "0.5,0.6,0.7,0.8,0.9,0.95",
    sizes: Sizes = "1,2,4,8,16,32,64",
    prompts: options.Prompts = BUILT_IN,
    n_prompts: options.NPrompts = 2,
    max_tokens: options.MaxTokens = 64,
    seed: GuessSeed = 0,
    enforce: options.Enforce = False,
    ignore_eos: options.IgnoreEos = False,
    output: options.Output = "table",
    output_file: options.OutputFile = None,
    log: options.Log = None,
) -> None:
    """Measure speedup against acceptance rate, with a drafter of known accuracy."""
    from bench.checks.equal_outputs import check_equal_outputs
    from bench.decode.curve import CurveError, CurveSettings, CurveSpec, run_curve
    from bench.process.results import CURVE

    settings = CurveSettings(parse_rates(rates), parse_lengths(sizes), max_tokens, ignore_eos, seed)
    options.check_output(output)
    options.check_writable("--output-file", output_file)
    options.check_writable("--log", log)
    check_enforced(load, enforce)
    keywords, chosen = model_and_prompts(load.keywords(TARGET), prompts, n_prompts)
    spec = CurveSpec(keywords, chosen, settings, str(log.resolve()) if log else None)
    result = run_curve(spec, ["specdec-bench", *context.obj.argv], enforce=enforce)
    show(CURVE, result, output, output_file)
    check_equal_outputs(result["records"])
    n_unexplained = sum(not tie.get("explained", True) for tie in result["differences"])
    if n_unexplained:
        raise CurveError(
            f"{n_unexplained} of {result['num_seqs']} sequences differ from plain decoding by more "
            "than a near tie: this should not happen, please report it"
        )


def parse_rates(text: str) -> tuple[float, ...]:
    """Return distinct numbers above 0 and at most 1. Raises UsageMistake."""
    result = []
    for part in text.split(","):
        try:
            rate = float(part)
        except ValueError:
            rate = 0.0
        if not 0.0 < rate <= 1.0:
            raise UsageMistake(
                f"--rates has {part!r}: give numbers above 0 and at most 1, e.g. 0.7,0.9"
            )
        result.append(rate)
    return tuple(dict.fromkeys(result))


def parse_lengths(text: str) -> tuple[int, ...]:
    """Return distinct counts from 1 to MAX_DRAFT_TOKENS. Raises UsageMistake."""
    result = []
    for part in map(str.strip, text.split(",")):
        is_count = part.isascii() and part.isdigit() and len(part) < 10
        if not is_count or not 1 <= int(part) <= MAX_DRAFT_TOKENS:
            raise UsageMistake(
                f"--sizes has {part!r}: give draft tokens from 1 to {MAX_DRAFT_TOKENS}, e.g. 4,16"
            )
        result.append(int(part))
    return tuple(dict.fromkeys(result))
