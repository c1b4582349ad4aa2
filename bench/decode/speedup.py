"""Plain streamed decoding against speculative decoding of the same target.

This process only coordinates: the measurement runs in a fresh process, inside the memory limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.checks.equal_outputs import are_exact
from bench.decode.measure import MeasureSpec, measure_in_child
from bench.process.provenance import collect
from bench.results import (
    RecordDict,
    aggregate_stats,
    compare_tokens,
    efficiency,
    mean_bandwidth,
    of_mode,
    pass_times_of,
    roofline_fraction,
    typical_pass_seconds,
)
from offload.units import parse_bytes
from specdec.metrics.stats import ratio


def run_speedup(spec: MeasureSpec, argv: Sequence[str], *, enforce: bool) -> dict[str, Any]:
    """Measure and report; see `build_report` for the keys."""
    provenance = collect(argv, Path(spec.load["model"]))
    report = build_report(spec, measure_in_child(spec, enforce=enforce))
    return {**report, "enforced": enforce, "provenance": provenance}


def build_report(spec: MeasureSpec, measured: dict[str, Any]) -> dict[str, Any]:
    """Return the results of our own runs.

    is_exact: outputs must be plain decoding's to the bit (`bench.checks.equal_outputs`).
    """
    records = measured["records"]
    plain, speculative = (of_mode(records, mode) for mode in ("plain", "speculative"))
    stats = {"plain": aggregate_stats(plain)}
    stats["speculative"] = aggregate_stats(speculative)
    speeds = [stats[mode]["tokens_per_second"] for mode in ("speculative", "plain")]
    speedup = ratio(*speeds)
    length = stats["speculative"]["mean_acceptance_length"]
    bytes_per_pass = int(measured["plan"]["streamed_bytes_per_pass"])
    return {
        **stats,
        "speedup": speedup,
        **_efficiency(speedup, length, plain, speculative),
        "storage_roofline_fraction": roofline_fraction(plain, bytes_per_pass),
        **compare_tokens(speculative, plain),
        "is_exact": are_exact(records),
        "near_ties": measured["near_ties"],
        "storage_bytes_per_second": mean_bandwidth(records),
        "storage_probe": measured["storage_probe"],
        "bytes_per_pass": bytes_per_pass,
        "model": spec.load["model"],
        "draft_model": spec.load.get("draft_model"),
        "memory_budget_bytes": _budget_bytes(spec, measured),
        "n_prompts": len(spec.prompts),
        "sampling": spec.sampling,
        "plan": measured["plan"],
        "records": records,
    }


def _efficiency(
    speedup: float,
    tokens_per_pass: float,
    plain: Sequence[RecordDict],
    speculative: Sequence[RecordDict],
) -> dict[str, float | None]:
    """Return T(1), T(N) and the efficiency; N is the typical tree size."""
    seconds_1, seconds_n = (
        typical_pass_seconds(pass_times_of(records)) for records in (plain, speculative)
    )
    return {
        "plain_pass_seconds": seconds_1,
        "speculative_pass_seconds": seconds_n,
        "efficiency": efficiency(speedup, tokens_per_pass, seconds_1, seconds_n),
    }


def _budget_bytes(spec: MeasureSpec, measured: dict[str, Any]) -> int:
    budget = spec.load["memory_budget"]
    return int(measured["plan"]["memory_budget_bytes"] if budget == "auto" else parse_bytes(budget))
