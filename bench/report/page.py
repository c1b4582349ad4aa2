"""Report of result files: a self-contained HTML page, and its pictures as PNG files beside it."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench.peers.agreement import Agreement, agreements
from bench.process.results import (
    PEERS,
    PICTURE,
    SPEEDUP,
    SWEEP,
    Results,
    ResultsError,
    write_whole,
)
from bench.report import plots
from bench.report.data import bars, curves, depths, points
from bench.report.programs import agreement_table
from bench.report.tables import tables
from bench.table import Table

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 68rem; margin: 2rem auto;
       padding: 0 1rem }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2.5rem }
img { max-width: 100%; display: block; margin: 1rem 0 }
table { border-collapse: collapse; font-size: 13.5px; margin: 1rem 0; display: block;
        overflow-x: auto }
th, td { padding: .25rem .7rem; text-align: right; border-bottom: 1px solid #ddd;
         white-space: nowrap }
th { vertical-align: bottom; white-space: normal; min-width: 3.2rem }
th:first-child, td:first-child, td.text { text-align: left }
td.text { white-space: normal; min-width: 12rem }
.ours td { background: #eef5fa; font-weight: 600 }
p.note, details { color: #555; font-size: 13.5px } pre { white-space: pre-wrap }
"""


@dataclass(frozen=True)
class Picture:
    """Plot with its name and heading."""

    name: str
    heading: str
    png: bytes


def draw(several: Sequence[Results]) -> list[Picture]:
    """Return all pictures of these results, in the order of the page."""
    pictures = []
    for results in several:
        if some := bars(results):
            title = describe(results)
            png = plots.to_png(plots.speed_bars(some, title))
            name = results.name
            pictures.append(Picture(f"speed-{name}", f"Speed: {name}", png))
    for name, group in _budget_groups(several).items():
        if budget_points := points(group):
            heading = f"Speed against memory budget: {name}"
            png = plots.to_png(plots.speed_against_budget(budget_points, heading))
            pictures.append(Picture(f"budgets-{name}", heading, png))
    for results in several:
        if lines := curves(results):
            name = results.name
            png = plots.to_png(plots.speedup_curves(lines, describe(results)))
            pictures.append(Picture(f"curve-{name}", f"Speedup against acceptance: {name}", png))
    if counts := depths(several):
        figure = plots.acceptance_by_depth(counts, "Acceptance by depth")
        pictures.append(Picture("acceptance", "Acceptance by depth", plots.to_png(figure)))
    for results in several:
        if results.kind == PICTURE:
            name = results.name
            pictures.append(Picture(f"timeline-{name}", f"One run: {name}", results.png))
    return pictures


def _budget_groups(several: Sequence[Results]) -> dict[str, list[Results]]:
    """Group results by picture: one for each sweep, one for all speedups of a model."""
    groups: dict[str, list[Results]] = {}
    for results in several:
        if results.kind == SWEEP:
            groups.setdefault(results.name, []).append(results)
        elif results.kind == SPEEDUP:
            groups.setdefault(Path(results.value["model"]).stem, []).append(results)
    return groups


def write_report(several: Sequence[Results], path: Path) -> list[Path]:
    """Write the page to `path` and its pictures beside it; return all files.

    Raises ResultsError for results that are damaged, or that would be overwritten.
    """
    for results in several:
        _check_whole(results)
    pictures = draw(several)
    page = render(several, pictures)
    written = {path: page.encode()}
    for picture in pictures:
        written[path.with_name(f"{path.stem}-{picture.name}.png")] = picture.png
    for file in written:
        if any(file.resolve() == results.path.resolve() for results in several):
            raise ResultsError(f"{file} is one of the results: name another page with -o")
    for file, data in written.items():
        write_whole(file, data)
    return list(written)


