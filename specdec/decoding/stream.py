"""A generation as an iterator: who is inside of it, and how it ends before its end."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Generator, Iterator
from types import GeneratorType
from typing import cast

from backends.contract.backend import BackendError
from offload.process.interruptible import POLL_SECONDS
from specdec.decoding.generation import Generation, Request
from specdec.decoding.sequences import GenerationResult, StreamChunk
from specdec.decoding.session import ModelBusy, ModelClosed, ModelElsewhere, Session
from specdec.decoding.stats import GenerationStats


class GenerationStream:
    """Iterator over `StreamChunk`s. `result` is there once it is exhausted, cancelled or failed."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self._generation = Generation(session, request)
        self._stats: GenerationStats | None = None  # once it is over
        self.is_cancelled = False
        self._chunks = cast("GeneratorType[StreamChunk, None, None]", self._run())

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        if self.is_cancelled:
            self._wait_for_its_end()
            raise StopIteration
        if self._is_computing:
            raise ModelBusy
        try:
            return next(self._chunks)
        except Exception as error:
            if self.is_cancelled and (isinstance(error, BackendError) or _is_reentry(error)):
                self._wait_for_its_end()
                raise StopIteration from error
            if _is_reentry(error):
                raise ModelBusy from error
            if self._session.is_closed and not isinstance(error, (StopIteration, ModelClosed)):
                raise ModelClosed from error
            raise

    def cancel(self) -> None:
        """End here; what was generated so far is the result. Any thread may call it.

        A pass that another thread is in is cut short, and its `next` ends the iteration. Raises
        ModelBusy inside of the generation itself (in a logits processor, say).
        """
        if self._session.is_forked and self._is_computing:
            raise ModelElsewhere  # the thread that computes is not in this process
        if self._is_computing and not self.is_computing_elsewhere:
            raise ModelBusy
        self.is_cancelled = True
        self.end(lambda: self._session.request_cancel(self))

    def end(self, poll: Callable[[], None] = lambda: None) -> None:
        """The same for what no thread computes; raises ModelBusy where one does that was not told
        to end. `poll` is called every now and then while one that was told has not ended."""
        while True:
            self._wait_for_its_end(poll)
            try:
                self._chunks.close()
                break
            except ValueError as error:  # another thread entered it meanwhile
                if not _is_reentry(error):
                    raise
                if not self.is_cancelled or self.is_computing_here:
                    raise ModelBusy from error
        self._finish()  # one that never began, too

    def _wait_for_its_end(self, poll: Callable[[], None] = lambda: None) -> None:
        """Where it was cancelled, return when no other thread is inside of it."""
        while self.is_cancelled and self.is_computing_elsewhere:
            poll()
            time.sleep(POLL_SECONDS)

    @property
    def is_computing_elsewhere(self) -> bool:
        """Whether another thread is inside of `next`."""
        return self._is_computing and not self.is_computing_here

    @property
    def is_computing_here(self) -> bool:
        """Whether this thread is: in a signal handler, say, at whatever place that interrupted."""
        if not self._is_computing:
            return False
        inside, frame = self._chunks.gi_frame, inspect.currentframe()
        while frame is not None and frame is not inside:
            frame = frame.f_back
        return frame is not None

    @property
    def _is_computing(self) -> bool:
        return inspect.getgeneratorstate(self._chunks) == inspect.GEN_RUNNING

    @property
    def result(self) -> GenerationResult:
        """The text so far; complete once the iterator is exhausted."""
        return GenerationResult(self._generation.outputs, self._stats or self._generation.stats())

    def _run(self) -> Generator[StreamChunk, None, None]:
        """The chunks, while the session's models are this generation's."""
        chunks = self._generation.chunks(self._check_going_on)
        try:
            self._session.begin(self)
            # While `close` closes what a `yield from` waits for, this frame is not on the stack.
            for chunk in chunks:  # noqa: UP028
                yield chunk
        finally:
            try:
                chunks.close()
                self._finish()
            finally:
                self._session.finish(self)

    def _check_going_on(self) -> None:
        """Before a pass: a request to cut one short may have come while none was running."""
        self._session.check_open()
        if self.is_cancelled:
            raise BackendError("the generation was cancelled")

    def _finish(self) -> None:
        if self._stats is None:
            self._stats = self._generation.stats()


def _is_reentry(error: Exception) -> bool:
    """Whether the error is Python's own, of entering a generator that is being executed."""
    return isinstance(error, ValueError) and str(error) == "generator already executing"
