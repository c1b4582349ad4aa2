"""Threads that wait for tokens run the rounds themselves, in turn.

Whoever waits while nobody computes becomes the *leader*: it runs one round for all texts that are
waited for, hands out what it brought, and looks whether its own was among it. One caller alone so
computes in its own thread, as ever; of several callers each pass serves all.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

from offload.errors import SpecdecError
from offload.process.interruptible import POLL_SECONDS, uninterrupted
from specdec.decoding.rounds.controller import Controller
from specdec.decoding.rounds.jobs import Job
from specdec.decoding.rounds.scheduler import Scheduler
from specdec.decoding.rounds.sequences import StreamChunk


class CalledFromInside(SpecdecError):
    """A generation waits for another one that it computes itself."""

    def __init__(self) -> None:
        super().__init__(
            "a logits processor, a drafter or a signal handler asked for a generation inside of "
            "another one's pass: ask for it before, or in another thread"
        )


class Waiting(Protocol):
    """What a caller waits for: a generation."""

    chunks: deque[StreamChunk]
    """That nobody has taken yet."""
    is_cancelled: bool

    @property
    def jobs(self) -> list[Job]:
        """What the scheduler runs for it; made by the first call."""

    @property
    def is_over(self) -> bool:
        """Whether all of them have been dismissed."""

    def end(self) -> None:
        """No round will bring any more of it; called once."""

    def take_error(self) -> BaseException | None:
        """What ended it, once."""


class Engine:
    """Rounds for the generations of any number of threads.

    Args:
        check_open: raises where the models cannot be used any more.
    """

    def __init__(
        self, scheduler: Scheduler, controller: Controller, check_open: Callable[[], None]
    ) -> None:
        self.scheduler, self._controller = scheduler, controller
        self._check_open = check_open
        self._turn = threading.Condition()
        self._leader: int | None = None  # the thread inside of a round
        self._n_between = 0  # threads that wait for the end of one, or are behind it
        self._started: list[Waiting] = []
        self.at_the_end: Callable[[], None] | None = None
        """Called after the round that this thread is inside of."""

    def next_chunk(self, wanted: Waiting) -> StreamChunk | None:
        """Its next chunk, as soon as there is one; None at its end.

        Raises what ended it, and CalledFromInside.
        """
        self._check()
        with self._turn:
            self.start(wanted)
            self._wait(wanted, lambda: bool(wanted.chunks) or wanted.is_over)
            if wanted.chunks:
                return wanted.chunks.popleft()
        self._check_open()  # what ended it may be the end of the model
        error = wanted.take_error()
        if error is not None:
            raise error
        return None

    def wait_for_any(self, started: Sequence[Waiting]) -> None:
        """Return when one of these is over."""
        self._check()
        with self._turn:
            self._wait(started[0], lambda: any(one.is_over for one in started))

    def _check(self) -> None:
        self._check_open()
        if self.is_leading_here:
            raise CalledFromInside

    def _wait(self, wanted: Waiting, is_there: Callable[[], bool]) -> None:
        """Run rounds, or wait for those of others, until that is so.

        Where Ctrl-C cuts a round short, `wanted` is over; other threads' texts go on.
        """
        while not is_there():
            try:
                if self._leader is None and not self._n_between:
                    self._lead()
                else:
                    self._turn.wait()
            except BaseException:
                wanted.is_cancelled = True
                raise
            if not is_there():
                self._check_open()

    def start(self, wanted: Waiting) -> None:
        """Queue it, unless that was done."""
        with self._turn:
            if wanted not in self._started and not wanted.is_over:
                jobs = wanted.jobs  # what is wrong with them comes up here
                self._queue(wanted, jobs)

    @uninterrupted
    def _queue(self, wanted: Waiting, jobs: Sequence[Job]) -> None:
        self._started.append(wanted)
        for job in jobs:
            self.scheduler.add(job)

    @uninterrupted
    def _lead(self) -> None:
        """One round, without the lock."""
        self._leader = threading.get_ident()
        self._cancel_jobs()
        self._turn.release()
        try:
            self.scheduler.round()
        finally:
            self._turn.acquire()
            self._tidy()

    def _tidy(self) -> None:
        """Let go of what is over; nobody else is inside of a round."""
        self._leader = threading.get_ident()  # a signal handler that closes the model waits for it
        try:
            self._let_go()
        finally:
            self._leader = None
            self._turn.notify_all()
            at_the_end, self.at_the_end = self.at_the_end, None
            if at_the_end is not None:
                at_the_end()

    def _cancel_jobs(self) -> None:
        """Of those that nobody wants any more."""
        for one in self._started:
            if one.is_cancelled or any(job.error is not None for job in one.jobs):
                for job in one.jobs:
                    job.is_cancelled = True

    def _let_go(self) -> None:
        self._cancel_jobs()
        self.scheduler.dismiss()
        over = [one for one in self._started if all(job.is_over for job in one.jobs)]
        self._started = [one for one in self._started if one not in over]
        self._controller.totals.add(requests=len(over))
        for one in over:
            one.end()

    def cancel(self, unwanted: Waiting) -> None:
        """End it: by the next pass, or the pass itself where it serves nobody else.

        Returns when it is over; inside of a round, where that cannot be waited for, at once.
        """
        unwanted.is_cancelled = True
        while True:
            if self.is_leading_here:
                self._cancel_pass(unwanted)
                return
            with self._turn:
                if unwanted.is_over:  # who leads may run many more rounds for others
                    return
                if unwanted not in self._started:
                    unwanted.end()  # it never began
                    return
                if self._leader is None:
                    self._tidy()
                    return
                self._cancel_pass(unwanted)
                self._turn.wait(POLL_SECONDS)

    def _cancel_pass(self, unwanted: Waiting) -> None:
        served = self.scheduler.in_pass
        if unwanted in self._started and served and set(served) <= set(unwanted.jobs):
            self.scheduler.n_cancels += 1  # first: a pass that it ends knows why
            self._controller.request_cancel()

    @property
    def is_leading_here(self) -> bool:
        """Whether this thread is inside of a round, further up its stack."""
        return self._leader == threading.get_ident()

    @property
    def is_computing(self) -> bool:
        return self._leader is not None

    def request_cancel(self) -> None:
        """End a running pass soon with an error."""
        self._controller.request_cancel()

    @contextmanager
    def between_rounds(self) -> Iterator[None]:
        """A block beside which no round runs: behind the one that runs now, if there is one."""
        if self.is_leading_here:
            raise CalledFromInside
        with self._turn:
            self._n_between += 1
            try:
                while self._leader is not None:
                    self._turn.wait()
                yield
            finally:
                self._n_between -= 1
                self._turn.notify_all()

    def end_all(self, poll_seconds: float) -> None:
        """End everything that has begun, and wait for it."""
        with self._turn:
            for one in self._started:
                for job in one.jobs:
                    job.is_cancelled = True
            while self._leader is not None:
                self._controller.request_cancel()
                self._turn.wait(poll_seconds)
            self._tidy()
