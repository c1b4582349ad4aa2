"""DraftWorker: a thread that drafts the next trees while the target's pass runs (PEARL).

The thread ends before a pass that runs alone. OpenMP keeps workers for every thread that computes.
If these outnumber the cores, all of them sleep after each matrix product, and waking them takes
100 us (2 cores of an EPYC), as long as a small model's product.

PEARL: Liu et al. 2024, arXiv 2408.11850.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import wait
from typing import TypeVar

from offload.process.worker import POLL_SECONDS, Worker

T = TypeVar("T")

_NICENESS = 10
"""Niceness added to the draft thread: the target's pass has priority on the cores."""
_MAX_NICE = 19


class DraftWorker:
    """A thread that runs one drafting function at a time, in parallel to the caller."""

    def __init__(self) -> None:
        self._worker: Worker | None = None

    def draft_during(
        self,
        run_pass: Callable[[], T],
        cancel_pass: Callable[[], None],
        draft: Callable[[Callable[[], bool]], None],
        cancel_draft: Callable[[], None],
    ) -> T:
        """Return the result of `run_pass`, while `draft(should_stop)` runs in the thread.

        Both have ended when this returns or raises. When the pass ends, the draft is told to stop
        after its current pass. An error in either of them cancels the other one. If both fail, the
        draft's error is raised if it came first, because it then most likely cancelled the pass.
        """
        work = _Draft(cancel_pass)
        self._worker = self._worker or Worker("specdec-draft", _be_nice)
        drafting = self._worker.submit(lambda: work.run(draft))
        try:
            result = run_pass()
        except BaseException as error:
            first = work.take_error()
            work.stop()
            while not drafting.done():
                cancel_draft()
                wait([drafting], POLL_SECONDS)
            if first is not None and isinstance(error, Exception):
                raise first from None  # it cancelled the pass
            raise
        work.stop()
        drafting.result()
        late = work.take_error()
        if late is not None:
            raise late
        return result

    def close(self) -> None:
        """End the thread; the next `draft_during` starts it again. Idempotent."""
        worker, self._worker = self._worker, None
        if worker is not None:
            worker.close()


class _Draft:
    """Drafting beside one pass, and its error if it failed."""

    def __init__(self, cancel_pass: Callable[[], None]) -> None:
        self._cancel_pass = cancel_pass
        self._should_stop = threading.Event()
        self._error: BaseException | None = None

    def run(self, draft: Callable[[Callable[[], bool]], None]) -> None:
        """Draft, in the worker's thread; cancel the pass after an error."""
        try:
            draft(self._should_stop.is_set)
        except BaseException as error:
            self._error = error
            while not self._should_stop.is_set():
                self._cancel_pass()
                self._should_stop.wait(POLL_SECONDS)

    def stop(self) -> None:
        self._should_stop.set()

    def take_error(self) -> BaseException | None:
        error, self._error = self._error, None  # no cycle through the traceback
        return error


def _be_nice() -> None:
    """Lower the priority of the calling thread and of threads that its libraries start."""
    thread = threading.get_native_id()
    present = os.getpriority(os.PRIO_PROCESS, thread)
    os.setpriority(os.PRIO_PROCESS, thread, min(present + _NICENESS, _MAX_NICE))
