"""Deltas: the pieces that a model's output is parsed into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class TextDelta:
    """Text of the answer."""

    text: str


@dataclass(frozen=True)
class ReasoningDelta:
    """Text of the reasoning before the answer."""

    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    """Begin of the index-th tool call of an answer; its arguments follow."""

    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolCallArguments:
    """More of the arguments of a tool call. All of them, joined, are a JSON object, unless a
    ToolCallCut follows."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallCut:
    """End of a tool call that is incomplete, or broken.

    index: None if not even its name is known, so that it has no ToolCallBegin.
    note: what happened, for the reader.
    """

    index: int | None
    note: str


Delta = TextDelta | ReasoningDelta | ToolCallBegin | ToolCallArguments | ToolCallCut


def joined(deltas: Iterable[Delta]) -> list[Delta]:
    """Return the deltas with neighbouring texts of one kind joined."""
    result: list[Delta] = []
    for delta in deltas:
        match result[-1:], delta:
            case ([TextDelta(before)], TextDelta(text)):
                result[-1] = TextDelta(before + text)
            case ([ReasoningDelta(before)], ReasoningDelta(text)):
                result[-1] = ReasoningDelta(before + text)
            case ([ToolCallArguments(i, before)], ToolCallArguments(j, text)) if i == j:
                result[-1] = ToolCallArguments(i, before + text)
            case _:
                result.append(delta)
    return result
