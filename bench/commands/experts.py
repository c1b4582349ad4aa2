"""`specdec-bench experts`: what memory for experts is worth."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench import options
from bench.commands.shared import model_and_prompts
from bench.commands.sweep import parse_budgets
from bench.options import UsageMistake
from bench.prompts.workloads import BUILT_IN
from bench.table import Columns, Table, cells, headings, text_of
from offload.units import format_bytes
from specdec.cli.groups import LOAD, Load

_COLUMNS: Columns = (
    ("tokens/s", "tokens_per_second", "{:.2f}", 1.0),
    ("GB/token", "bytes_per_token", "{:.3f}", 1e9),
    ("expected", "expected_bytes_per_token", "{:.3f}", 1e9),
    ("slots", "share_held", "{:.1%}", 1.0),
    ("hits", "hit_rate", "{:.1%}", 1.0),
    ("LRU", "least_recently_used", "{:.1%}", 1.0),
    ("Belady", "belady", "{:.1%}", 1.0),
    ("MB/read", "bytes_per_read", "{:.2f}", 1e6),
    ("storage GB/s", "storage_bytes_per_second", "{:.2f}", 1e9),
    ("reads/decode", "read_share", "{:.2f}", 1.0),
    ("peak GiB", "peak_memory_bytes", "{:.2f}", 2.0**30),
)


def experts_command(
    context: typer.Context,
    load: Load,
    budgets: Annotated[
        str, typer.Option("--budgets", metavar="SIZE,...", help="Memory budgets, enforced.")
    ],
    prompts: options.Prompts = BUILT_IN,
    n_prompts: Annotated[
        int, typer.Option("--n-prompts", min=2, help="The first one fills the cache.")
    ] = 4,
    max_tokens: options.MaxTokens = 64,
    output_file: options.OutputFile = None,
) -> None:
    """A mixture of experts by memory budget: plain tokens/s, and how often experts are found."""
    from bench.experts.hits import HitsSpec, measure_budget
    from bench.process.provenance import collect
    from bench.process.results import write_json
    from specdec.planning.plan import plan_run

    amounts = parse_budgets(budgets)
    if not amounts:
        raise UsageMistake("--budgets auto is not known here: give sizes, such as 2GiB,4GiB")
    options.check_writable("--output-file", output_file)
    keywords = {k: v for k, v in load.keywords(LOAD).items() if k != "memory_budget"}
    keywords, chosen = model_and_prompts(keywords, prompts, n_prompts)
    keywords.update(spec_type="none", draft_model=None)
    model, texts = Path(keywords["model"]), [prompt.text for prompt in chosen]
    if plan_run(**keywords, memory_budget=amounts[-1]).residency.experts is None:
        raise UsageMistake(f"{model} is no mixture of experts, or one that is read whole")
    rows = []
    for n_bytes in amounts:
        spec = HitsSpec({**keywords, "memory_budget": n_bytes}, texts, max_tokens)
        rows.append(measure_budget(spec, model))
        speed = rows[-1]["tokens_per_second"]
        typer.echo(f"{format_bytes(n_bytes)}: {speed:.2f} tokens/s", err=True)
    if output_file is not None:
        provenance = collect(["specdec-bench", *context.obj.argv], model)
        write_json({"rows": rows, "provenance": provenance}, output_file)
    lines = tuple((format_bytes(row["memory_budget"]), *cells(row, _COLUMNS)) for row in rows)
    typer.echo(text_of([Table("Experts in memory", ("budget", *headings(_COLUMNS)), lines)]))
