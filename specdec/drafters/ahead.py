"""AheadThread: drafting in one thread while the target's pass runs in the caller's.

The pass stays where Ctrl-C arrives, so that may come at any point of what the caller's thread does
here: as in `backends.interruptible`, there are no locks made of Python code.

The thread is started once and kept, because torch and OpenMP hold workers for every thread that
computes.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from threading import Thread
from typing import TypeVar

from backends.interruptible import JobQueue

T = TypeVar("T")

_POLL_SECONDS = 0.01
"""Between two requests to cancel: one that comes before a pass has begun is lost."""
_MAX_POLLS = 1000
"""Then the pass is over, whatever kept the caller from saying so."""


class AheadThread:
    """Runs one function at a time beside the caller."""

    def __init__(self) -> None:
        self._queue = JobQueue()
        self._should_stop = True
        self._is_busy = False
        self._error: BaseException | None = None
        self._cancel: Callable[[], None] = _nothing
        self._thread = Thread(target=self._queue.serve, name="specdec-ahead", daemon=True)
        weakref.finalize(self, self._queue.end)  # also where starting is interrupted
        self._thread.start()

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
        is cancelled. Of two errors the one that came first is raised.
        """
        self.settle()
        self._error, self._cancel, self._should_stop = None, cancel_draft, False
        try:
            self._is_busy = True
            self._queue.put(lambda: self._draft(draft, cancel_pass))
            result = run_pass()
            self._should_stop = True
            self._queue.wait_until_empty()
            self._is_busy = False
        except BaseException as error:
            self._should_stop = True
            first, self._error = self._error, None
            self.settle()
            if first is not None and isinstance(error, Exception):
                raise first from None  # it had the pass cancelled
            raise
        late, self._error = self._error, None
        if late is not None:
            raise late
        return result

    def settle(self) -> None:
        """Wait until the thread is idle, and cancel what it does. Needed after an interrupt.

        Ctrl-C meanwhile is raised once it is idle.
        """
        interrupt: KeyboardInterrupt | None = None
        while self._is_busy:
            try:
                self._should_stop = True
                self._queue.wait_until_empty(self._cancel)
                self._is_busy = False
            except KeyboardInterrupt as error:
                interrupt = error
        if interrupt is not None:
            raise interrupt

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.settle()
        self._queue.end()
        self._thread.join()

    def _draft(
        self, draft: Callable[[Callable[[], bool]], None], cancel_pass: Callable[[], None]
    ) -> None:
        """In the thread."""
        try:
            draft(lambda: self._should_stop)
        except BaseException as error:
            self._error = error
            for _ in range(_MAX_POLLS):
                if self._should_stop:
                    return
                cancel_pass()
                time.sleep(_POLL_SECONDS)


def _nothing() -> None:
    pass
