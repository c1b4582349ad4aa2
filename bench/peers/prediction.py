"""Comparison of the plan's prediction with measured passes of the same size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.results import aggregate_stats
from specdec.drafters.frontier import level_width
from specdec.metrics.stats import ratio

if TYPE_CHECKING:
    from specdec.planning.run_plan import RunPlan

PROBE_SECONDS = 4.0


def probe_storage(model: str) -> float:
    """Measure storage in bytes/s for the next plan, as `specdec profile --refresh` does."""
    from offload.ring.bandwidth import measure_storage
    from specdec.models.weight_files import largest_weight_file

    weights = largest_weight_file(Path(model))
    result = measure_storage(weights, seconds=PROBE_SECONDS, refresh=True)
    return float(result.storage_bytes_per_second)


def compare(plan: RunPlan, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the plan's prediction for passes of the measured size, and the measurements.

    Tokens per pass and runs of the draft are the measured ones: they depend on the draft's
    confidence and accuracy, not on the plan.
    """
    stats = aggregate_stats(records)
    passes, n_drafted, n_draft_runs = (
        stats[name] for name in ("passes", "drafted_tokens", "draft_runs")
    )
    n_nodes = round(ratio(n_drafted, passes))
    num_tokens = 1 + n_nodes
    n_runs = ratio(n_draft_runs, passes)
    n_tokens = round(ratio(stats["prompt_tokens"] + stats["generated_tokens"], len(records)))
    target = plan.chosen.decoding(n_tokens).target
    drafting = 0.0
    if plan.chosen.draft is not None and n_runs > 0:
        draft, n_abreast = plan.chosen.draft, max(1, round(n_drafted / n_draft_runs))
        n_tokens_of_run = draft.compute.block_size or min(n_abreast, level_width(n_nodes))
        drafting = n_runs * draft.seconds(n_tokens_of_run)
    times = target.times(num_tokens, drafting)
    tokens = ratio(stats["generated_tokens"] - len(records), passes)
    predicted = {
        "pass_seconds": times.seconds,
        "stall_seconds": times.stall_seconds,
        "drafting_seconds": times.gap_seconds,
        "tokens_per_second": tokens / times.cycle_seconds,
        "bytes_per_pass": target.placement.streamed_bytes,
    }
    measured = {
        "pass_seconds": ratio(stats["pass_seconds"], passes),
        # These two include prefill passes.
        "stall_seconds": ratio(stats["stall_seconds"], passes + len(records)),
        "drafting_seconds": ratio(stats["draft_seconds"], passes),
        "tokens_per_second": stats["tokens_per_second"],
        "bytes_per_pass": ratio(stats["bytes_streamed"], passes + len(records)),
    }
    return {
        "num_tokens": num_tokens,
        "tokens_per_pass": tokens,
        "draft_runs_per_pass": n_runs,
        "predicted": predicted,
        "measured": measured,
        "error": {
            name: ratio(predicted[name], measured[name]) - 1
            for name in ("pass_seconds", "tokens_per_second")
        },
    }
