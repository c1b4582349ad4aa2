"""`specdec-bench throughput`: tokens per second against the number of running sequences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import options
from bench.commands.shared import check_enforced, model_and_prompts
from bench.options import UsageMistake
from bench.prompts.workloads import BUILT_IN
from bench.table import Columns, Table, cells, headings, text_of
from specdec.cli.groups import LOAD, Load, Sampling

_COLUMNS: Columns = (
    ("tokens/s", "tokens_per_second", "{:.2f}", 1.0),
    ("roofline", "roofline", "{:.2f}", 1.0),
    ("GB/token", "bytes_per_token", "{:.3f}", 1e9),
    ("tokens/pass of a sequence", "tokens_per_pass_of_a_sequence", "{:.2f}", 1.0),
    ("sequences that differ", "n_different_outputs", "{:.0f}", 1.0),
    ("peak GiB", "peak_memory_bytes", "{:.2f}", 2.0**30),
)


def throughput_command(
    context: typer.Context,
    load: Load,
    sampling: Sampling,
    counts: Annotated[
        str, typer.Option("--sequences", metavar="N,N,...", help="Sequences in one pass.")
    ] = "1,2,4,8,16,32",
    modes: Annotated[
        str, typer.Option("--modes", help="plain: a token per sequence in each pass; speculative.")
    ] = "plain,speculative",
    min_prompts: Annotated[
        int,
        typer.Option("--min-prompts", min=1, help="Minimum number of prompts in all, in groups."),
    ] = 2,
    prompts: options.Prompts = BUILT_IN,
    max_tokens: options.MaxTokens = 64,
    enforce: options.Enforce = False,
    ignore_eos: options.IgnoreEos = False,
    output_file: options.OutputFile = None,
) -> None:
    """Measure tokens per second by number of sequences, and check that outputs are equal."""
    from bench.decode.throughput import (
        ThroughputSpec,
        refuse_differences,
        run_throughput,
        summarise,
    )
    from bench.process.provenance import collect
    from bench.process.results import write_json

    numbers, mode_names = _counts(counts), modes.split(",")
    if not set(mode_names) <= {"plain", "speculative"}:
        raise UsageMistake(f"--modes {modes} is not plain, speculative or both")
    check_enforced(load, enforce)
    options.check_writable("--output-file", output_file)
    keywords, chosen = model_and_prompts(load.keywords(LOAD), prompts, max(*numbers, min_prompts))
    if len(chosen) < max(numbers):
        raise UsageMistake(
            f"--sequences asks for {max(numbers)} prompts, {prompts} has {len(chosen)}"
        )
    keywords["parallel"] = max(numbers)
    provenance = collect(["specdec-bench", *context.obj.argv], Path(keywords["model"]))
    spec = ThroughputSpec(
        keywords,
        chosen,
        options.sampling_keywords(max_tokens, ignore_eos, sampling),
        numbers,
        mode_names,
        min_prompts,
    )
    result = {**run_throughput(spec, enforce=enforce), "provenance": provenance}
    if output_file is not None:
        write_json(result, output_file)
    rows = tuple(
        (f"{row['num_seqs']} {row['mode']}", *cells(row, _COLUMNS)) for row in result["rows"]
    )
    table = Table(
        "Throughput",
        ("sequences", *headings(_COLUMNS)),
        rows,
        notes=tuple(summarise(result["rows"])),
    )
    typer.echo(text_of([table]))
    refuse_differences(result["rows"])


def _counts(counts: str) -> list[int]:
    try:
        numbers = [int(item) for item in counts.split(",")]
    except ValueError:
        numbers = []
    if not numbers or min(numbers) < 1:
        raise UsageMistake(f"--sequences is {counts}: give numbers of sequences, such as 1,4,16")
    return numbers
