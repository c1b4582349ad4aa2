"""The comparison for people: one table, then what it was measured with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from bench.figures import describe_ratio
from bench.peers.compare import NOT_RUN, label
from bench.peers.registry import PEERS
from bench.peers.runs import describe_tuned
from bench.process.limited import OK
from bench.prompts.workloads import describe_left_out
from offload.units import GIB, format_bytes

Row = Mapping[str, Any]

COLUMNS: tuple[tuple[str, str, str, float], ...] = (
    # heading, key, format, unit
    ("tok/s", "tokens_per_second", "{:.2f}", 1.0),
    ("load s", "load_seconds", "{:.1f}", 1.0),
    ("first token s", "time_to_first_token", "{:.2f}", 1.0),
    ("s/token median", "seconds_per_token_median", "{:.3f}", 1.0),
    ("p90", "seconds_per_token_p90", "{:.3f}", 1.0),
    ("GB read/token", "bytes_read_per_token", "{:.2f}", 1e9),
    ("tok/pass", "mean_acceptance_length", "{:.2f}", 1.0),
    ("anon GiB", "peak_anonymous_bytes", "{:.2f}", GIB),
    ("cgroup GiB", "cgroup_peak_bytes", "{:.2f}", GIB),
    ("prompts", "n_prompts", "{:.0f}", 1.0),
    ("tokens", "n_tokens", "{:.0f}", 1.0),
)


def format_comparison(result: Mapping[str, Any]) -> str:
    """The whole comparison as text."""
    rows = result["peers"]
    table = [["", *(heading for heading, *_ in COLUMNS), "exit"]]
    for row in rows:
        table.append([label(row, rows), *cells(row), row["exit"]])
    lines = [*_heading(result), "", *_align(table), ""]
    lines += [f"{label(row, rows)}: {row['reason']}" for row in rows if row["reason"]]
    lines += _ratio_lines(result)
    lines += _category_lines(rows)
    return "\n".join([*lines, "", "settings", *_setting_lines(result)])


def cells(row: Row) -> list[str]:
    """One text for each of COLUMNS."""
    if row["exit"] == NOT_RUN:
        return ["-"] * len(COLUMNS)
    return [
        "-" if row[key] is None else form.format(row[key] / unit) for _, key, form, unit in COLUMNS
    ]


def _align(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in table) for i in range(len(table[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in (0, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in table
    ]


def _heading(result: Mapping[str, Any]) -> list[str]:
    kept = "enforced by a cgroup" if result["enforced"] else "NOT enforced"
    lines = []
    for weights in result["weights"]:
        types = ", ".join(f"{name} {share:.0%}" for name, share in weights["types"].items())
        lines.append(f"target  {weights['model']} ({format_bytes(weights['n_bytes'])}: {types})")
        lines.append(f"draft   {weights['draft'] or 'none'}")
    slowed = result["storage_mbps"]
    probed = result["storage_bytes_per_second"]
    storage = "storage not probed" if probed is None else f"storage {probed / 1e9:.2f} GB/s"
    if slowed is not None:
        storage += f", held to {slowed:g} MB/s"
    return [
        *lines,
        f"budget  {format_bytes(result['memory_budget_bytes'])} ({kept}); {storage}",
        f"prompts {result['n_prompts']} x {result['max_tokens']} tokens, greedy, "
        f"{result['n_threads']} threads; at most {result['time_limit_seconds']:g} s each",
        *_left_out(result),
        "page cache of the models' files dropped before each process (posix_fadvise)",
    ]


def _left_out(result: Mapping[str, Any]) -> list[str]:
    n = result.get("n_prompts_too_long", 0)  # older records have none
    return [describe_left_out(n, result["max_tokens"])] if n else []


def _ratio_lines(result: Mapping[str, Any]) -> list[str]:
    """Of specdec over all others: on the tokens that both decoded."""
    lines = []
    for name, others in result["ratios"].items():
        if name.startswith("specdec") and others:
            parts = [f"{v['ratio']:.2f}x {o} ({describe_ratio(v)})" for o, v in others.items()]
            lines.append(f"{name}: " + ", ".join(parts))
    return lines


def _category_lines(rows: Sequence[Row]) -> list[str]:
    names = sorted({name for row in rows for name in row["by_category"]})
    if not names:
        return []
    done = [row for row in rows if row["by_category"]]
    table = [["tok/s (tok/pass) by category", *(label(row, rows) for row in done), ""]]
    for name in names:
        table.append([name, *(category_cell(row["by_category"].get(name)) for row in done), ""])
    return ["", *_align(table)]


def category_cell(figures: Mapping[str, Any] | None) -> str:
    """Tokens per second, and tokens per pass where the program speculates."""
    if figures is None or figures["tokens_per_second"] is None:
        return "-"
    length = figures["mean_acceptance_length"]
    more = "" if length is None else f" ({length:.2f})"
    return f"{figures['tokens_per_second']:.2f}{more}"


def _setting_lines(result: Mapping[str, Any]) -> list[str]:
    lines, rows = [], result["peers"]
    interpreters = result["provenance"].get("interpreters", {})  # older records have none
    for row in rows:
        if row["exit"] == NOT_RUN:
            continue
        shown = {k: v for k, v in row["settings"].items() if k != "plan" and v is not None}
        text = ", ".join(f"{key}={value}" for key, value in shown.items())
        lines.append(f"  {label(row, rows)}: {PEERS[row['peer']].about}; {text or '-'}")
        if row["peer"] in interpreters:
            lines.append("    on " + _interpreter(interpreters[row["peer"]]))
        if row.get("rewrite_seconds") is not None:
            lines.append(f"    wrote the weights anew in {row['rewrite_seconds']:.0f} s beforehand")
        if row["trials"]:
            lines.append("    tried: " + "; ".join(map(_trial, row["trials"])))
        match = row["token_match"]
        if match is not None and match < 1 and row["exit"] == OK:
            lines.append(f"    {match:.1%} of its tokens are those of specdec-plain")
    return lines


def _interpreter(interpreter: Mapping[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in interpreter["versions"].items())
    return f"{interpreter['path']}: {versions}"


def _trial(trial: Mapping[str, Any]) -> str:
    """One of the settings that were tried, and how fast it was."""
    known = ("tokens_per_second", "exit")
    what = " ".join(describe_tuned(k, v) for k, v in trial.items() if k not in known)
    speed = trial["tokens_per_second"]
    return f"{what}: {trial['exit'] if speed is None else f'{speed:.2f} tok/s'}"
