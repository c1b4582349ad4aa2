"""AsyncLLM: an LLM for asyncio programs; chunks go from the engine's thread to the event loop.

async with await AsyncLLM.load("TARGET", "DRAFT") as llm:
    async for chunk in llm.stream("def fibonacci(n):", max_tokens=64):
        print(chunk.text, end="", flush=True)
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

from typing_extensions import Self, Unpack

from offload.errors import SpecdecError
from offload.process.worker import POLL_SECONDS
from specdec.api import LLM, GenerateKeywords, load
from specdec.engine.sequences.outputs import GenerationResult, PromptProgress, StreamChunk
from specdec.engine.stream import GenerationStream
from specdec.planning.keywords import LoadKeywords
from specdec.planning.run_plan import RunPlan
from specdec.sampling.logprobs import PromptLogprobs, TopLogprobs
from specdec.sampling.params import SamplingParams
from specdec.text.prompts import Prompt


@dataclass(frozen=True)
class AsyncChunk(StreamChunk):
    """Text and tokens that one step added, with the logprobs requested."""

    logprobs: tuple[float, ...] | None = None
    top_logprobs: tuple[TopLogprobs, ...] | None = None


class AsyncLLM:
    """A loaded LLM for any number of tasks of one event loop.

    The caller still owns an LLM that is given: closing it ends all generations here. One that
    `load` has made is closed by `close`, or by leaving `async with`.
    """

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @classmethod
    async def load(
        cls,
        model: str | Path,
        draft_model: str | Path | None = None,
        *,
        progress: Any = None,
        **options: Unpack[LoadKeywords],
    ) -> Self:
        """Load in another thread, while the event loop goes on; the arguments are `specdec.load`'s.

        Cancelling the task does not stop the loading: what was loaded is closed then.
        """
        loop = asyncio.get_running_loop()
        loading = loop.run_in_executor(
            None, partial(load, model, draft_model, progress=progress, **options)
        )
        try:
            return cls(await asyncio.shield(loading))
        except asyncio.CancelledError:
            loading.add_done_callback(partial(_close_loaded, loop))
            raise

    async def set_memory_budget(self, memory_budget: str | int) -> RunPlan:
        """Change the memory budget, as `LLM.set_memory_budget`, while the event loop goes on."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(None, self.llm.set_memory_budget, memory_budget)

    async def close(self) -> None:
        """Free the models, as `LLM.close`, while the event loop goes on."""
        await asyncio.get_running_loop().run_in_executor(None, self.llm.close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(None, self.llm.__exit__, exc_type, exc, traceback)

    def __repr__(self) -> str:
        return f"<specdec.AsyncLLM of {self.llm!r}>"

    async def generate(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> GenerationResult:
        """Generate to the end; the arguments are those of `LLM.stream`.

        Cancelling the task cancels the generation.
        """
        async with self.stream(prompt, sampling, **options) as stream:
            async for _ in stream:
                pass
            return stream.result

    def stream(
        self,
        prompt: Prompt,
        sampling: SamplingParams | None = None,
        **options: Unpack[GenerateKeywords],
    ) -> AsyncStream:
        """Return an async iterator over chunks; the arguments are those of `LLM.stream`, whose
        errors are raised by `started` or with the first chunk."""
        return AsyncStream(lambda: self.llm.stream(prompt, sampling, **options))


def _close_loaded(loop: asyncio.AbstractEventLoop, loading: asyncio.Future[LLM]) -> None:
    """Close an LLM that nobody waits for any more, if it was loaded."""
    if not loading.cancelled() and loading.exception() is None:
        loop.run_in_executor(None, loading.result().close)


class AsyncStream:
    """Async iterator over `AsyncChunk`s, for one task.

    It starts when the first chunk is requested. Cancelling the task that waits for a chunk cancels
    it; a reader that stops early for another reason must cancel it or use `async with`.

    on_progress: called with the prompt's progress while the next chunk is awaited.
    """

    def __init__(self, begin: Callable[[], GenerationStream]) -> None:
        self._begin = begin
        self._starting: asyncio.Future[GenerationStream] | None = None
        self._stream: GenerationStream | None = None
        self._has_output = asyncio.Event()
        self._may_have_logprobs = True  # until a chunk shows that none were requested
        self._n_tokens: Counter[int] = Counter()  # yielded so far, by sequence
        self._progress: PromptProgress | None = None
        self.is_cancelled = False
        self.on_progress: Callable[[PromptProgress], None] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncChunk:
        try:
            return await self._next()
        except asyncio.CancelledError:  # as in an async generator, nothing follows it
            self.cancel()
            raise

    async def _next(self) -> AsyncChunk:
        if not self.is_cancelled:
            await self.started()
        while not self.is_cancelled and self._stream is not None:
            self._has_output.clear()
            self._tell_progress(self._stream)
            try:
                chunk = self._stream.next_nowait()
            except StopIteration:
                break
            if chunk is not None:
                return self._with_logprobs(chunk, self._stream)
            await self._has_output.wait()
        raise StopAsyncIteration

    def _tell_progress(self, stream: GenerationStream) -> None:
        progress = stream.progress
        if progress is not None and progress != self._progress:
            self._progress = progress
            if self.on_progress is not None:
                self.on_progress(progress)

    @property
    def has_begun(self) -> bool:
        """Whether there is a `result`, which may have no token yet."""
        return self._stream is not None

    @property
    def is_over(self) -> bool:
        """Whether nothing more is computed; unread chunks may be left."""
        if self._stream is not None:
            return self._stream.is_over
        return self.is_cancelled if self._starting is None else self._starting.done()

    async def started(self) -> None:
        """Start it, and wait until its arguments have been checked. Raises their errors."""
        if self._starting is None:
            loop = asyncio.get_running_loop()
            self._starting = loop.run_in_executor(None, self._start, loop)
        await asyncio.shield(self._starting)

    async def ended(self) -> None:
        """Wait until nothing is computed for it any more, after `cancel` or at its end."""
        if self._starting is not None:
            with suppress(Exception):  # the reader gets it
                await asyncio.shield(self._starting)
        while not self.is_over:
            if self.is_cancelled and self._stream is not None:
                self._stream.cancel_soon()  # again: the first call may have preceded the pass
            await asyncio.sleep(POLL_SECONDS)

    @property
    def result(self) -> GenerationResult:
        """Outputs and statistics so far; complete once the iterator is exhausted."""
        if self._stream is None:
            raise SpecdecError("the generation has not begun: there is no result yet")
        return self._stream.result

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Log-probabilities of the prompt's tokens, if requested, once it is computed."""
        return None if self._stream is None else self._stream.prompt_logprobs

    def cancel(self) -> None:
        """Cancel it without waiting (see `ended`); call it in the event loop's thread."""
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
        """Check and start it, in a thread of the loop's pool: a long prompt takes time."""
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
