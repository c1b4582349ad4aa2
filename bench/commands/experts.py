"""`specdec-bench experts`: decoding speed against memory for experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from bench import options
from bench.commands.shared import model_and_prompts
from bench.commands.sweep import parse_budgets, parse_trees
from bench.options import UsageMistake
from bench.prompts.workloads import BUILT_IN
from bench.table import Columns, Table, cells, headings, text_of
from offload.units import format_bytes
from specdec.cli.groups import LOAD, Load

_COLUMNS: Columns = (
    ("tokens/s", "tokens_per_second", "{:.2f}", 1.0),
    ("predicted", "predicted_tokens_per_second", "{:.2f}", 1.0),
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


_DEPTH_COLUMNS: Columns = (
    ("tokens/s", "tokens_per_second", "{:.2f}", 1.0),
    ("tokens/pass", "tokens_per_pass", "{:.2f}", 1.0),
    ("GB/token", "bytes_per_token", "{:.3f}", 1e9),
    ("experts/pass", "experts_per_pass", "{:.0f}", 1.0),
    ("hits", "hit_rate", "{:.1%}", 1.0),
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
    trees: Annotated[
        str | None,
        typer.Option(
            "--trees",
            metavar="N,...",
            help="Compare these draft tokens per pass, which take turns: 0,1,2,4,auto.",
        ),
    ] = None,
    output_file: options.OutputFile = None,
) -> None:
    """Measure a mixture of experts by memory budget: plain tokens/s and expert cache hits."""
    from bench.process.provenance import collect
    from bench.process.results import write_json

    amounts, sizes = parse_budgets(budgets), [] if trees is None else parse_trees(trees)
    if not amounts:
        raise UsageMistake("--budgets auto is not known here: give sizes, such as 2GiB,4GiB")
    options.refuse_one_budget(load)
    options.check_writable("--output-file", output_file)
    keywords = {k: v for k, v in load.keywords(LOAD).items() if k != "memory_budget"}
    keywords, chosen = model_and_prompts(keywords, prompts, n_prompts)
    if sizes:
        _check_drafting(keywords)
    else:
        keywords.update(spec_type="none", draft_model=None)
    outputs = [prompt.text for prompt in chosen]
    _check_mixture(keywords, amounts[-1])
    rows = [
        _measure({**keywords, "memory_budget": n_bytes}, outputs, max_tokens, sizes)
        for n_bytes in amounts
    ]
    if output_file is not None:
        provenance = collect(["specdec-bench", *context.obj.argv], Path(keywords["model"]))
        write_json({"rows": rows, "provenance": provenance}, output_file)
    typer.echo(text_of(_tables(rows)))


def _check_drafting(keywords: dict[str, Any]) -> None:
    if not keywords.get("draft_model"):
        raise UsageMistake("--trees compares sizes of drafts: give one with -md")
    if keywords.get("num_draft_tokens") is not None:
        raise UsageMistake("--trees and --draft-max say the same: give one of them")
    # The plan may reject the draft; here it is loaded all the same.
    keywords["spec_type"] = keywords.get("spec_type") or "draft,ngram"


def _check_mixture(keywords: dict[str, Any], memory_budget: int) -> None:
    from specdec.planning.plan import plan_run

    if plan_run(**keywords, memory_budget=memory_budget).placement.experts is None:
        raise UsageMistake(
            f"{keywords['model']} is no mixture of experts, or one that is read whole"
        )


def _measure(
    load: dict[str, Any], outputs: list[str], max_tokens: int, sizes: list[int | None]
) -> dict[str, Any]:
    """Measure one budget."""
    from bench.experts import depths, hits

    model = Path(load["model"])
    if sizes:
        result = depths.measure_budget(depths.DepthsSpec(load, outputs, max_tokens, sizes), model)
        best = max(depth["tokens_per_second"] for depth in result["depths"])
    else:
        result = hits.measure_budget(hits.HitsSpec(load, outputs, max_tokens), model)
        best = result["tokens_per_second"]
    typer.echo(f"{format_bytes(load['memory_budget'])}: {best:.2f} tokens/s", err=True)
    return result


def _tables(rows: list[dict[str, Any]]) -> list[Table]:
    if "depths" in rows[0]:
        return [
            Table(
                "Sizes of trees",
                ("tree", *headings(_DEPTH_COLUMNS)),
                tuple((_tree(depth), *cells(depth, _DEPTH_COLUMNS)) for depth in row["depths"]),
                about=(
                    f"{format_bytes(row['memory_budget'])}, {row['share_held']:.1%} of all experts "
                    f"in memory; sequences {'equal' if row['outputs_equal'] else 'NOT EQUAL'}",
                ),
            )
            for row in rows
        ]
    lines = tuple((format_bytes(row["memory_budget"]), *cells(row, _COLUMNS)) for row in rows)
    return [Table("Experts in memory", ("budget", *headings(_COLUMNS)), lines)]


def _tree(depth: dict[str, Any]) -> str:
    n = depth["num_draft_tokens"]
    return "auto" if n is None else str(n)
