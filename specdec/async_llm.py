"""An LLM for asyncio programs: each generation runs in a thread, its chunks come to the event loop.

llm = AsyncLLM(specdec.load("TARGET", "DRAFT"))
async for chunk in llm.stream("def fibonacci(n):", max_tokens=64):
    print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any

from typing_extensions import Self

from offload.errors import SpecdecError
from specdec.api import LLM
from specdec.decoding.rounds.sequences import GenerationResult, StreamChunk
from specdec.decoding.stream import GenerationStream
from specdec.sampling.logprobs import TopLogprobs
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import Prompt

MAX_CHUNKS_AHEAD = 64
"""Chunks that a text may be ahead of its reader: then its thread waits."""
_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class AsyncChunk(StreamChunk):
    """What one round added, with what was asked for about its tokens."""

    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None


class AsyncLLM:
    """A loaded LLM for any number of tasks of one event loop.

    The LLM stays its owner's: closing it ends what runs here.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> GenerationResult:
        """Generate to the end; the arguments are those of `LLM.stream`.

        Where the task is cancelled, so is the generation.
        """
        async with self.stream(prompt, sampling, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    def stream(
        self, prompt: Prompt, sampling: SamplingParams | None = None, **options: Any
    ) -> AsyncStream:
        """An async iterator over chunks; the arguments are those of `LLM.stream`, and what that
        raises for them comes from `started` or from the first chunk asked for."""
        return AsyncStream(lambda: self.llm.stream(prompt, sampling, **options))


class AsyncStream:
    """Async iterator over `AsyncChunk`s, for one task.

    Its thread starts with the first chunk that is asked for, and is MAX_CHUNKS_AHEAD chunks ahead
    of the reader at most. Whoever leaves it half read cancels it, or uses `async with`.
    """

    def __init__(self, begin: Callable[[], GenerationStream]) -> None:
        self._begin = begin
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stream: GenerationStream | None = None
        self._room = threading.Semaphore(MAX_CHUNKS_AHEAD)
        self._may_have_logprobs = True  # until a chunk has shown that nobody asked for them
        self._n_tokens: Counter[int] = Counter()  # handed over of each sequence
        # Of the event loop's thread:
        self._chunks: deque[AsyncChunk] = deque()
        self._changed = asyncio.Event()
        self.is_over = False
        self._error: BaseException | None = None
        # Of both:
        self.is_cancelled = False

    # --- the reader ----------------------------------------------------------------------------

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncChunk:
        await self._until(lambda: bool(self._chunks) or self.is_over)
        if self._chunks:
            self._room.release()
            return self._chunks.popleft()
        if self._error is not None:
            error, self._error = self._error, None
            raise error
        raise StopAsyncIteration

    @property
    def has_begun(self) -> bool:
        """Whether there is a `result`, as yet of no token perhaps."""
        return self._stream is not None

    async def started(self) -> None:
        """Return when the arguments have been found right; raises what is wrong with them."""
        await self._until(lambda: self._stream is not None or self.is_over)
        if self._stream is None and self._error is not None:
            raise self._error

    async def ended(self) -> None:
        """Return when no thread works for it any more, after `cancel` or at its end."""
        if self._loop is not None:
            await self._until(lambda: self.is_over)

    @property
    def result(self) -> GenerationResult:
        """The text so far; complete once the iterator is exhausted."""
        if self._stream is None:
            raise SpecdecError("the generation has not begun: there is no result yet")
        return self._stream.result

    def cancel(self) -> None:
        """End it soon; of the event loop's thread. Does not wait, `ended` does."""
        if self.is_cancelled or self.is_over:
            return
        self.is_cancelled = True
        self._chunks.clear()
        self._room.release()  # its thread may be waiting for the reader
        if self._loop is None:
            self.is_over = True
        elif self._stream is not None:  # it waits for the end of a pass, and may not do so here
            threading.Thread(target=self._stream.cancel, daemon=True).start()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        if self._loop is None and not self.is_over:
            self._loop = asyncio.get_running_loop()
            threading.Thread(target=self._run, name="specdec-stream", daemon=True).start()
        while not is_so():
            self._changed.clear()
            await self._changed.wait()

    # --- its thread ----------------------------------------------------------------------------

    def _run(self) -> None:
        error: BaseException | None = None
        try:
            self._stream = self._begin()
            self._tell(lambda: None)
            if not self.is_cancelled:
                self._hand_over(self._stream)
        except BaseException as raised:
            error = raised
        self._tell(lambda: self._end(error))

    def _hand_over(self, stream: GenerationStream) -> None:
        for chunk in stream:
            told = self._with_logprobs(chunk, stream)
            while not self._room.acquire(timeout=_POLL_SECONDS) and self._has_reader:
                pass
            if self.is_cancelled or not self._tell(partial(self._take, told)):
                stream.cancel()

    @property
    def _has_reader(self) -> bool:
        return self._loop is not None and not self._loop.is_closed()

    def _with_logprobs(self, chunk: StreamChunk, stream: GenerationStream) -> AsyncChunk:
        if not self._may_have_logprobs:
            return AsyncChunk(chunk.text, chunk.token_ids, chunk.index)
        begin = self._n_tokens[chunk.index]
        end = self._n_tokens[chunk.index] = begin + len(chunk.token_ids)
        output = stream.outputs[chunk.index]
        self._may_have_logprobs = output.logprobs is not None
        return AsyncChunk(
            chunk.text,
            chunk.token_ids,
            chunk.index,
            None if output.logprobs is None else output.logprobs[begin:end],
            None if output.top_logprobs is None else output.top_logprobs[begin:end],
        )

    def _tell(self, change: Callable[[], None]) -> bool:
        """Have the event loop's thread make a change; False where that loop is gone."""

        def make() -> None:
            change()
            self._changed.set()

        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(make)
        except RuntimeError:
            return False
        return True

    def _take(self, chunk: AsyncChunk) -> None:
        if not self.is_cancelled:
            self._chunks.append(chunk)

    def _end(self, error: BaseException | None) -> None:
        self._error, self.is_over = error, True
