"""A generation as an iterator, whose chunks any thread may take or cancel."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence

from specdec.decoding.generation import Generation, Request
from specdec.decoding.rounds.sequences import CompletionOutput, GenerationResult, StreamChunk
from specdec.decoding.session import ModelElsewhere, Session


class GenerationStream:
    """Iterator over `StreamChunk`s. `result` is there once it is exhausted, cancelled or failed."""

    def __init__(self, session: Session, request: Request) -> None:
        self._session = session
        self._generation = Generation(session, request)
        # One that nobody holds any more keeps no KV: it ends before the next round. Not held by its
        # finalizer: the traceback of its error may lead to this stream, which would stay for good.
        weakref.finalize(self, _abandon, weakref.ref(self._generation))

    def __iter__(self) -> Iterator[StreamChunk]:
        return self

    def __next__(self) -> StreamChunk:
        chunk = None
        if not self._generation.is_cancelled:
            chunk = self._session.engine.next_chunk(self._generation)
        if chunk is None:
            raise StopIteration
        return chunk

    def start(self, *, is_streamed: bool = True) -> None:
        """Let it share the next rounds, whoever asks for them, also while nobody waits for its
        chunks.

        is_streamed: they are read as they come; else only the whole text is, and prompts of others
            may enter as quickly as they can.
        """
        self._generation.is_eager, self._generation.is_streamed = True, is_streamed
        self._session.engine.start(self._generation)

    @property
    def is_over(self) -> bool:
        """Whether no more is computed; chunks may be left."""
        return self._generation.is_over

    def take_error(self) -> BaseException | None:
        """What ended it, for who does not take its chunks; once."""
        return self._generation.take_error()

    def cancel(self) -> None:
        """End here; what was generated so far is the result. Any thread may call it.

        A pass that serves it alone is cut short. Returns when it is over; inside of a pass (in a
        logits processor, say) at once.
        """
        if self._session.is_forked and self._session.engine.is_computing:
            raise ModelElsewhere  # the thread that computes is not in this process
        self._session.engine.cancel(self._generation)

    @property
    def is_cancelled(self) -> bool:
        return self._generation.is_cancelled

    @property
    def result(self) -> GenerationResult:
        """The text so far; complete once the iterator is exhausted."""
        generation = self._generation
        return GenerationResult(self.outputs, generation.stats(), generation.prompt_ids)

    @property
    def outputs(self) -> tuple[CompletionOutput, ...]:
        """Those of `result`, which takes longer: it has figures, too."""
        return self._generation.outputs


def wait_for_any(streams: Sequence[GenerationStream]) -> None:
    """Return when one of these, of one model and started, is over; they share passes meanwhile."""
    engine = streams[0]._session.engine
    engine.wait_for_any([stream._generation for stream in streams])


def _abandon(generation: weakref.ref[Generation]) -> None:
    found = generation()
    if found is not None:
        found.is_cancelled = True
