"""Does the plan's prediction hold? What it says of passes of the size that ran, beside those."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.results import aggregate_stats
from specdec.drafters.model import level_width
from specdec.metrics.stats import ratio

if TYPE_CHECKING:
    from specdec.planning.run_plan import RunPlan

PROBE_SECONDS = 4.0


def probe_storage(model: str) -> float:
    """Bytes per second, which a plan is then made of, as `specdec profile --refresh` does."""
    from offload.ring.bandwidth import measure_storage
    from specdec.models.weight_files import largest_weight_file

    weights = largest_weight_file(Path(model))
    result = measure_storage(weights, seconds=PROBE_SECONDS, refresh=True)
    return float(result.storage_bytes_per_second)


def compare(plan: RunPlan, records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What the plan said of passes of the size that ran, beside what they took.

    Tokens per pass and runs of the draft are the measured ones: how sure it is of its tokens, and
    how often it is right, is the draft's and not the plan's.
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
        n_abreast = min(max(1, round(n_drafted / n_draft_runs)), level_width(n_nodes))
        drafting = n_runs * plan.chosen.draft.seconds(n_abreast)
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
        # These two of the prompts' passes, too.
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
