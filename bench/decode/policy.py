"""Comparison of the automatic policy with fixed sizes of trees.

One loaded pair decodes every prompt in every mode, in turns that rotate, so that a drift of the
machine affects all of them. Each mode has acceptance statistics of its own: the automatic one
learns nothing from the fixed ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.checks.equal_outputs import are_exact
from bench.decode.measure import MeasureSpec, measure_in_child
from bench.decode.modes import AUTO, PLAIN, TreeSize
from bench.prompts.workloads import Prompt
from bench.results import aggregate_stats, of_mode
from specdec.metrics.stats import ratio


def run_policy(
    load: Mapping[str, Any],
    prompts: Sequence[Prompt],
    sampling: Mapping[str, Any],
    sizes: Sequence[TreeSize],
    *,
    with_plain: bool = True,
    log: str | None = None,
    enforce: bool = False,
) -> dict[str, Any]:
    """Return rows by mode, the two main ratios, model, plan, all records, is_exact, enforced.

    Raises typer.Exit with the child's exit code if the child has reported its error.
    """
    modes = [*([PLAIN] if with_plain else []), *(size.name for size in sizes), AUTO]
    limit = max(size.n_nodes for size in sizes)
    spec = MeasureSpec(
        {**load, "num_draft_tokens": limit},
        list(prompts),
        dict(sampling),
        log,
        modes=tuple(modes),
        probes=False,
    )
    measured = measure_in_child(spec, enforce=enforce)
    records = measured["records"]
    return {
        **summarise(records),
        "model": str(load["model"]),
        "plan": measured["plan"],
        "records": records,
        "is_exact": are_exact(records),
        "enforced": enforce,
    }


def summarise(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one row for each mode, and the automatic one's ratios to the best fixed and plain."""
    rows = []
    for name in dict.fromkeys(record["mode"] for record in records):
        mode_records = of_mode(records, name)
        stats = aggregate_stats(mode_records)
        rows.append(
            {
                "mode": name,
                "tokens_per_second": stats["tokens_per_second"],
                "mean_acceptance_length": stats["mean_acceptance_length"],
                "mean_tree_nodes": ratio(stats["drafted_tokens"], stats["passes"]),
                "draft_share": ratio(stats["draft_seconds"], stats["decode_seconds"]),
                "is_lossless": stats["is_lossless"],
            }
        )
    speeds = {row["mode"]: float(row["tokens_per_second"]) for row in rows}
    fixed = {name: speed for name, speed in speeds.items() if name != AUTO}
    best = max(fixed, key=lambda name: fixed[name])
    return {
        "rows": rows,
        "best_fixed": best,
        "auto_versus_best_fixed": ratio(speeds[AUTO], fixed[best]),
        "auto_versus_plain": ratio(speeds[AUTO], speeds[PLAIN]) if PLAIN in speeds else None,
    }
