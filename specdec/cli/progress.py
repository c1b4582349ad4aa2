"""Progress on a terminal: a bar of bytes, or a spinner with the seconds of a wait of any length."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from offload.units import Progress
from specdec.cli.output import SHOWN

if TYPE_CHECKING:
    from rich.progress import Progress as Bar

DELAY_SECONDS = 1.5
"""Time without a sign until a spinner appears: shorter waits leave nothing on the screen."""
_REFRESH_SECONDS = 0.5


class Indicator:
    """A transient line on stderr that moves while a block runs; none if stderr is no terminal.

    It is a spinner, or a bar while bytes are read; after the last byte it is a spinner again, as
    measurements of unknown length may follow. `update` and `end` may be called by any thread.

    Args:
        title: description of the wait.
        detail: returns what follows the title of a spinner; called twice a second.
    """

    def __init__(self, title: str, detail: Callable[[], str] = str) -> None:
        self._title, self._detail = title, detail
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._bar: Bar | None = None
        self._is_of_bytes = self._is_finishing = False
        if SHOWN.metrics and sys.stderr.isatty():
            import rich.progress  # noqa: F401  # now: later it would miss in the plan's base memory

            threading.Thread(target=self._spin, name="specdec-spinner", daemon=True).start()
        else:
            self._ended.set()

    def update(self, done: int, total: int) -> None:
        """Show bytes: those that were read or written, and all of them."""
        with self._lock:
            if self._ended.is_set():
                return
            self._is_finishing = done >= total
            if done < total:
                bar = self._shown(is_of_bytes=True)
                bar.update(bar.task_ids[0], completed=done, total=total)
            elif self._bar is not None and self._is_of_bytes:
                self._shown(is_of_bytes=False)

    def end(self) -> None:
        """Remove the line. Idempotent."""
        with self._lock:
            self._ended.set()
            self._stop()

    def _spin(self) -> None:
        seconds = DELAY_SECONDS
        while not self._ended.wait(seconds):
            with self._lock:
                if self._ended.is_set():
                    return
                if self._bar is None:
                    self._shown(is_of_bytes=False)
                elif not self._is_of_bytes:
                    self._bar.update(self._bar.task_ids[0], description=self._text())
            seconds = _REFRESH_SECONDS

    def _text(self) -> str:
        detail = "finishing" if self._is_finishing else self._detail()
        return f"{self._title}: {detail}" if detail else self._title

    def _shown(self, *, is_of_bytes: bool) -> Bar:
        """Return the line, of bytes or a spinner; start it if it is not there."""
        if self._bar is None or self._is_of_bytes != is_of_bytes:
            self._stop()
            self._bar, self._is_of_bytes = _new_bar(is_of_bytes=is_of_bytes), is_of_bytes
            self._bar.add_task(self._text(), total=None)
            self._bar.start()
        return self._bar

    def _stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _new_bar(*, is_of_bytes: bool) -> Bar:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        SpinnerColumn,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False))
    of_bytes = (
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    more = of_bytes if is_of_bytes else (TimeElapsedColumn(),)
    return Progress(
        *columns, *more, console=Console(stderr=True), transient=True, redirect_stdout=False
    )


@contextmanager
def waiting(title: str, detail: Callable[[], str] = str) -> Iterator[Indicator]:
    """Yield the indicator of a block, which removes it at its end or earlier."""
    indicator = Indicator(title, detail)
    try:
        yield indicator
    finally:
        indicator.end()


@contextmanager
def loading_progress(title: str) -> Iterator[Progress]:
    """Yield a function that shows a bar of bytes and their speed on stderr.

    The line appears on a terminal only, and ends before the text begins: reads during the first
    pass are not shown.
    """
    with waiting(title) as indicator:
        yield indicator.update
