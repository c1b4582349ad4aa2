"""Answers: how an API writes the events of a request, whole or as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any

from specdec.serve.events import Choice, End, Event, Failure, Finish, Progress, Step, Usage
from specdec.serve.jobs import JobHead
from specdec.serve.responses import PromptProgress, ResponseModel

Frames = Iterator[ResponseModel]


class Answer(ABC):
    """Answer of one route to one request.

    media_type, ping and closing are those of its streams: ping is sent while nothing happens,
    closing at the end. request: fields of the request that the answer repeats.
    """

    media_type = "text/event-stream"
    ping = b": still computing\n\n"  # a comment: clients skip it
    closing = b""

    def __init__(self, model: str, job: JobHead, request: Any = None) -> None:
        self.model, self.job, self.request = model, job, request

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> ResponseModel: ...

    @abstractmethod
    def begin(self) -> Frames:
        """Yield what a stream begins with."""

    @abstractmethod
    def step(self, step: Step) -> Frames: ...

    @abstractmethod
    def progress(self, progress: PromptProgress) -> Frames:
        """Yield the prompt's progress, which the request asked for."""

    @abstractmethod
    def finish(self, finish: Finish) -> Frames: ...

    @abstractmethod
    def end(self, usage: Usage) -> Frames:
        """Yield what a stream ends with, after all its sequences."""

    def failure(self, failure: Failure) -> Frames:
        """Yield what a stream that failed ends with."""
        yield failure.error.body

    def write(self, event: Event) -> Frames:
        match event:
            case Step():
                yield from self.step(event)
            case Progress() if self.job.tells_progress:
                yield from self.progress(
                    PromptProgress(
                        total=event.total,
                        cache=event.cache,
                        processed=event.processed,
                        time_ms=1000 * event.seconds,
                    )
                )
            case Finish():
                yield from self.finish(event)
            case End(usage):
                yield from self.end(usage)
            case Failure():
                yield from self.failure(event)

    def encode(self, frame: ResponseModel) -> bytes:
        return b"data: " + frame.to_json() + b"\n\n"
