"""Events of an answer: what every API's stream, and every whole answer, is made of.

A parser of the model's output turns the tokens of each step into deltas. The APIs only write them
in their own shapes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from specdec.dialogue.deltas import (
    Delta,
    ReasoningDelta,
    TextDelta,
    ToolCallArguments,
    ToolCallBegin,
    ToolCallCut,
)
from specdec.serve.errors import ApiError


class OutputParser(Protocol):
    """Incremental parser of one sequence's output."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Number of tokens pushed so far that belong to the reasoning, its tags included."""

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Delta]:
        """Add the text and the tokens of one step; return the deltas that are certain now.

        text may lag behind the tokens, and lacks those of special tokens.
        """

    def finish(self, reason: str) -> Sequence[Delta]:
        """Return the last deltas. reason: "stop" or "length", which may have cut a call off."""


@dataclass(frozen=True)
class Usage:
    """Counts and timings of a request so far. timings: fields of `responses.Timings`."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    accepted_tokens: int
    rejected_tokens: int
    timings: Mapping[str, Any]


@dataclass(frozen=True)
class Step:
    """Output of one step of a sequence. choice: index of the sequence over all of a request.

    logprobs: of the step's tokens if requested, in OpenAI's shape (text/logprobs.py).
    draft: fields of `responses.Draft` if requested; None at the sequence's end.
    usage: so far, if the request asked for it with every event.
    """

    choice: int
    deltas: Sequence[Delta]
    logprobs: Mapping[str, Any] | None = None
    draft: Mapping[str, int] | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of a request's prompts, in tokens: all, found in the prefix cache, and computed so
    far, the cached ones included. seconds: since the first of them was scheduled."""

    total: int
    cache: int
    processed: int
    seconds: float


@dataclass(frozen=True)
class Finish:
    """End of a sequence.

    reason: "stop", "length" or "tool_calls". stop: the stop string that ended it. note: which limit
    cut it off, for the reader.
    """

    choice: int
    reason: str
    stop: str | None = None
    note: str | None = None
    usage: Usage | None = None


@dataclass(frozen=True)
class End:
    """End of the whole answer."""

    usage: Usage


@dataclass(frozen=True)
class Failure:
    """Error after which nothing follows."""

    error: ApiError


Event = Step | Progress | Finish | End | Failure


@dataclass
class ToolCallContent:
    id: str
    name: str
    arguments: str = ""
    is_cut: bool = False


@dataclass
class Content:
    """All deltas of one sequence, put together.

    parts: ("reasoning", text), ("text", text) and ("call", ToolCallContent), in their order.
    """

    parts: list[tuple[str, Any]] = field(default_factory=list)

    def add(self, delta: Delta) -> None:
        match delta:
            case TextDelta(text):
                self._add_text("text", text)
            case ReasoningDelta(text):
                self._add_text("reasoning", text)
            case ToolCallBegin(_, id, name):
                self.parts.append(("call", ToolCallContent(id, name)))
            case ToolCallArguments(index, text):
                self.calls[index].arguments += text
            case ToolCallCut(index, _) if index is not None:
                self.calls[index].is_cut = True

    def drop_cut_calls(self) -> None:
        """Remove calls that are incomplete, so that the arguments of all others are JSON."""
        self.parts = [
            (kind, value) for kind, value in self.parts if kind != "call" or not value.is_cut
        ]

    def _add_text(self, kind: str, text: str) -> None:
        if self.parts and self.parts[-1][0] == kind:
            self.parts[-1] = (kind, self.parts[-1][1] + text)
        elif text:
            self.parts.append((kind, text))

    @property
    def text(self) -> str:
        return "".join(self._of("text"))

    @property
    def reasoning(self) -> str:
        return "".join(self._of("reasoning"))

    @property
    def calls(self) -> list[ToolCallContent]:
        return list(self._of("call"))

    def _of(self, kind: str) -> Iterator[Any]:
        return (value for name, value in self.parts if name == kind)


@dataclass(frozen=True)
class Choice:
    """One whole sequence of an answer. logprobs: of its tokens, see `Step`. prompt_logprobs: of
    its prompt's tokens, in vLLM's shape."""

    index: int
    content: Content
    finish: Finish
    logprobs: Mapping[str, Any] | None = None
    prompt_logprobs: Sequence[Any] | None = None
