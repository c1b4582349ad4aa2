"""AheadThread: drafting in one thread while the target's pass runs in the caller's.

The pass stays where Ctrl-C arrives, so that may come at any point of what the caller's thread does
here: as everywhere in `offload.process.interruptible`, there are no locks made of Python code.

The thread is started once and kept, because torch and OpenMP hold workers for every thread that
computes.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from offload.process.interruptible import POLL_SECONDS, Worker

T = TypeVar("T")

_NICENESS = 10
"""The pass goes first: drafting takes what it leaves of the cores."""
_MAX_POLLS = 1000
"""Then the pass is over, whatever kept the caller from saying so."""


class AheadThread(Worker):
    """Runs one function at a time beside the caller."""

    def __init__(self) -> None:
        super().__init__("specdec-ahead", _NICENESS)

    def beside(
        self,
        run_pass: Callable[[], T],
        cancel_pass: Callable[[], None],
        draft: Callable[[Callable[[], bool]], None],
        cancel_draft: Callable[[], None],
    ) -> T:
        """The result of `run_pass`, while `draft(should_stop)` runs in the thread.

        Both have ended when this returns or raises. When the pass ends, the draft is told to stop,
        and finishes what it has begun. After an error in either of them, or Ctrl-C, the other one
        is cancelled. Where both fail, the draft's error is raised if it was there when the pass's
        was caught: it most likely had the pass cancelled.
        """
        self.settle()
        work = _Draft(cancel_pass, cancel_draft)
        try:
            self.begin(lambda: work.run(draft), work.cancel)
            result = run_pass()
            work.should_stop = True
            self.wait()
        except BaseException as error:
            work.should_stop = True
            first = work.take_error()
            self.settle()
            if first is not None and isinstance(error, Exception):
                raise first from None  # it had the pass cancelled
            raise
        late = work.take_error()
        if late is not None:
            raise late
        return result


class _Draft:
    """What runs beside one pass, and what came of it."""

    def __init__(self, cancel_pass: Callable[[], None], cancel_draft: Callable[[], None]) -> None:
        self.should_stop = False
        self._cancel_pass, self._cancel_draft = cancel_pass, cancel_draft
        self._error: BaseException | None = None

    def run(self, draft: Callable[[Callable[[], bool]], None]) -> None:
        """In the thread."""
        try:
            draft(lambda: self.should_stop)
        except BaseException as error:
            self._error = error
            for _ in range(_MAX_POLLS):
                if self.should_stop:
                    return
                self._cancel_pass()
                time.sleep(POLL_SECONDS)

    def cancel(self) -> None:
        self.should_stop = True
        self._cancel_draft()

    def take_error(self) -> BaseException | None:
        error, self._error = self._error, None  # no cycle through the traceback
        return error
