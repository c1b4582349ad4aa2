"""One thread that owns the models: it loads them, then runs steps until it is closed.

Callers send it messages (call, start, cancel, close) and wait for what comes back in queues of
their own. So Ctrl-C reaches only who waits, and nothing that computes is cut at a bytecode.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import Protocol, TypeVar

from offload.errors import SpecdecError
from offload.process.worker import POLL_SECONDS
from specdec.decoding.rounds.jobs import Job
from specdec.decoding.rounds.scheduler import Scheduler

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ModelClosed(SpecdecError):
    """A model was asked for something after its end."""

    def __init__(self) -> None:
        super().__init__("the model is closed; load it again")


class ModelElsewhere(SpecdecError):
    """A forked process asked for something of its parent's model."""

    def __init__(self) -> None:
        super().__init__(
            "the model was loaded by another process, and its threads are not in this fork of it: "
            "load it here"
        )


class CalledFromInside(SpecdecError):
    """What the engine calls waits for the engine."""

    def __init__(self) -> None:
        super().__init__(
            "a logits processor or a drafter asked for a generation inside of another one's pass: "
            "ask for it before, or in another thread"
        )


class Running(Protocol):
    """A generation, as the engine sees it."""

    is_cancelled: bool
    jobs: list[Job]
    """What the scheduler runs for it; none before `begin`."""

    def begin(self) -> None:
        """Make the jobs."""

    def end(self, error: BaseException | None = None) -> None:
        """Let nobody wait for it any more; error: what ended it, if not a job's. Idempotent."""


class Engine:
    """Runs the steps of all generations in a thread of its own.

    Attributes:
        scheduler: set by who loads the models, in the thread.
        at_end: what is closed in the thread when it ends: the models.
    """

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None
        self.at_end = ExitStack()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._running: list[Running] = []
        self._is_closing = self._has_ended = False
        self._closing_error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="specdec-engine", daemon=True)
        self._thread.start()

    # --- the thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_closing:
                self._drain_inbox(must_wait=not self._running)
                if self._running and not self._is_closing:
                    self._step()
        except BaseException as error:  # a fault of the engine itself: nobody may wait for ever
            logger.exception("the engine has ended")
            for one in self._running:
                one.end(error)
        finally:
            self._end()

    def _drain_inbox(self, *, must_wait: bool = False) -> None:
        """Do what the messages say; wait for one where there is nothing else to do."""
        if must_wait:
            self._inbox.get()()
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            message()

    def _step(self) -> None:
        """Run a pass for those that the scheduler chooses, and end what is over."""
        assert self.scheduler is not None, "generations are started when the models are loaded"
        self._cancel_jobs()
        try:
            self.scheduler.round()
        except BaseException as error:  # no sequence's own: nobody knows what state they are in
            for one in self._running:
                for job in one.jobs:
                    job.error = job.error or error
        self._end_finished()

    def _cancel_jobs(self) -> None:
        """Cancel the jobs of those that nobody wants any more, or one of whose jobs failed."""
        for one in self._running:
            if one.is_cancelled or any(job.error is not None for job in one.jobs):
                for job in one.jobs:
                    job.is_cancelled = True

    def _end_finished(self) -> None:
        assert self.scheduler is not None
        self._cancel_jobs()
        self.scheduler.dismiss()
        over = [one for one in self._running if all(job.is_over for job in one.jobs)]
        self._running = [one for one in self._running if one not in over]
        self.scheduler.totals.add(requests=len(over))
        for one in over:
            one.end()

    def _end(self) -> None:
        """End what runs and free the models."""
        self._is_closing = True
        for one in self._running:
            one.is_cancelled = True
        try:
            if self._running:
                self._end_finished()
            self.at_end.close()
        except BaseException as error:
            self._closing_error = error
        finally:
            self._has_ended = True
            self._drain_inbox()

    # --- messages, from any thread -------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Return what `function` returns, called in the thread between two steps.

        Raises what it raises; ModelClosed; CalledFromInside.
        """
        self.check_caller()
        return _take_result(self._submit(function))

    def _submit(self, function: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()

        def answer() -> None:
            try:
                if self._is_closing:
                    raise ModelClosed
                future.set_result(function())
            except BaseException as error:
                future.set_exception(error)

        self._send(answer)
        return future

    def start(self, generation: Running) -> None:
        """Let it take part from the next step on. Raises CalledFromInside."""
        self.check_caller()

        def begin() -> None:
            if self._is_closing or self.scheduler is None or generation.is_cancelled:
                generation.end(ModelClosed() if self._is_closing else None)
                return
            try:
                generation.begin()
            except BaseException as error:
                generation.end(error)
                return
            self._running.append(generation)
            for job in generation.jobs:
                self.scheduler.add(job)

        self._send(begin)

    def cancel(self, generation: Running) -> None:
        """End it soon, with the pass that runs where that serves nobody else; does not wait.

        A request that comes just before a pass may be lost: whoever waits for the end asks again.
        """
        generation.is_cancelled = True
        self._send(lambda: None if generation in self._running else generation.end())
        scheduler = self.scheduler
        served = () if scheduler is None else scheduler.in_pass
        if scheduler is not None and served and set(served) <= set(generation.jobs):
            scheduler.cancel_pass()

    def close(self) -> None:
        """End the thread and free the models; waits for that, but in the thread itself.

        Idempotent. Raises what freeing them raised.
        """
        self.close_soon()
        if self.is_current_thread:  # the frames below use what would be freed
            return
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            self._cancel_pass()
        error, self._closing_error = self._closing_error, None
        if error is not None:
            raise error

    def close_soon(self) -> None:
        """End the thread behind its step; does not wait."""
        self._is_closing = True
        self._send(lambda: None)
        self._cancel_pass()

    def _cancel_pass(self) -> None:
        if self.scheduler is not None:
            self.scheduler.cancel_pass()

    def check_caller(self) -> None:
        """Raise CalledFromInside in the thread itself, which would wait for itself."""
        if self.is_current_thread:
            raise CalledFromInside

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is in the engine's thread."""
        return self._thread is threading.current_thread()

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    def _send(self, message: Callable[[], None]) -> None:
        self._inbox.put(message)
        if self._has_ended:  # nobody else answers
            self._drain_inbox()


def _take_result(future: Future[T]) -> T:
    try:
        return future.result()
    finally:
        del future  # no cycle through the traceback of an error
