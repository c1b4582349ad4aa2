"""`specdec train-draft`: align a draft with its target on the user's own text."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from specdec.cli import options
from specdec.cli.groups import Training, TrainTarget, with_options
from specdec.cli.output import SHOWN, say, write_json, write_text
from specdec.models.names import check_local_name
from specdec.training.options import DATA, KINDS, TrainOptions

if TYPE_CHECKING:
    from specdec.training.train import ProgressBar

Out = Annotated[
    Path,
    typer.Option(
        "-o", "--out", help="Folder for the draft; an unfinished training there is continued."
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="DRAFT",
        help="Align this draft model or head, in safetensors; pair:draft.",
        show_default=False,
    ),
]
Kind = Annotated[
    str | None,
    typer.Option(
        "--kind",
        metavar="|".join(KINDS),
        help="Train a head for the target: its own, if it has one, or a new one.",
        show_default=False,
    ),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        "--text",
        metavar="FILE|DIR",
        help="Text to train on: a file, or all files of text in a folder; may be repeated.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]
TracesOfRuns = Annotated[
    Path | None,
    typer.Option(
        "--traces",
        metavar="DIR",
        help="Train on what runs with --record-traces left there, instead of text.",
        rich_help_panel=DATA,
        show_default=False,
    ),
]


@with_options
def train_draft(
    target: TrainTarget,
    out: Out,
    training: Training,
    draft: Draft = None,
    kind: Kind = None,
    text: Text = None,
    traces: TracesOfRuns = None,
    quiet: options.Quiet = False,
    json: options.Json = False,
) -> None:
    """Align a draft with its target on your own text. The same command again resumes an
    interrupted training."""
    given = TrainOptions(target, out, draft, kind, tuple(text or ()), traces, **training)
    for name in (target.model, *(() if draft is None else (draft,))):
        check_local_name(name)
    from specdec.training.train import train_draft as train

    try:
        with _progress() as bar:
            report = train(given, bar)
    except KeyboardInterrupt:
        if (out / "training").exists():
            say(f"note: the same command goes on with what is in {out}")
        raise
    if json:
        write_json(report.to_dict())
    else:
        write_text("\n".join(report.lines()) + "\n")


@contextmanager
def _progress() -> Iterator[ProgressBar | None]:
    """Yield a display of two bars with the time left, on a terminal."""
    import sys

    if not SHOWN.metrics or not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        Progress,
        TaskProgressColumn,
        TextColumn,
        TimeRemainingColumn,
    )

    columns: tuple[Any, ...] = (TextColumn("{task.description}"), BarColumn(), TaskProgressColumn())
    bar = Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True)
    with bar:
        yield _Bars(bar)


class _Bars:
    """Bars of the target's passes and of the training."""

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._tasks: dict[str, Any] = {}

    def generated(self, share: float) -> None:
        self._update("generated", "the target writes", share, 1.0)

    def scored(self, done: int, total: int) -> None:
        self._update("target", "the target reads the text", done, total)

    def trained(self, share: float, loss: float, seconds: float) -> None:
        title = "training" if math.isnan(loss) else f"training, loss {loss:.3f}"
        self._update("training", title, share, 1.0)

    def _update(self, name: str, title: str, done: float, total: float) -> None:
        if name not in self._tasks:
            self._tasks[name] = self._bar.add_task(title, total=total)
        self._bar.update(self._tasks[name], completed=done, total=total, description=title)
