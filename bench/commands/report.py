"""`specdec-bench report`: results of any kind on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import check_writable


def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="JSON of peers, speedup, budgets, curve, policy, predict; JSON lines of sweep; "
            "PNG of timeline.",
            show_default=False,
        ),
    ],
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", help="The page; its pictures go beside it.")
    ] = Path("report.html"),
) -> None:
    """One self-contained HTML page with tables and plots, and the plots as PNG files."""
    from bench.process.results import read_all
    from bench.report.page import write_report

    check_writable("--output-file", output_file)
    for path in write_report(read_all(results), output_file):
        typer.echo(path)
