"""`specdec-bench report`: results of any kind on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.options import UsageMistake, check_writable


def report_command(
    results: Annotated[
        list[Path],
        typer.Argument(
            metavar="RESULTS...",
            help="JSON of peers, speedup, curve, policy; JSON lines of sweep; PNG of timeline.",
            show_default=False,
        ),
    ],
    output_file: Annotated[
        Path, typer.Option("-o", "--output-file", help="The page; its pictures go beside it.")
    ] = Path("report.html"),
    within: Annotated[
        float | None,
        typer.Option(
            "--within",
            min=0.0,
            help="For two runs of peers: percent that a ratio may differ by; else exit code 1.",
        ),
    ] = None,
) -> None:
    """Write a self-contained HTML page with tables and plots, and the plots as PNG files."""
    from bench.process.results import read_all
    from bench.report.page import agreement_of, write_report
    from bench.report.programs import agreement_table
    from bench.table import text_of

    check_writable("--output-file", output_file)
    several = read_all(results)
    for path in write_report(several, output_file):
        typer.echo(path)
    agreements = agreement_of(several)
    if agreements:
        typer.echo(text_of([agreement_table(agreements)]))
    elif within is not None:
        raise UsageMistake("--within compares two runs of peers with programs in common: give both")
    if within is not None and max(agreement.difference for agreement in agreements) > within / 100:
        raise typer.Exit(1)
