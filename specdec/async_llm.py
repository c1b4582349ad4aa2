"""An LLM for asyncio programs: chunks come from the engine's thread to the event loop.

llm = AsyncLLM(specdec.load("TARGET", "DRAFT"))
async for chunk in llm.stream("def fibonacci(n):", max_tokens=64):
    print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from typing_extensions import Self

from offload.errors import SpecdecError
from offload.process.worker import POLL_SECONDS
from specdec.api import LLM
from specdec.engine.outputs import GenerationResult, StreamChunk
from specdec.engine.stream import GenerationStream
from specdec.sampling.logprobs import TopLogprobs
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import Prompt


@dataclass(frozen=True)
class AsyncChunk(StreamChunk):
    """What one step added, with what was asked for about its tokens."""

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

    It begins with the first chunk that is asked for. Whoever leaves it half read cancels it, or
    uses `async with`.
    """

    def __init__(self, begin: Callable[[], GenerationStream]) -> None:
        self._begin = begin
        self._starting: asyncio.Future[GenerationStream] | None = None
        self._stream: GenerationStream | None = None
        self._has_output = asyncio.Event()
        self._may_have_logprobs = True  # until a chunk has shown that nobody asked for them
        self._n_tokens: Counter[int] = Counter()  # handed over of each sequence
        self.is_cancelled = False

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncChunk:
        if not self.is_cancelled:
            await self.started()
        while not self.is_cancelled and self._stream is not None:
            self._has_output.clear()
            try:
                chunk = self._stream.next_nowait()
            except StopIteration:
                break
            if chunk is not None:
                return self._with_logprobs(chunk, self._stream)
            await self._has_output.wait()
        raise StopAsyncIteration

    @property
    def has_begun(self) -> bool:
        """Whether there is a `result`, as yet of no token perhaps."""
        return self._stream is not None

    @property
    def is_over(self) -> bool:
        """Whether no more is computed; chunks may be left."""
        if self._stream is not None:
            return self._stream.is_over
        return self.is_cancelled if self._starting is None else self._starting.done()

    async def started(self) -> None:
        """Return when the arguments have been found right; raises what is wrong with them."""
        if self._starting is None:
            loop = asyncio.get_running_loop()
            self._starting = loop.run_in_executor(None, self._start, loop)
        await asyncio.shield(self._starting)

    async def ended(self) -> None:
        """Return when nothing is computed for it any more, after `cancel` or at its end."""
        if self._starting is not None:
            with suppress(Exception):  # it is the reader's
                await asyncio.shield(self._starting)
        while not self.is_over:
            if self.is_cancelled and self._stream is not None:
                self._stream.cancel_soon()  # a request may have come before the pass had begun
            await asyncio.sleep(POLL_SECONDS)

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
        self._has_output.set()
        if self._stream is not None:
            self._stream.cancel_soon()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.cancel()

    def _start(self, loop: asyncio.AbstractEventLoop) -> GenerationStream:
        """Check and start it, in a thread of the loop's pool: a long prompt takes its time."""
        stream = self._begin()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is gone
                loop.call_soon_threadsafe(self._has_output.set)

        self._stream = stream
        if self.is_cancelled:
            stream.cancel_soon()
        else:
            stream.start(on_output=wake)
        return stream

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