def _check_whole(results: Results) -> None:
    """Raise ResultsError if something that the page shows is missing or of another type."""
    try:
        if [*bars(results), *curves(results)]:
            describe(results)
        points([results])
        depths([results])
        tables(results.kind, results.value)
        list(_provenance(results))
        _budget_groups([results])
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        raise ResultsError(
            f"{results.path} is damaged, or of another version of specdec "
            f"({type(error).__name__}: {error}): measure again"
        ) from error


def render(several: Sequence[Results], pictures: Sequence[Picture]) -> str:
    """Return the page, which loads nothing from elsewhere."""
    parts = [
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8"><title>specdec: measurements</title>',
        f"<style>{_STYLE}</style></head><body><h1>specdec: measurements</h1>",
    ]
    for picture in pictures:
        data = base64.b64encode(picture.png).decode("ascii")
        parts.append(f"<h2>{escape(picture.heading)}</h2>")
        parts.append(f'<img alt="{escape(picture.heading)}" src="data:image/png;base64,{data}">')
    if agreement := agreement_of(several):
        parts += _table(agreement_table(agreement), "Agreement of two runs")
    for results in several:
        for table in tables(results.kind, results.value):
            parts += _table(table, f"{table.heading}: {results.name}")
        parts += _provenance(results)
    return "\n".join([*parts, "</body></html>"]) + "\n"


def agreement_of(several: Sequence[Results]) -> list[Agreement]:
    """Return the agreement of the first two results of `peers`, if they share programs."""
    runs = [results.value for results in several if results.kind == PEERS]
    return list(agreements(*runs[:2])) if len(runs) > 1 else []


def describe(results: Results) -> str:
    """Return one line: models, budget and storage limit."""
    from offload.units import format_bytes

    value = results.value
    names = [w["model"] for w in value.get("weights", [])] or [value.get("model", results.name)]
    n_bytes = value.get("memory_budget_bytes") or value["plan"]["memory_budget_bytes"]
    budget = format_bytes(n_bytes)
    slowed = value.get("storage_mbps")
    storage = "" if slowed is None else f", storage limited to {slowed:g} MB/s"
    return f"{', '.join(Path(name).name for name in names)} in {budget}{storage}"


def _table(table: Table, heading: str) -> Iterable[str]:
    yield f"<h2>{escape(heading)}</h2>"
    if table.about:
        yield f'<p class="note">{"<br>".join(map(escape, table.about))}</p>'
    head = "".join(f"<th>{escape(name)}</th>" for name in table.columns)
    yield f"<table><thead><tr>{head}</tr></thead><tbody>"
    for row in table.rows:
        cells = "".join(_cell(text) for text in row)
        ours = ' class="ours"' if row[0].startswith("specdec") else ""
        yield f"<tr{ours}>{cells}</tr>"
    yield "</tbody></table>"
    if table.notes:
        yield f'<p class="note">{"<br>".join(map(escape, table.notes))}</p>'


def _cell(text: str) -> str:
    kind = ' class="text"' if len(text) > 24 else ""
    return f"<td{kind}>{escape(text)}</td>"


def _provenance(results: Results) -> Iterable[str]:
    provenance = _find_provenance(results.value)
    if provenance is None:
        return
    lines = [
        f"{results.path.name}: {provenance.get('date')}, revision {provenance.get('git_revision')}",
        " ".join(str(word) for word in provenance.get("argv", [])),
        ", ".join(f"{key} {value}" for key, value in provenance.get("machine", {}).items()),
        ", ".join(f"{key} {value}" for key, value in provenance.get("storage", {}).items()),
        ", ".join(f"{key} {value}" for key, value in provenance.get("versions", {}).items()),
    ]
    text = escape("\n".join(lines))
    yield f"<details><summary>Where this comes from</summary><pre>{text}</pre></details>"


def _find_provenance(value: Mapping[str, Any]) -> Mapping[str, Any] | None:
    lines = value.get("settings") or [{}]
    provenance: Mapping[str, Any] | None = value.get("provenance") or lines[-1].get("provenance")
    return provenance
