"""Answers: how an API writes the events of a request, whole or as a stream."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

from specdec.serve.events import Choice, End, Event, Failure, Finish, Step, Usage
from specdec.serve.jobs import Job
from specdec.serve.responses import ResponseModel
from specdec.text.contract import TokenSpeller

Frames = Iterator[ResponseModel]


class Answer(ABC):
    """Answer of one route to one request.

    media_type, ping and closing are those of its streams: ping is sent while nothing happens,
    closing at the end.
    """

    media_type = "text/event-stream"
    ping = b": still computing\n\n"  # a comment: clients skip it
    closing = b""

    def __init__(self, model: str, job: Job, tokenizer: TokenSpeller) -> None:
        self.model, self.job, self.tokenizer = model, job, tokenizer

    @abstractmethod
    def whole(self, choices: Sequence[Choice], usage: Usage) -> ResponseModel: ...

    @abstractmethod
    def begin(self) -> Frames:
        """Yield what a stream begins with."""

    @abstractmethod
    def step(self, step: Step) -> Frames: ...

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
            case Finish():
                yield from self.finish(event)
            case End(usage):
                yield from self.end(usage)
            case Failure():
                yield from self.failure(event)

    def encode(self, frame: ResponseModel) -> bytes:
        return b"data: " + frame.to_json() + b"\n\n"
