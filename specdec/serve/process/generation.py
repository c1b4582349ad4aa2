"""One generating request in the engine's process: from its form to events."""

from __future__ import annotations

import asyncio
import time
from asyncio import FIRST_COMPLETED
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from specdec.api import LLM
from specdec.async_llm import AsyncChunk, AsyncLLM, AsyncStream
from specdec.engine.sequences.outputs import GenerationResult, PromptProgress
from specdec.metrics.stats import GenerationStats
from specdec.serve.errors import ApiError, draining
from specdec.serve.events import End, Event, OutputParser, Progress
from specdec.serve.jobs import Job
from specdec.serve.outputs import OutputEvents
from specdec.serve.parsers import output_parser
from specdec.serve.process.messages import WINDOW, MessageSocket, Output, Whole
from specdec.serve.process.translation import Log, translated

_SIGN_SECONDS = 1.0
"""Least seconds between two messages that only tell of progress."""


class Generation:
    """One request, from its start to the end of all work for it.

    fail: takes (ApiError, whether the model's files cannot be read).
    """

    def __init__(
        self,
        id: int,
        llm: AsyncLLM,
        socket: MessageSocket,
        fail: Callable[[ApiError, bool], None],
        log: Log,
    ) -> None:
        self._id, self._llm, self._socket = id, llm, socket
        self._fail, self._log = fail, log
        self._streams: list[AsyncStream] = []
        self._last_sign = 0.0
        self._num_waiting = 0  # values that the client has not taken
        self._has_capacity = asyncio.Event()

    async def run(self, make: Callable[[], Awaitable[Job]]) -> None:
        """Run a job to its end; cancelling the task cancels it, and waits for the end."""
        try:
            with translated(self._fail, self._log):
                await self._generate(await make())
        finally:
            for stream in self._streams:
                stream.cancel()
            for stream in self._streams:
                await stream.ended()

    @property
    def stats(self) -> list[GenerationStats]:
        """Statistics of the prompts that have begun, without the times of single passes."""
        stats = [stream.result.stats for stream in self._streams if stream.has_begun]
        return [replace(stat, pass_times=()) for stat in stats]

    async def _generate(self, job: Job) -> None:
        llm = self._llm
        self._streams = [
            llm.stream(
                ids,
                job.params,
                logits_processors=job.processors,
                priority=job.priority,
                cache_prompt=job.caches_prompt,
            )
            for ids in job.prompts
        ]
        self._tell_progress(job)
        # Errors of the request are known once the first stream has started: its status follows.
        await self._streams[0].started()
        self._send(job.head)
        if job.streams_output:
            async for event in self._events(job, llm.llm):
                await self._capacity()
                self._send(event)
            return
        results = list(await asyncio.gather(*(self._result(stream) for stream in self._streams)))
        events = OutputEvents(
            job, llm.llm.tokenizer, lambda: _new_parser(job, llm.llm), lambda: results
        )
        choices = events.whole()
        self._send(Whole(choices, events.usage))

    def _tell_progress(self, job: Job) -> None:
        """Send the progress of the prompts as they are computed."""
        parts: dict[int, PromptProgress] = {}
        num_tokens = sum(map(len, job.prompts))

        def note(index: int, progress: PromptProgress) -> None:
            parts[index] = progress
            n_cached = sum(part.num_cached for part in parts.values())
            n_processed = sum(part.num_processed for part in parts.values())
            seconds = max(part.seconds for part in parts.values())
            self._send(Progress(num_tokens, n_cached, n_processed, seconds))

        for index, stream in enumerate(self._streams):
            stream.on_progress = partial(note, index)

    def take(self, num_values: int) -> None:
        """Note that the client has taken so many more values."""
        self._num_waiting -= num_values
        self._has_capacity.set()

    async def _capacity(self) -> None:
        """Wait until one more value may wait in the server; the engine computes on meanwhile."""
        while self._num_waiting >= WINDOW:
            self._has_capacity.clear()
            await self._has_capacity.wait()

    def _send(self, value: Any) -> None:
        self._num_waiting += 1
        self._last_sign = time.monotonic()
        self._socket.send(Output(self._id, value))

    def _sign(self) -> None:
        """Tell that the request goes on."""
        if time.monotonic() - self._last_sign > _SIGN_SECONDS:
            self._send(None)

    async def _result(self, stream: AsyncStream) -> GenerationResult:
        async for _ in stream:
            self._sign()
        if stream.is_cancelled:
            raise draining()
        return stream.result

    async def _events(self, job: Job, llm: LLM) -> AsyncIterator[Event]:
        streams = list(self._streams)

        def results() -> list[GenerationResult]:
            return [stream.result for stream in streams if stream.has_begun]

        events = OutputEvents(job, llm.tokenizer, lambda: _new_parser(job, llm), results)
        async for index, chunk in _chunks(streams):
            base = index * job.n_per_prompt
            copies = [base + copy * job.params.n for copy in range(job.n_copies)]
            for event in _events_of(streams[index], chunk, events, copies):
                yield event
        yield End(events.usage)


def _new_parser(job: Job, llm: LLM) -> OutputParser:
    return output_parser(job, llm.tokenizer)


async def _chunks(
    streams: Sequence[AsyncStream],
) -> AsyncIterator[tuple[int, AsyncChunk | None]]:
    """Yield (index of the stream, its chunk or None at its end) as chunks arrive."""
    pending = {asyncio.create_task(_next(stream)): i for i, stream in enumerate(streams)}
    try:
        while pending:
            done, _ = await asyncio.wait(pending, return_when=FIRST_COMPLETED)
            for task in done:
                index, chunk = pending.pop(task), task.result()
                yield index, chunk
                if chunk is not None:
                    pending[asyncio.create_task(_next(streams[index]))] = index
    finally:
        for task in pending:
            task.cancel()


async def _next(stream: AsyncStream) -> AsyncChunk | None:
    """Return the next chunk; None at the end. Raises ApiError if the engine ended the stream."""
    async for chunk in stream:
        return chunk
    if stream.is_cancelled:
        raise draining()
    return None


def _events_of(
    stream: AsyncStream, chunk: AsyncChunk | None, events: OutputEvents, copies: Sequence[int]
) -> Iterator[Event]:
    """Yield the events of a chunk of one prompt, or of its end. copies: the first choice of each of
    its equal copies."""
    for copy in copies:
        if chunk is not None:
            yield events.step(chunk, copy + chunk.index, stream.prompt_logprobs)
        else:
            for i, output in enumerate(stream.result.outputs):
                yield from events.finish(output, copy + i)
