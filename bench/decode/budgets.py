"""The same prompts at several memory budgets: is anything killed, and does the text stay the same?

Every budget is a process of its own. Greedy texts are compared with those of the first budget, or
of an earlier report.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from bench import figures as aggregate
from bench.decode.measure import MeasureSpec, measure_in_child
from bench.process.child import KILLED, quiet_libraries
from bench.process.provenance import collect
from bench.process.results import SPEEDUP, ResultsError, read_results
from bench.prompts.workloads import Prompt
from offload.units import GIB

_MODE = "speculative"
_FIGURES = ("tokens_per_second", "mean_acceptance_length", "peak_memory_bytes", "is_lossless")
Tokens = dict[str, list[int]]
"""Prompt -> token ids."""


def run_budgets(
    load: Mapping[str, Any],
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
    budgets: Sequence[str],
    argv: Sequence[str],
    *,
    enforce: bool = False,
    reference: Path | None = None,
    save: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Measure at each budget; rows in the given order, tokens and all records in the JSON.

    `save` is called with the result so far after every budget: an interrupted run keeps it.

    Raises ResultsError where `reference` is no report of `speedup`.
    """
    quiet_libraries()
    provenance = collect(argv, Path(load["model"]))
    wanted = None if reference is None else _reference_tokens(reference)
    rows: list[dict[str, Any]] = []
    records: dict[str, Any] = {}
    result = {
        "budgets": rows,
        "model": str(load["model"]),
        "enforced": enforce,
        "provenance": provenance,
        "records": records,
    }
    for budget in budgets:
        spec = MeasureSpec(
            {**load, "memory_budget": budget}, list(prompts), dict(sampling), modes=(_MODE,)
        )
        measured = _measure(spec, enforce)
        if measured is None:
            rows.append({"memory_budget": budget, "killed": True})
        else:
            records[budget] = measured["records"]
            tokens = tokens_of(measured["records"])
            wanted = wanted or tokens
            row = _row(measured, tokens, wanted)
            rows.append({"memory_budget": budget, "killed": False, **row})
        save(result)
    return result


def _measure(spec: MeasureSpec, enforce: bool) -> dict[str, Any] | None:
    """None where the kernel killed the process."""
    try:
        return measure_in_child(spec, enforce=enforce)
    except typer.Exit as stop:
        if stop.exit_code == KILLED:
            return None
        raise


def _reference_tokens(path: Path) -> Tokens:
    results = read_results(path)
    if results.kind != SPEEDUP:
        raise ResultsError(f"{path} holds results of {results.kind}: give a report of speedup")
    return tokens_of(results.value["records"])


def tokens_of(records: Sequence[Mapping[str, Any]]) -> Tokens:
    """Of the speculative decodings."""
    return {r["prompt"]: list(r["token_ids"]) for r in records if r["mode"] == _MODE}


def _row(measured: Mapping[str, Any], tokens: Tokens, wanted: Tokens) -> dict[str, Any]:
    plan, records = measured["plan"], measured["records"]
    stats = aggregate.aggregate_stats(aggregate.of_mode(records, _MODE))
    shared = [name for name in tokens if name in wanted]
    return {
        "streamed_bytes_per_pass": plan["streamed_bytes_per_pass"],
        **{key: stats[key] for key in _FIGURES},
        "n_texts": len(shared),
        "n_equal_texts": sum(tokens[name] == wanted[name] for name in shared),
        "first_mismatch": {
            name: aggregate.first_mismatch(wanted[name], tokens[name])
            for name in shared
            if tokens[name] != wanted[name]
        },
    }


def format_rows(result: Mapping[str, Any]) -> str:
    """One line for each budget."""
    lines = ["budget    GB/pass  tok/s  tokens/pass  peak GiB  equal texts"]
    for row in result["budgets"]:
        if row["killed"]:
            lines.append(f"{row['memory_budget']:<9} killed by the kernel")
            continue
        lines.append(
            f"{row['memory_budget']:<9} {row['streamed_bytes_per_pass'] / 1e9:7.2f}"
            f"  {row['tokens_per_second']:5.2f}  {row['mean_acceptance_length']:11.2f}"
            f"  {row['peak_memory_bytes'] / GIB:8.2f}  {row['n_equal_texts']} of {row['n_texts']}"
            f"{aggregate.lossy_mark(row)}"
        )
    return "\n".join(lines)
