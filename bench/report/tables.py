"""The report's tables: what `specdec-bench` prints, for a page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.decode.curve_figures import HEADINGS, best_line, cells
from bench.decode.table import ROWS
from bench.figures import describe_ratio, lossy_mark
from bench.peers.compare import label
from bench.peers.table import COLUMNS, category_cell
from bench.peers.table import cells as peer_cells
from bench.process.results import BUDGETS, CURVE, PEERS, POLICY, PREDICTION, SPEEDUP, SWEEP, Results
from bench.report.data import series_name
from offload.units import GIB, format_bytes

KINDS = ("plain", "speculative")
_PREDICTED = ("predicted", "measured", "error")


@dataclass(frozen=True)
class Table:
    """Texts; the first column names the row."""

    heading: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


def tables(results: Results) -> list[Table]:
    """One or more for each kind of results; none for a trace."""
    makers = {
        PEERS: _peers, SPEEDUP: _speedup, BUDGETS: _budgets, SWEEP: _sweep, CURVE: _curve,
        POLICY: _policy, PREDICTION: _prediction,
    }  # fmt: skip
    make = makers.get(results.kind)
    return [] if make is None else make(results)


def _peers(results: Results) -> list[Table]:
    value, name = results.value, results.name
    rows = value["peers"]
    kept = "enforced by the kernel" if value["enforced"] else "not enforced"
    note = (
        f"{format_bytes(value['memory_budget_bytes'])}, {kept}; {value['n_prompts']} prompts x "
        f"{value['max_tokens']} tokens, greedy; slow programs measure fewer, as the table says."
    )
    figures = Table(
        f"Programs: {name}",
        ("", *(heading for heading, *_ in COLUMNS), "exit"),
        tuple((label(row, rows), *peer_cells(row), _exit(row)) for row in rows),
        note,
    )
    return [figures, *_ratios(value, name), *_categories(rows, name)]


def _exit(row: Mapping[str, Any]) -> str:
    return str(row["exit"]) if row["reason"] is None else f"{row['exit']}: {row['reason']}"


def _ratios(value: Mapping[str, Any], name: str) -> list[Table]:
    ratios = value["ratios"]
    names = [one for one in ratios if ratios[one]]
    if not names:
        return []
    rows = tuple(
        (
            one,
            *(
                f"{ratios[one][other]['ratio']:.2f} ({describe_ratio(ratios[one][other])})"
                if other in ratios[one]
                else "-"
                for other in names
            ),
        )
        for one in names
    )
    note = "Speed of the row / speed of the column, on the tokens that both decoded (how many)."
    return [Table(f"Ratios: {name}", ("", *names), rows, note)]


def _categories(rows: Sequence[Mapping[str, Any]], name: str) -> list[Table]:
    kinds = sorted({kind for row in rows for kind in row["by_category"]})
    done = [row for row in rows if row["by_category"]]
    if not kinds:
        return []
    lines = tuple(
        (kind, *(category_cell(row["by_category"].get(kind)) for row in done)) for kind in kinds
    )
    columns = ("", *(label(row, rows) for row in done))
    return [Table(f"By category: {name}", columns, lines, "Tokens per second (tokens per pass).")]


def _speedup(results: Results) -> list[Table]:
    value = results.value
    columns = {"specdec, plain": value["plain"], "specdec, speculative": value["speculative"]}
    if value.get("peer"):
        columns[value["peer"]["name"]] = value["peer"]
    rows = tuple(
        (
            name + lossy_mark(stats),
            *(_figure(stats, key, form, unit) for _, key, form, unit in ROWS),
        )
        for name, stats in columns.items()
    )
    headings = ("", *(heading for heading, *_ in ROWS))
    equal = f"{value['prompts_equal']} of {value['n_prompts']}"
    note = f"Speculative is {value['speedup']:.2f} times plain; {equal} texts are equal."
    if value.get("efficiency") is not None:
        note += f" Efficiency {value['efficiency']:.2f}: of tokens per pass times T(1) / T(N)."
    for mode, found in value.get("ratios", {}).items():
        note += f" {mode.capitalize()} is {found['ratio']:.2f} times {value['peer']['name']}, over "
        note += f"the same {describe_ratio(found)}."
    return [Table(f"Plain and speculative: {results.name}", headings, rows, note)]


def _figure(stats: Mapping[str, Any], key: str, form: str, unit: float) -> str:
    return form.format(stats[key] / unit) if stats.get(key) is not None else "-"


def _budgets(results: Results) -> list[Table]:
    rows = tuple(
        (row["memory_budget"], "killed by the kernel", "", "", "", "")
        if row["killed"]
        else (
            row["memory_budget"],
            f"{row['tokens_per_second']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['streamed_bytes_per_pass'] / 1e9:.2f}",
            f"{row['peak_memory_bytes'] / GIB:.2f}",
            f"{row['n_equal_texts']} of {row['n_texts']}{lossy_mark(row)}",
        )
        for row in results.value["budgets"]
    )
    columns = ("budget", "tok/s", "tok/pass", "GB/pass", "peak GiB", "equal texts")
    return [Table(f"Budgets: {results.name}", columns, rows)]


def _policy(results: Results) -> list[Table]:
    value = results.value
    rows = tuple(
        (
            row["way"] + lossy_mark(row),
            f"{row['tokens_per_second']:.2f}",
            f"{row['mean_acceptance_length']:.2f}",
            f"{row['mean_tree_nodes']:.1f}",
            f"{row['draft_share']:.0%}",
        )
        for row in value["rows"]
    )
    note = (
        f"The automatic size makes {value['auto_versus_best_fixed']:.3f} times the speed of the "
        f"best of the others ({value['best_fixed']})."
    )
    columns = ("", "tok/s", "tok/pass", "tree nodes", "drafting")
    return [Table(f"Sizes of trees: {results.name}", columns, rows, note)]


def _prediction(results: Results) -> list[Table]:
    value = results.value
    rows = tuple(_prediction_row(setting, kind) for setting in value["settings"] for kind in KINDS)
    note = (
        f"Tokens per pass are the measured ones. Largest error {value['largest_error']:.1%}, of "
        "seconds per pass and tokens per second."
    )
    pairs = tuple(f"{name}, {what}" for name in ("s/pass", "tok/s") for what in _PREDICTED)
    columns = ("model", "budget", "storage MB/s", "rows", *pairs)
    return [Table(f"Prediction: {results.name}", columns, rows, note)]


def _prediction_row(setting: Mapping[str, Any], kind: str) -> tuple[str, ...]:
    found, mbps = setting[kind], setting["storage_mbps"]
    cells = []
    for key in ("pass_seconds", "tokens_per_second"):
        cells += [f"{found[side][key]:.3f}" for side in ("predicted", "measured")]
        cells.append(f"{found['error'][key]:+.1%}")
    return (
        Path(setting["model"]).name,
        setting["memory_budget"],
        "full" if mbps is None else f"{mbps:g}",
        str(found["n_rows"]),
        *cells,
    )


def _sweep(results: Results) -> list[Table]:
    rows = tuple(_sweep_row(line) for line in results.value["settings"])
    columns = (
        "budget",
        "storage MB/s",
        "tree",
        "tok/s",
        "predicted",
        "tok/pass",
        "GB/pass",
        "anon GiB",
        "prompts",
        "tokens",
        "exit",
    )
    return [Table(f"Sweep: {results.name}", columns, rows)]


def _sweep_row(line: Mapping[str, Any]) -> tuple[str, ...]:
    setting = line["setting"]
    mbps = setting["storage_mbps"]
    return (
        format_bytes(setting["memory_budget_bytes"]),
        "full" if mbps is None else f"{mbps:g}",
        series_name(setting["num_draft_tokens"]),
        _figure(line, "tokens_per_second", "{:.2f}", 1.0),
        _figure(line, "predicted_tokens_per_second", "{:.2f}", 1.0),
        _figure(line, "mean_acceptance_length", "{:.2f}", 1.0),
        _figure(line, "bytes_per_pass", "{:.2f}", 1e9),
        _figure(line, "peak_anonymous_bytes", "{:.2f}", GIB),
        str(line["n_prompts"]),
        str(line["n_tokens"]),
        _exit(line),
    )


def _curve(results: Results) -> list[Table]:
    value = results.value
    n_equal = value["n_texts"] - len(value["differences"])
    note = (
        f"Every draft token is right with the probability in the first column; {best_line(value)}. "
        f"{n_equal} of {value['n_texts']} texts equal plain decoding's."
    )
    rows = tuple(cells(point) for point in value["points"])
    return [Table(f"Speedup against acceptance: {results.name}", HEADINGS, rows, note)]
