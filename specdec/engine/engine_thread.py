"""A thread that owns the models, and the messages that callers send it."""

from __future__ import annotations

import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import ExitStack
from queue import Empty, SimpleQueue
from typing import TypeVar

from offload.errors import SpecdecError
from offload.process.worker import POLL_SECONDS

logger = logging.getLogger(__name__)
T = TypeVar("T")


class ModelClosed(SpecdecError):
    """A closed model was used."""

    def __init__(self) -> None:
        super().__init__("the model is closed; load it again")


class ModelElsewhere(SpecdecError):
    """A forked process used its parent's model."""

    def __init__(self) -> None:
        super().__init__(
            "the model was loaded by another process, and its threads are not in this fork of it: "
            "load it here"
        )


class CalledFromInside(SpecdecError):
    """A function that the engine calls would wait for the engine."""

    def __init__(self) -> None:
        super().__init__(
            "a logits processor or a drafter asked for a generation inside of another one's pass: "
            "ask for it before, or in another thread"
        )


class EngineThread(ABC):
    """A thread that executes `run` until it is closed; other threads send it messages.

    Ctrl-C reaches only threads that wait for an answer; it never interrupts a computation.

    Attributes:
        at_end: exit stack of the models, closed in the thread when it ends.
    """

    def __init__(self) -> None:
        self.at_end = ExitStack()
        self._inbox: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._is_closing = self._has_ended = False
        self._closing_error: BaseException | None = None
        self._process_id = os.getpid()
        self._thread = threading.Thread(target=self._main, name="specdec-engine", daemon=True)
        self._thread.start()

    # --- in the thread -------------------------------------------------------------------------

    @abstractmethod
    def run(self) -> None:
        """Work until `is_closing`."""

    @abstractmethod
    def abort(self, error: BaseException | None) -> None:
        """End all running requests, before the models are freed.

        error: a fault of the engine itself; None at a normal end.
        """

    def end_by(self, error: BaseException) -> None:
        """End all running requests with an error, and the thread: there are no models any more."""
        self._is_closing = True
        self.abort(error)

    @abstractmethod
    def cancel_pass(self) -> None:
        """End a running forward pass soon; any thread may call it."""

    def drain_inbox(self, *, must_wait: bool = False) -> None:
        """Handle all messages in the inbox; wait for one first if `must_wait`."""
        if must_wait:
            self._inbox.get()()
        while True:
            try:
                message = self._inbox.get_nowait()
            except Empty:
                return
            message()

    def _main(self) -> None:
        fault: BaseException | None = None
        try:
            self.run()
        except BaseException as error:  # no caller may wait for ever
            logger.exception("the engine has ended")
            fault = error
        self._is_closing = True
        try:
            self.abort(fault)
            self.at_end.close()
        except BaseException as error:
            self._closing_error = error
        finally:
            del fault  # no cycle through the traceback
            self._has_ended = True
            self.drain_inbox()

    # --- from any thread -----------------------------------------------------------------------

    def call(self, function: Callable[[], T]) -> T:
        """Call `function` in the thread between two steps, and return its result.

        Raises its errors, ModelClosed or CalledFromInside.
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

        self.send(answer)
        return future

    def send(self, message: Callable[[], None]) -> None:
        """Let the thread call `message` between two steps, without waiting."""
        self._inbox.put(message)
        if self._has_ended:  # no thread is left to answer
            self.drain_inbox()

    def close(self) -> None:
        """End the thread and free the models; wait for both, except in the thread itself.

        Idempotent. Re-raises an error of freeing the models.
        """
        self.close_soon()
        if self.is_current_thread:  # calling frames still use the models
            return
        while self._thread.is_alive():
            self._thread.join(POLL_SECONDS)
            self.cancel_pass()
        error, self._closing_error = self._closing_error, None
        if error is not None:
            raise error

    def close_soon(self) -> None:
        """End the thread after its current step, without waiting."""
        self._is_closing = True
        self.send(lambda: None)
        self.cancel_pass()

    def check_caller(self) -> None:
        """Raise CalledFromInside in the engine's thread, which would wait for itself."""
        if self.is_current_thread:
            raise CalledFromInside

    @property
    def is_current_thread(self) -> bool:
        """Whether the caller is in the engine's thread."""
        return self._thread is threading.current_thread()

    @property
    def is_closing(self) -> bool:
        return self._is_closing

    @property
    def is_forked(self) -> bool:
        """Whether this is a fork of the thread's process, without the thread."""
        return os.getpid() != self._process_id

    @property
    def is_open(self) -> bool:
        return not self.is_closing and not self.is_forked

    def check_open(self) -> None:
        """Raise ModelClosed after `close`, ModelElsewhere in a fork."""
        if self.is_closing:
            raise ModelClosed
        if self.is_forked:
            raise ModelElsewhere


def _take_result(future: Future[T]) -> T:
    try:
        return future.result()
    finally:
        del future  # no cycle through the traceback of an error
