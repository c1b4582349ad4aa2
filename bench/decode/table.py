"""The report for people: one table, then the lines that matter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures import describe_ratio, lossy_mark
from offload.units import GIB, format_bytes

ROWS: tuple[tuple[str, str, str, float], ...] = (
    # label, key of the stats, format, unit
    ("tokens per second", "tokens_per_second", "{:.2f}", 1.0),
    ("seconds per token", "time_per_output_token", "{:.3f}", 1.0),
    ("seconds to first token", "time_to_first_token", "{:.2f}", 1.0),
    ("tokens per pass", "mean_acceptance_length", "{:.2f}", 1.0),
    ("acceptance rate", "acceptance_rate", "{:.2f}", 1.0),
    ("accepted by n-gram", "ngram_share", "{:.2f}", 1.0),
    ("GB streamed", "bytes_streamed", "{:.1f}", 1e9),
    ("stall seconds", "stall_seconds", "{:.1f}", 1.0),
    ("draft seconds", "draft_seconds", "{:.1f}", 1.0),
    ("peak memory GiB", "peak_memory_bytes", "{:.2f}", GIB),
)


def format_report(report: Mapping[str, Any]) -> str:
    """The whole report as text."""
    columns = {"plain": report["plain"], "speculative": report["speculative"]}
    if report.get("peer"):
        columns[report["peer"]["name"]] = report["peer"]
    return "\n".join([*_heading(report), "", *_table(columns), "", *_verdict(report)])


def _heading(report: Mapping[str, Any]) -> list[str]:
    sampling = report["sampling"]
    how = "greedy" if not sampling.get("temperature") else f"temperature {sampling['temperature']}"
    kept = "enforced by a cgroup" if report["enforced"] else "not enforced"
    return [
        f"target  {report['model']}",
        f"draft   {report['draft_model'] or 'none'}",
        f"budget  {format_bytes(report['memory_budget_bytes'])} ({kept})",
        f"prompts {report['n_prompts']} x {sampling['max_tokens']} tokens, {how}",
    ]


def _table(columns: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows = [["", *columns]]
    for label, key, form, unit in ROWS:
        rows.append(
            [
                label,
                *(form.format(c[key] / unit) if key in c else "-" for c in columns.values()),
            ]
        )
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [_line(row, widths) for row in rows]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first = cells[0].ljust(widths[0])
    rest = (cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))
    return "  ".join([first, *rest]).rstrip()


def _verdict(report: Mapping[str, Any]) -> list[str]:
    fraction = report["storage_roofline_fraction"]
    bandwidth = report["storage_bytes_per_second"] / 1e9
    lines = [f"speedup           {report['speedup']:.2f}x over plain"]
    if report.get("efficiency") is not None:
        lines.append(
            f"efficiency        {report['efficiency']:.2f} of tokens per pass x T(1) / T(N), "
            f"passes of {report['plain_pass_seconds']:.3f} and "
            f"{report['speculative_pass_seconds']:.3f} s"
        )
    lines += _versus_peer(report)
    if fraction is None:
        lines.append("storage           nothing is streamed: the model fits in the budget")
    else:
        lines.append(
            f"storage roofline  {fraction:.2f} of {bandwidth:.2f} GB/s (plain decode passes; "
            f"probed with {report['storage_probe']})"
        )
    equal, n_prompts = report["prompts_equal"], report["n_prompts"]
    lines.append(
        f"tokens equal      {report['token_match']:.1%} ({equal} of {n_prompts} prompts wholly)"
    )
    if lossy_mark(report["speculative"]):
        lines.append(
            "LOSSY             --accept-threshold: the speculative text is not the target's own"
        )
    if report.get("draft_model") and "acceptance_rate" in report["speculative"]:
        lines.append(
            "acceptance rate   of all drafted tokens; a tree drafts several for each position, "
            "of which one at most is right"
        )
    ties = {tie["prompt"]: tie for tie in report["near_ties"]}
    for prompt, position in report["first_mismatches"].items():
        lines.append(f"  {prompt} differs from token {position} on{_explain(ties.get(prompt))}")
    return lines


def _versus_peer(report: Mapping[str, Any]) -> list[str]:
    """Speeds over the same tokens; the columns above are over more of ours than of the peer's."""
    if not report.get("peer"):
        return []
    name = report["peer"]["name"]
    lines = [
        f"{mode:<17} {found['ratio']:.2f}x the speed of {name} (the same {describe_ratio(found)})"
        for mode, found in report["ratios"].items()
    ]
    counts = describe_ratio(report["peer"])
    lines.append(f"peer              its column is over {counts}, after each prompt's pass alone")
    return lines


def _explain(tie: Mapping[str, Any] | None) -> str:
    if tie is None:
        return ""
    verdict = "a near tie" if tie["explained"] else "NOT a near tie"
    return f": {verdict}, logits {tie['gap']:.3g} apart, drift between passes {tie['drift']:.3g}"
