"""GenerationStream: an iterator over a request's chunks, usable and cancellable from any thread."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator

from offload.process.worker import POLL_SECONDS
from specdec.engine.engine import Engine
from specdec.engine.engine_thread import ModelElsewhere
from specdec.engine.sequences.outputs import (
    CompletionOutput,
    GenerationResult,
    PromptProgress,
    StreamChunk,
)
from specdec.engine.sequences.request import Request
from specdec.engine.session import Session
from specdec.sampling.logprobs import PromptLogprobs


class GenerationStream:
    """Iterator over `StreamChunk`s; `result` is complete once it is exhausted, cancelled or failed.

    The engine goes on computing while no chunks are taken.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._request = session, request
        self._sequences = session.new_sequences(request)
        # An unreferenced stream is cancelled, so that it keeps no KV. The finalizer has a weak
        # reference: the request's error may refer to this stream, which would then never be freed.
        weakref.finalize(self, _abandon, session.engine, weakref.ref(request))

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        self._session.engine.check_open()
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

        Raises StopIteration at the end, or the error that ended it.
        """
        if self._request.output.empty():
            return None
        return self._taken(self._request.output.get())

    def _taken(self, chunk: StreamChunk | None) -> StreamChunk:
        if chunk is not None:
            return chunk
        self._request.output.put(None)  # for other threads that read this stream
        error = self._request.take_error()
        if error is not None:
            raise error
        self._session.engine.check_open()  # it may have ended because the model was closed
        raise StopIteration

    def start(
        self, *, streams_output: bool = True, on_output: Callable[[], None] = lambda: None
    ) -> None:
        """Start the computation before any chunk is asked for.

        Args:
            streams_output: whether chunks are read as they come; if not, prompts of other requests
                are computed in chunks as large as they can be.
            on_output: called by the engine's thread with every chunk, with progress of the prompt,
                and at the end.
        """
        self._session.engine.check_open()
        self._request.streams_output, self._request.on_output = streams_output, on_output
        self._start()

    def _start(self) -> None:
        if self._request.claim_start():
            self._session.start(self._request, self._sequences)

    @property
    def is_over(self) -> bool:
        """Whether nothing more is computed; unread chunks may be left."""
        return self._request.is_finished

    def take_error(self) -> BaseException | None:
        """Return and clear the error that ended it, for callers that take no chunks."""
        return self._request.take_error()

    def cancel_soon(self) -> None:
        """Cancel it by the end of the current step, without waiting."""
        self._session.engine.cancel(self._request)

    def cancel(self) -> None:
        """Cancel it and wait for its end; `result` has what was generated. Any thread may call it.

        A pass that serves only cancelled requests is cut short. In the engine's thread (in a logits
        processor, say) this returns at once.
        """
        if self._session.engine.is_forked:
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
        """Outputs and statistics so far; complete once the iterator is exhausted."""
        request = self._request
        stats = request.stats or self._session.statistics.of_request(request)
        return GenerationResult(self.outputs, stats, request.prompt_ids, self.prompt_logprobs)

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens, if requested, once it is computed."""
        return self._sequences[0].prompt_logprobs

    @property
    def progress(self) -> PromptProgress | None:
        """Progress of the prompt; None until it is scheduled."""
        return self._request.progress

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """Outputs of `result`, without the time that its statistics take."""
        return tuple(output for sequence in self._sequences for output in sequence.outputs)


def _abandon(engine: Engine, request: weakref.ref[Request]) -> None:
    alive = request()
    if alive is not None and not alive.is_finished:
        engine.cancel(alive)
