"""Start of commands that load a model: a limited process with --enforce, then the model."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import typer

from specdec.cli.enforce import enforced_bytes, run_enforced
from specdec.cli.libraries import import_for_good
from specdec.cli.notes import check_models, note_plan, say_plan_notes
from specdec.cli.output import SHOWN, say
from specdec.cli.progress import loading_progress
from specdec.run_options import RunOptions

if TYPE_CHECKING:
    from specdec.api import LLM


def run_again_enforced(context: typer.Context, memory_budget: str | int) -> None:
    """Run this command again under the limit and exit with its code; no-op in that child."""
    if enforced_bytes() is None:
        raise typer.Exit(run_enforced("specdec", context.obj.argv, memory_budget))


@contextmanager
def open_model(asked: RunOptions, loaded: RunOptions) -> Iterator[LLM]:
    """Open a model and print notes. asked: options as given; loaded: options to open it with."""
    check_models(asked)
    from specdec.api import LLM

    with loading_progress(f"loading {asked.model}") as progress:
        llm = LLM(loaded, progress, import_for_good)
    with llm:
        note_plan(asked, llm.plan)
        say_plan_notes(llm.plan)
        for line in llm.plan.lines() if SHOWN.plan else ():
            say(line)
        yield llm
