"""A generation as an iterator, whose chunks any thread may take or cancel."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from offload.process.worker import POLL_SECONDS
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import ModelElsewhere
from specdec.engine.outputs import CompletionOutput, GenerationResult, StreamChunk
from specdec.engine.request import Request
from specdec.engine.session import Session


class GenerationStream:
    """Iterator over `StreamChunk`s. `result` is there once it is exhausted, cancelled or failed.

    The engine computes on also while nobody takes the chunks.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._request = session, request
        self._sequences = session.new_sequences(request)
        # One that nobody holds any more keeps no KV: it ends before the next step. Not held by its
        # finalizer: the traceback of its error may lead to this stream, which would stay for good.
        weakref.finalize(self, _abandon, session.engine, weakref.ref(request))

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        self._session.check_open()
        if self._request.is_cancelled:
            raise StopIteration
        self._session.engine.check_caller()
        try:
            self._start()
            chunk = self._request.output.get()
        except BaseException:  # Ctrl-C
            self.cancel()
            raise
        return self._taken(chunk)

    def next_nowait(self) -> StreamChunk | None:
        """Return the next chunk, or None where there is none yet.

        Raises StopIteration at the end, and what ended it.
        """
        if self._request.output.empty():
            return None
        return self._taken(self._request.output.get())

    def _taken(self, chunk: StreamChunk | None) -> StreamChunk:
        if chunk is not None:
            return chunk
        self._request.output.put(None)  # for other threads that read along
        self._session.check_open()  # what ended it may be the end of the model
        error = self._request.take_error()
        if error is not None:
            raise error
        raise StopIteration

    def start(
        self, *, is_streamed: bool = True, on_output: Callable[[], None] = lambda: None
    ) -> None:
        """Let it be computed, whether or not anybody asks for its chunks.

        Args:
            is_streamed: they are read as they come; else only the whole text is, and prompts of
                others may enter as quickly as they can.
            on_output: called by the engine's thread with every chunk, and at the end.
        """
        self._session.check_open()
        self._request.is_streamed, self._request.on_output = is_streamed, on_output
        self._start()

    def _start(self) -> None:
        if self._request.claim_start():
            self._session.start(self._request, self._sequences)

    @property
    def is_over(self) -> bool:
        """Whether no more is computed; chunks may be left."""
        return self._request.is_finished

    def take_error(self) -> BaseException | None:
        """What ended it, for who does not take its chunks; once."""
        return self._request.take_error()

    def cancel_soon(self) -> None:
        """End it with the step that runs, at the latest; does not wait for that."""
        self._session.engine.cancel(self._request)

    def cancel(self) -> None:
        """End here; what was generated so far is the result. Any thread may call it.

        A pass that serves it alone is cut short. Returns when it is over; in the engine's thread
        (in a logits processor, say) at once.
        """
        if self._session.is_forked:
            if self._request.is_finished:
                return
            raise ModelElsewhere
        self.cancel_soon()
        if self._session.engine.is_current_thread:
            return
        while not self._request.wait(POLL_SECONDS):
            self.cancel_soon()

    @property
    def is_cancelled(self) -> bool:
        return self._request.is_cancelled

    @property
    def result(self) -> GenerationResult:
        """The text so far; complete once the iterator is exhausted."""
        request = self._request
        stats = request.stats or self._session.stats_of(request)
        return GenerationResult(self.outputs, stats, request.prompt_ids)

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """Those of `result`, which takes longer: it has figures, too."""
        return tuple(output for sequence in self._sequences for output in sequence.outputs)


def _abandon(engine: Engine, request: weakref.ref[Request]) -> None:
    result = request()
    if result is not None and not result.is_finished:
        engine.cancel(result)
