"""The parser of a request's output."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.serve.events import Delta, OutputParser, TextDelta, ToolCallArguments, ToolCallBegin
from specdec.serve.jobs import Job
from specdec.serve.tools import ToolCallParser


def output_parser(job: Job) -> OutputParser:
    """Return a new parser for one sequence of a request."""
    return CallParser(job.tools, job.max_calls) if job.tools else PlainParser()


class PlainParser:
    """Parser of an output that is text only."""

    num_reasoning_tokens = 0

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Delta]:
        return [TextDelta(text)] if text else []

    def finish(self, reason: str) -> Sequence[Delta]:
        return []


class CallParser:
    """Parser of text and tool calls; see ToolCallParser."""

    num_reasoning_tokens = 0

    def __init__(self, names: Sequence[str], limit: int | None) -> None:
        self._parser = ToolCallParser(names, limit)

    def push(self, text: str, token_ids: Sequence[int]) -> Sequence[Delta]:
        shown = self._parser.push(text)
        return [TextDelta(shown)] if shown else []

    def finish(self, reason: str) -> Sequence[Delta]:
        rest, calls = self._parser.finish()
        deltas: list[Delta] = [TextDelta(rest)] if rest else []
        for i, call in enumerate(calls):
            deltas.append(ToolCallBegin(i, call.id, call.function.name))
            deltas.append(ToolCallArguments(i, call.function.arguments))
        return deltas
