"""The engine's steps, one at a time, as a test permits them."""

from __future__ import annotations

from threading import Semaphore
from typing import Any

from typing_extensions import Self

from specdec.api import LLM
from specdec.engine.sequences.outputs import StreamChunk

_MAX_SECONDS = 120.0


class Stepping:
    """Let the engine run a step within the block only if a test asks for it."""

    def __init__(self, llm: LLM) -> None:
        self._engine: Any = llm.session.engine
        self._drain, self._one_step = self._engine.drain_inbox, self._engine.run_step
        self._permits, self._done = Semaphore(0), Semaphore(0)
        self._is_free = False

    def __enter__(self) -> Self:
        self._engine.run_step = self._when_reported
        return self

    def __exit__(self, *exception: object) -> None:
        self.free()

    def _when_reported(self) -> None:
        if not self._is_free:
            self._permits.acquire()
            self._drain()  # requests that came meanwhile take part
        if not self._engine.is_closing:
            self._one_step()
        self._done.release()

    def step(self, n_steps: int = 1) -> None:
        """Let the engine, which has something to do, run steps; return after the last one."""
        for _ in range(n_steps):
            self._permits.release()
            assert self._done.acquire(timeout=_MAX_SECONDS), "the engine has nothing to do"

    def next(self, stream: Any) -> StreamChunk:
        """Return the next chunk of a stream, after as many steps as that takes."""
        stream._start()
        while (chunk := stream.next_nowait()) is None:
            self.step()
        return chunk

    def rest(self, stream: Any) -> list[StreamChunk]:
        """Return the chunks up to the end of a stream."""
        chunks = []
        while True:
            try:
                chunks.append(self.next(stream))
            except StopIteration:
                return chunks

    def cancel(self, *streams: Any) -> None:
        for stream in streams:
            stream.cancel_soon()
        self.step()

    def free(self) -> None:
        """Let the engine run by itself."""
        self._is_free = True
        self._engine.run_step = self._one_step
        self._permits.release()

    def close(self, llm: LLM) -> None:
        """Close the model before another step is run."""
        self._engine._is_closing = True
        self.free()
        llm.close()
