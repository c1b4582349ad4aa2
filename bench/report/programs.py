"""Tables of a comparison of programs: results, ratios, categories and configurations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from bench.checks.equal_outputs import percent_equal
from bench.peers.agreement import Agreement
from bench.peers.compare import NOT_RUN, label
from bench.peers.registry import PEERS as PROGRAMS
from bench.peers.runs import describe_tuned
from bench.prompts.workloads import describe_left_out
from bench.results import describe_ratio
from bench.table import Columns, Table, cells, headings, labelled
from offload.process.limited import OK
from offload.units import GIB, format_bytes

Value = Mapping[str, Any]

_PEER_COLUMNS: Columns = (
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


def program_tables(value: Value) -> Iterator[Table]:
    rows = value["peers"]
    yield Table(
        "Programs",
        ("", *headings(_PEER_COLUMNS), "exit"),
        tuple((label(row, rows), *_peer_cells(row), exit_of(row)) for row in rows),
        tuple(_measured_with(value)),
    )
    ratios = value["ratios"]
    names = [ratio for ratio in ratios if ratios[ratio]]
    if names:
        yield Table(
            "Ratios",
            ("", *names),
            tuple((name, *(_ratio(ratios[name].get(other)) for other in names)) for name in names),
            ("Speed of the row / speed of the column, on the tokens of both (how many).",),
        )
    done = [row for row in rows if row["by_category"]]
    if kinds := sorted({kind for row in done for kind in row["by_category"]}):
        yield Table(
            "By category",
            ("", *(label(row, rows) for row in done)),
            tuple(
                (kind, *(_by_category(row["by_category"], kind) for row in done)) for kind in kinds
            ),
            ("Tokens per second (tokens per pass).",),
        )
    yield Table("Set-up", ("", "set-up"), tuple(_set_ups(value)))


def _peer_cells(row: Value) -> tuple[str, ...]:
    if row["exit"] == NOT_RUN:
        return ("-",) * len(_PEER_COLUMNS)
    return cells(row, _PEER_COLUMNS)


def _measured_with(value: Value) -> Iterator[str]:
    pairs = []
    for weights in value["weights"]:
        types = ", ".join(f"{name} {share:.0%}" for name, share in weights["types"].items())
        size = format_bytes(weights["n_bytes"])
        pairs.append(("target", f"{weights['model']} ({size}: {types})"))
        pairs.append(("draft", weights["draft"] or "none"))
    probed, slowed = value.get("storage_bytes_per_second"), value["storage_mbps"]
    storage = "storage not probed" if probed is None else f"storage {probed / 1e9:.2f} GB/s"
    slower = "" if slowed is None else f", limited to {slowed:g} MB/s"
    pairs.append(("budget", f"{pinned(value)}; {storage}{slower}"))
    limits = ""
    if "n_threads" in value:
        limits = f", {value['n_threads']} threads; at most {value['time_limit_seconds']:g} s each"
    decoded = f"{value['n_prompts']} x {value['max_tokens']} tokens, greedy{limits}"
    pairs.append(("prompts", decoded))
    yield from labelled(pairs)
    if n := value.get("n_prompts_too_long", 0):  # older records have none
        yield describe_left_out(n, value["max_tokens"])
    yield "page cache of the models' files dropped before each process (posix_fadvise)"


def _ratio(result: Value | None) -> str:
    return "-" if result is None else f"{result['ratio']:.2f} ({describe_ratio(result)})"


def _by_category(results: Value, kind: str) -> str:
    """Return tokens per second, and tokens per pass if the program speculates."""
    result = results.get(kind)
    if result is None or result["tokens_per_second"] is None:
        return "-"
    length = result["mean_acceptance_length"]
    return f"{result['tokens_per_second']:.2f}{'' if length is None else f' ({length:.2f})'}"


def _set_ups(value: Value) -> Iterator[tuple[str, str]]:
    rows = value["peers"]
    interpreters = value["provenance"].get("interpreters", {})  # older records have none
    for row in rows:
        if row["exit"] == NOT_RUN:
            continue
        shown = {k: v for k, v in row.get("settings", {}).items() if k != "plan" and v is not None}
        parts = [", ".join(f"{key}={v}" for key, v in shown.items())]
        if row["peer"] in PROGRAMS:
            parts.insert(0, PROGRAMS[row["peer"]].about)
        if row["peer"] in interpreters:
            parts.append("on " + _interpreter(interpreters[row["peer"]]))
        if row.get("rewrite_seconds") is not None:
            parts.append(f"wrote the weights anew in {row['rewrite_seconds']:.0f} s beforehand")
        if row.get("trials"):
            parts.append("tried: " + "; ".join(map(_trial, row["trials"])))
        match = row.get("token_match")
        if match is not None and match < 1 and row["exit"] == OK:
            parts.append(f"{percent_equal(match)} of its tokens are those of specdec-plain")
        yield label(row, rows), "; ".join(filter(None, parts))


def _interpreter(interpreter: Value) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in interpreter["versions"].items())
    return f"{interpreter['path']}: {versions}"


def _trial(trial: Value) -> str:
    """Return one of the settings that were tried, and its speed."""
    known = ("tokens_per_second", "exit")
    what = " ".join(describe_tuned(k, v) for k, v in trial.items() if k not in known)
    speed = trial["tokens_per_second"]
    return f"{what}: {trial['exit'] if speed is None else f'{speed:.2f} tok/s'}"


def agreement_table(result: list[Agreement]) -> Table:
    """Return a table of the ratios of two runs over the tokens of both."""
    rows = tuple(
        (
            f"{item.name} / {item.other}",
            f"{item.first:.2f}",
            f"{item.again:.2f}",
            f"{item.difference:.1%}",
            describe_ratio(vars(item)),
        )
        for item in result
    )
    largest = max(result, key=lambda item: item.difference)
    note = f"largest difference {largest.difference:.1%}: {largest.name} / {largest.other}"
    return Table("Agreement", ("", "first", "again", "difference", "over"), rows, notes=(note,))


def pinned(value: Value) -> str:
    """Return the budget, and whether the kernel enforced it."""
    enforced = "enforced by a cgroup" if value.get("enforced") else "NOT enforced"
    return f"{format_bytes(value['memory_budget_bytes'])} ({enforced})"


def exit_of(row: Value) -> str:
    return str(row["exit"]) if row["reason"] is None else f"{row['exit']}: {row['reason']}"
