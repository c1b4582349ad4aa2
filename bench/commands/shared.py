"""Shared start and end of the commands that measure."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from bench.options import UsageMistake

if TYPE_CHECKING:
    from bench.prompts.workloads import Prompt
    from specdec.run_options import RunOptions


def check_enforced(load: RunOptions, enforce: bool) -> None:
    if enforce and load.memory_budget == "auto":
        raise UsageMistake("--enforce needs a --memory-budget with a size, e.g. 3.5GiB")


def model_and_prompts(
    load: dict[str, Any], prompts: Path, n_prompts: int
) -> tuple[dict[str, Any], list[Prompt]]:
    """Return the keywords of `specdec.load` with the model's path, and the file's first prompts.

    Raises UsageMistake for a prompt that fills the context.
    """
    from bench.prompts.lengths import refuse_long
    from bench.prompts.workloads import read_prompts
    from specdec.models.names import resolve_model

    chosen = read_prompts(prompts, n_prompts)
    path = resolve_model(load["model"])
    refuse_long(chosen, path, load.get("ctx_size"))
    return {**load, "model": str(path)}, chosen


def show(kind: str, result: dict[str, Any], output: str, output_file: Path | None) -> None:
    """Write a result of one kind (`bench.process.results`) to its file, and print it."""
    from bench.process.results import write_json
    from bench.report.tables import tables
    from bench.table import text_of

    if output_file is not None:
        write_json(result, output_file)
    if output == "json":
        write_json(result, None)
    else:
        typer.echo(text_of(tables(kind, result)))
